"""What pairs of tokens of two texts did: as a table where that fits the terminal, else the largest."""

import math

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.table import Table

from attnlens_cli.show.explanations.bars import labels_of
from attnlens_client import Comparison

_CELL, _GAP = 6, 2
_TOP = 10
_MEANINGS = {
    "output": "Similarity of the last layer's vectors; all of it adds up to {similarity:.4f}.",
    "interaction": "What the similarity loses without both beyond what it loses without each alone.",
}


def print_matrix(console: Console, comparison: Comparison, kind: str) -> None:
    """Print the matrix of a comparison: rows are the first text's, columns the second's."""
    assert comparison.matrix is not None  # noqa: S101 - the caller has asked for it
    console.print(f"{kind}: {_MEANINGS[kind].format(similarity=comparison.similarity)}")
    rows, columns = labels_of(comparison.a), labels_of(comparison.b)
    widths = [max(_CELL, cell_len(label)) for label in columns]
    needed = max(map(cell_len, rows)) + sum(width + _GAP for width in widths)
    if needed > console.width:
        _print_largest(console, comparison)
        return
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column("", style=Style(bold=True), no_wrap=True)
    for label in columns:
        table.add_column(label, justify="right", no_wrap=True)
    for label, row in zip(rows, comparison.matrix, strict=True):
        table.add_row(label, *("" if math.isnan(value) else f"{value:.3f}" for value in row))
    console.print(table)


def _print_largest(console: Console, comparison: Comparison) -> None:
    table = Table(box=None, show_header=False, show_edge=False, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for first, second, value in comparison.top_pairs(_TOP):
        table.add_row(f"{value:+.4f}", f"{first} - {second}")
    console.print(table)
