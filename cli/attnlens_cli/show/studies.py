"""Output of `attnlens heads` and `attnlens profile`."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Table

from attnlens_analysis.heads import HeadReport
from attnlens_analysis.heads.labels import CAVEATS, MIN_WORDS, RULES
from attnlens_analysis.heads.markdown import RELATION_TITLES, data_sentences, relation_cells
from attnlens_analysis.heads.measures import measures
from attnlens_analysis.heads.tables import TEXT_HEADINGS, interval_tables
from attnlens_analysis.profile import ATTENTION, METHOD_NOTE, PARTS, Profile, describe, describe_crossover
from attnlens_cli.printable import printable
from attnlens_cli.show.console import make_console

_MB = 1e6
_PART_HEADINGS = {"projections": "projec-\ntions", "feed-forward": "feed-\nforward"}
_HEAD_COLUMNS = (
    "previous",
    "next",
    "first",
    "earlier_copy",
    "entropy_normalized",
    "ablation",
    "contribution",
    "task_change",
)


def show_heads(report: HeadReport) -> None:
    """Print the labeled heads, the best head for each relation, and the labeling rules."""
    console = make_console()
    console.print(f"{printable(report.model_name)}: {len(report.heads)} heads", soft_wrap=True)
    for sentence in (*data_sentences(report), *report.notes):
        console.print(f"- {printable(sentence)}")
    console.print()
    console.print(_labels_table(report))
    if report.syntax is not None:
        shown = [relation_cells(score) for score in report.syntax if score.num_scored >= MIN_WORDS]
        title = f"Best head for each relation with at least {MIN_WORDS} words"
        console.print(_table(title, RELATION_TITLES, shown))
    for table in interval_tables(report):
        console.print(_table(table.title, table.headings, table.rows))
    console.print("Labeling rules:")
    for label, rule in RULES.items():
        console.print(f"- {label}: {rule}")
    for caveat in CAVEATS:
        console.print(caveat)


def _labels_table(report: HeadReport) -> Table:
    columns = [column for column in measures(report) if column.name in _HEAD_COLUMNS]
    rows: list[tuple[str, ...]] = []
    for labeled in report.labeled:
        index = report.heads.index(labeled.head)
        numbers = (f"{column.values[index]:.{column.digits}f}" for column in columns)
        rows.append((str(labeled.head), *numbers, ", ".join(labeled.labels)))
    titles = (
        "head",
        *(column.title.replace(" / ", "\n/ ").replace("earlier ", "earlier\n") for column in columns),
        "labels",
    )
    return _table(f"{len(rows)} labeled heads; use --json, --markdown or --html for all heads", titles, rows)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in headings:
        is_name = heading in {"relation", "direction", "labels", *TEXT_HEADINGS}
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=heading != "labels")
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    return table


def show_profile(measured: Profile) -> None:
    """Print the run time at each length, and the share of each part."""
    console = make_console()
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    parts = [_PART_HEADINGS.get(part, part) for part in PARTS]
    for heading in ("tokens", "ms", *parts, "atten-\ntion", "memory\nMB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for length in measured.lengths:
        shares = [f"{100 * share:.1f}" for share in (*length.shares.values(), length.attention_share)]
        memory = f"{length.peak_bytes / _MB:,.1f}"
        table.add_row(f"{length.length:,}", f"{length.total_ms:,.1f}", *shares, memory)
    console.print(f"{describe(measured)}; share of run time in %", soft_wrap=True)
    console.print(table)
    console.print(f"attention: {', '.join(ATTENTION)}. {describe_crossover(measured)}")
    console.print(METHOD_NOTE)
