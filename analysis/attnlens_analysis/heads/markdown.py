"""Renders a report as Markdown."""

from collections.abc import Iterator, Sequence

import numpy as np

from attnlens_analysis.heads.distances import LONG_RANGE_DIVISOR, MAX_LOCAL_DISTANCE, MIN_CONTENT_TOKENS
from attnlens_analysis.heads.intervals import NUM_RESAMPLES
from attnlens_analysis.heads.labels import CAVEATS, MIN_WORDS, RULES, is_winner
from attnlens_analysis.heads.measures import measures
from attnlens_analysis.heads.patterns import MIN_TOKENS
from attnlens_analysis.heads.report import HeadReport
from attnlens_analysis.heads.syntax import RelationScore
from attnlens_analysis.heads.tables import interval_tables
from attnlens_analysis.heads.tied import TiedDiagonal

ARROWS = {"to_head": "to head", "to_dependent": "to dependent"}


def as_markdown(report: HeadReport) -> str:
    """Render the report as Markdown."""
    return "\n".join(_lines(report)) + "\n"


def data_sentences(report: HeadReport) -> Iterator[str]:
    """Yield sentences about the data of each measurement."""
    patterns = report.patterns
    license_text = f", {report.corpus_license}" if report.corpus_license else ""
    yield f"{report.num_sentences:,} sentences from {report.corpus_name}{license_text}."
    yield (
        f"Patterns: {patterns.num_texts:,} sentences with at least {MIN_TOKENS} tokens, "
        f"{patterns.num_rows:,} rows. Uniform attention assigns {patterns.punctuation_share:.3f} to "
        f"punctuation, and {patterns.duplicate_chance:.3f} to other occurrences of a token in the "
        f"{patterns.num_duplicate_rows:,} rows where there are any."
    )
    if report.syntax is not None:
        yield (
            "Syntax: the best head of each relation is selected on sentences 1, 3, 5, ... and scored on the "
            "other sentences. A document may occur in both halves. Fixed: the best fixed distance."
        )
    yield from _test_sentences(report)
    if report.copies is not None:
        yield (
            f"Copies: {report.copies.num_sequences} sequences of {report.copies.half_length} random tokens, "
            f"each repeated once; chance {report.copies.chance:.3f}."
        )
    if report.tied is not None:
        yield _tied_sentence(report.tied)
    if report.importance is not None:
        yield (
            f"Importance: {report.importance.num_texts} texts. The Spearman correlation of ablation and "
            f"contribution is {report.importance.agreement:.3f}."
        )
    if report.task is not None:
        yield (
            f"Task: {report.task.num_pairs} text pairs. Spearman correlation with all heads: "
            f"{report.task.spearman:.4f}."
        )


def _test_sentences(report: HeadReport) -> Iterator[str]:
    if report.distances is not None:
        distances = report.distances
        yield (
            f"Near and distant tokens: {distances.num_texts:,} sentences with at least {MIN_CONTENT_TOKENS} "
            f"tokens, {distances.num_rows:,} rows, without special tokens. Uniform attention assigns "
            f"{distances.local.uniform:.3f} to tokens within {MAX_LOCAL_DISTANCE} tokens, and "
            f"{distances.long_range.uniform:.3f} to tokens farther than 1/{LONG_RANGE_DIVISOR} of the text."
        )
    if report.coreference is not None:
        total = report.coreference.scores[0]
        yield (
            f"Pronouns: {total.num_chosen + total.num_scored} English test sentences. Fixed: the best fixed "
            "distance. Nearest: the nearest noun of the same kind."
        )
    if report.relatedness is not None:
        yield (
            f"Related words: {report.relatedness.num_items} English test texts in three variants. 95 %: "
            f"bootstrap over texts with {NUM_RESAMPLES:,} samples."
        )


def _tied_sentence(tied: TiedDiagonal) -> str:
    measured = tied.tied[np.isfinite(tied.tied)]
    return (
        f"Diagonal: the token itself has the largest weight in {100 * tied.own.mean():.1f} % of "
        f"{tied.num_rows:,} rows (chance {100 * tied.chance:.1f} %), and in {100 * measured.mean():.1f} % "
        "with query weights replaced by key weights."
    )


LABEL_TITLES = ("label", "heads", "rule")


def label_rows(report: HeadReport) -> list[tuple[str, str, str]]:
    """Return the name, heads and rule of each label. Heads include the relation or kind, if there is one."""
    rows = []
    for label, rule in RULES.items():
        kind = label.removesuffix("RELATION").removesuffix("KIND")
        heads = [
            str(labeled.head) if name == label else f"{labeled.head} ({name.removeprefix(kind)})"
            for labeled in report.labeled
            for name in labeled.labels
            if name == label or (kind != label and name.startswith(kind))
        ]
        rows.append((label, ", ".join(heads) or "none", rule))
    return rows


def relation_cells(score: RelationScore) -> tuple[str, ...]:
    """Return the table cells of a relation, matching `RELATION_TITLES`."""
    low, high = score.interval
    return (
        score.relation,
        str(score.head),
        ARROWS[score.direction],
        f"{score.num_scored:,}",
        f"{100 * score.scored:.1f}",
        f"{100 * low:.1f}-{100 * high:.1f}",
        f"{100 * score.offset_scored:.1f} ({score.offset:+d})",
        "yes" if is_winner(score) else "",
    )


RELATION_TITLES = (
    "relation",
    "head",
    "direction",
    "words",
    "found %",
    "95 %",
    "fixed %",
    "label",
)


def _lines(report: HeadReport) -> Iterator[str]:
    yield f"# Attention heads of {report.model_name}"
    yield ""
    yield from (f"- {sentence}" for sentence in data_sentences(report))
    yield from (f"- {note}" for note in report.notes)
    yield ""
    yield "## Labels"
    yield ""
    yield from _table(LABEL_TITLES, label_rows(report))
    yield ""
    yield from (f"- {caveat}" for caveat in CAVEATS)
    yield ""
    if report.syntax is not None:
        yield "## Syntax"
        yield ""
        shown = [score for score in report.syntax if score.num_scored >= MIN_WORDS]
        yield from _table(RELATION_TITLES, [relation_cells(score) for score in shown])
        yield ""
        yield f"Relations with fewer than {MIN_WORDS} words are omitted."
        yield ""
    for table in interval_tables(report):
        yield f"## {table.title}"
        yield ""
        yield table.explanation
        yield ""
        yield from _table(table.headings, table.rows)
        yield ""
    columns = measures(report)
    yield "## Measures"
    yield ""
    yield from (f"- {column.title}: {column.meaning}" for column in columns)
    yield ""
    yield from _table(
        ("head", *(column.title for column in columns)),
        [
            (str(head), *(f"{column.values[index]:.{column.digits}f}" for column in columns))
            for index, head in enumerate(report.heads)
        ],
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    yield from (f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows)
