"""`attnlens heads`: measure the function of every attention head."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import csv
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnlens_cli.files.output_file import PAGE_SUFFIXES, checked_path, replacing
from attnlens_cli.frame.options import Command, in_section, option
from attnlens_cli.printable import printable_json
from attnlens_cli.show.progress import shown_stages

if TYPE_CHECKING:
    from attnlens_analysis.heads import Corpus, HeadReport, ScoredPair

EPILOG = """\b
Example:
  attnlens heads bundles/minilm
  attnlens heads bundles/minilm --conllu en_ewt-ud-dev.conllu --json heads.json --html heads.html
  attnlens heads bundles/minilm --texts sentences.txt --stsb sts-dev.csv"""

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NUM_COLUMNS = 3

_measure, _output = in_section("Measurement"), in_section("Output")


@click.command(cls=Command, epilog=EPILOG)
@click.argument("bundle", metavar="BUNDLE", type=click.Path(path_type=Path))
@_measure(
    "--conllu",
    type=_FILE,
    metavar="FILE",
    help="Treebank in CoNLL-U format.  [default: 500 sentences of UD English EWT, included in attnlens]",
)
@_measure(
    "--texts", type=_FILE, metavar="FILE", help="File with one text per line, for all measures except syntax."
)
@_measure(
    "--importance-texts",
    type=click.IntRange(min=0),
    default=25,
    show_default=True,
    help="Number of texts to run without each head; 0 to skip the importance of heads.",
)
@_measure(
    "--stsb",
    type=_FILE,
    metavar="FILE",
    help="CSV file of text pairs with human scores (text, text, score), to measure the worth of each head.",
)
@_measure(
    "--pairs",
    type=click.IntRange(min=2),
    default=300,
    show_default=True,
    help="Number of pairs of --stsb to use, evenly spaced.",
)
@_output("--json", "json_name", metavar="FILE", help="Write all measurements as JSON.")
@_output("--markdown", "markdown_name", metavar="FILE", help="Write a report in Markdown.")
@_output("--html", "html_name", metavar="FILE", help="Write a self-contained HTML report.")
@option(
    "--threads",
    type=click.IntRange(min=0),
    default=0,
    show_default="one per physical core",
    help="Number of threads of ONNX Runtime.",
)
def heads(
    bundle: Path,
    conllu: Path | None,
    texts: Path | None,
    importance_texts: int,
    stsb: Path | None,
    pairs: int,
    json_name: str | None,
    markdown_name: str | None,
    html_name: str | None,
    threads: int,
) -> None:
    """Measure the function of every attention head of the model in BUNDLE.

    Measures the positions and distances that a head attends to, the syntactic relations that it follows, its
    attention from pronouns to antecedents and to repeated and related words, and the change of the embedding
    without it. Labels follow documented rules. Runs in this process, on the CPU.
    """
    from attnlens_analysis.heads import TooShortError, TreebankError, measure_heads
    from attnlens_server.bundle import open_bundle
    from attnlens_server.errors import StartupError

    if conllu is not None and texts is not None:
        raise click.UsageError("--conllu and --texts exclude each other: use one of them")
    outputs = {
        suffixes[0]: checked_path(name, f"--{option}", suffixes)
        for name, option, suffixes in (
            (json_name, "json", (".json",)),
            (markdown_name, "markdown", (".md", ".markdown")),
            (html_name, "html", PAGE_SUFFIXES),
        )
        if name is not None
    }
    try:
        corpus = _corpus(conllu, texts)
        scored_pairs = _read_pairs(stsb, pairs) if stsb is not None else []
        with shown_stages() as stages:
            report = measure_heads(
                open_bundle(bundle),
                corpus,
                lambda stage, done, total: stages(stage, "", done, total),
                num_importance_texts=importance_texts,
                pairs=scored_pairs,
                threads=threads,
            )
    except (StartupError, TooShortError, TreebankError) as error:
        raise click.ClickException(str(error)) from error
    _write(report, outputs)


def _corpus(conllu: Path | None, texts: Path | None) -> "Corpus":
    from attnlens_analysis.heads import read_conllu, read_texts, shipped_treebank

    if conllu is not None:
        return read_conllu(conllu)
    return read_texts(texts) if texts is not None else shipped_treebank()


def _read_pairs(path: Path, number: int) -> "list[ScoredPair]":
    """Read rows of two texts and a score. A first row without a number is a heading."""
    from attnlens_analysis.heads import ScoredPair
    from attnlens_analysis.heads.importance import spread

    pairs = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                if len(row) < _NUM_COLUMNS:
                    raise click.ClickException(f"{where}: {len(row)} columns instead of text, text, score")
                try:
                    pairs.append(ScoredPair(row[0], row[1], float(row[2])))
                except ValueError as error:
                    if rows.line_num > 1:
                        raise click.ClickException(
                            f"{where}, column 3: {row[2]!r} is not a number"
                        ) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise click.ClickException(f"{path} is not CSV in UTF-8: {error}") from error
    if len({pair.score for pair in pairs}) < 2:  # noqa: PLR2004 - a rank correlation needs two ranks
        raise click.ClickException(f"{path} needs at least two pairs with different scores")
    return spread(pairs, number)


def _write(report: "HeadReport", outputs: dict[str, Path]) -> None:
    """Write the requested files, or print the report if there are none."""
    from attnlens_analysis.heads.as_json import as_json
    from attnlens_analysis.heads.markdown import as_markdown
    from attnlens_analysis.heads.page import as_page

    if not outputs:
        from attnlens_cli.show.studies import show_heads

        show_heads(report)
    for kind, path in outputs.items():
        if kind == ".json":
            content = printable_json(as_json(report), indent=2) + b"\n"
        else:
            content = (as_markdown if kind == ".md" else as_page)(report).encode()
        with replacing(path) as file:
            file.write(content)
        click.echo(f"{path}: {len(report.heads)} heads, {len(report.labeled)} with a label")
