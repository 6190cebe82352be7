"""Bundles of a directory as a table, which fits into 60 columns, too."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from attnlens_cli.files.listed_bundles import Facts, ListedBundle
from attnlens_cli.show.console import make_console
from attnlens_cli.show.printable import counted, printable, source_text

_COMMIT_LENGTH, _DATE_LENGTH = 10, 10


def print_bundles(directory: Path, bundles: Sequence[ListedBundle]) -> None:
    """Print the bundles that are right below a directory, or the one that it is itself."""
    console = make_console()
    is_alone = [bundle.directory for bundle in bundles] == [directory]
    console.print(printable(str(directory.parent if is_alone else directory)), style="bold", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, leading=1)
    for name in ("bundle", "encoder", "files", "verdict"):
        table.add_column(name, overflow="fold")
    for bundle in bundles:
        table.add_row(*_cells(bundle))
    console.print(table)
    console.print()


def _cells(bundle: ListedBundle) -> list[str | Text]:
    facts, lines = bundle.facts, [bundle.directory.name]
    verdict = Text("broken" if bundle.problem else "verified", "bold red" if bundle.problem else "green")
    if bundle.problem:
        verdict.append(f": {printable(bundle.problem)}", "default")
    if facts is None:
        return [printable(lines[0]), "", "", verdict]
    if facts.model != bundle.directory.name:
        lines.append(facts.model)
    lines.append(f"from {source_text(facts.source, facts.source_revision[:_COMMIT_LENGTH])}")
    exported = [f"attnlens {facts.attnlens}"] if facts.attnlens else []
    verdict.append("".join(f"\n{line}" for line in (*exported, bundle.exported_at[:_DATE_LENGTH])), "default")
    files = f"{facts.size_bytes / 1e6:,.1f} MB\n{', '.join(facts.precisions)}"
    return ["\n".join(map(printable, lines)), _encoder(facts), files, verdict]


def _encoder(facts: Facts) -> str:
    layers, heads = counted(facts.num_layers, "layer"), counted(facts.num_heads, "head")
    lines = (
        f"{printable(facts.family)}, {facts.hidden_size:,} wide",
        f"{layers}, {heads}",
        f"{_rounded(facts.num_parameters)} parameters",
        f"{facts.max_tokens:,} tokens",
    )
    return "\n".join(lines)


def _rounded(number: int) -> str:
    """Return two digits and a unit, such as `23 M`."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            share = number / size
            return f"{share:.1f} {unit}" if share < 10 else f"{share:.0f} {unit}"  # noqa: PLR2004 - two digits
    return str(number)
