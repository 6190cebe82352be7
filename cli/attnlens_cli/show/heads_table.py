"""How `attnlens heads` shows a report in the terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Table

from attnlens_analysis.heads import HeadReport
from attnlens_analysis.heads.labels import CAVEATS, MIN_WORDS, RULES
from attnlens_analysis.heads.markdown import RELATION_TITLES, data_sentences, relation_cells
from attnlens_analysis.heads.measures import measures
from attnlens_cli.show.console import make_console
from attnlens_cli.show.printable import printable

_SHOWN = (
    "previous",
    "next",
    "first",
    "earlier_copy",
    "entropy_normalised",
    "ablation",
    "contribution",
    "task_change",
)


def show_heads(report: HeadReport) -> None:
    """Print the labelled heads, the relations and the rules."""
    console = make_console()
    console.print(f"{printable(report.model_name)}: {len(report.heads)} heads", soft_wrap=True)
    for sentence in (*data_sentences(report), *report.notes):
        console.print(f"- {printable(sentence)}")
    console.print()
    console.print(_labelled(report))
    if report.syntax is not None:
        shown = [relation_cells(score) for score in report.syntax if score.num_scored >= MIN_WORDS]
        title = f"Best head of each relation, those with {MIN_WORDS} words or more"
        console.print(_table(title, RELATION_TITLES, shown))
    console.print("Rules of the labels:")
    for label, rule in RULES.items():
        console.print(f"- {label}: {rule}")
    for caveat in CAVEATS:
        console.print(caveat)


def _labelled(report: HeadReport) -> Table:
    columns = [column for column in measures(report) if column.name in _SHOWN]
    rows: list[tuple[str, ...]] = []
    for found in report.labelled:
        index = report.heads.index(found.head)
        numbers = (f"{column.values[index]:.{column.digits}f}" for column in columns)
        rows.append((str(found.head), *numbers, ", ".join(found.labels)))
    titles = (
        "head",
        *(column.title.replace(" / ", "\n/ ").replace("earlier ", "earlier\n") for column in columns),
        "labels",
    )
    return _table(f"{len(rows)} heads have a label; --json, --markdown and --html write all", titles, rows)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in headings:
        is_name = heading in {"head", "relation", "direction", "labels"}
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=heading != "labels")
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    return table
