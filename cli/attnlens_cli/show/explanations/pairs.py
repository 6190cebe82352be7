"""What pairs of tokens of two texts did: as a table where that fits the terminal, else the largest."""

import math

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.table import Table

from attnlens_cli.show.explanations.bars import labels_of
from attnlens_client import Comparison
from attnlens_client.results import Array

_CELL, _GAP = 6, 2
_TOP = 10
_MEANINGS = {
    "output": "Similarity of the last layer's vectors; all of it adds up to {similarity:.4f}.",
    "interaction": "What the similarity loses without both beyond what it loses without each alone.",
    "input": "What the input tokens contribute together; with baselines it adds up to {similarity:.4f}.",
}
_BASELINE = "(baseline)"


def print_matrix(console: Console, comparison: Comparison, texts: tuple[str, str], kind: str) -> None:
    """Print the matrix of a comparison: rows are the first text's, columns the second's; baselines last."""
    console.print(f"{kind}: {_MEANINGS[kind].format(similarity=comparison.similarity)}")
    rows, columns = (
        labels_of(side, {"text": text})
        for side, text in zip((comparison.a, comparison.b), texts, strict=True)
    )
    cells = _with_baselines(comparison)
    rows += [_BASELINE] * (len(cells) - len(rows))
    columns += [_BASELINE] * (cells.shape[1] - len(columns))
    widths = [max(_CELL, cell_len(label)) for label in columns]
    needed = max(map(cell_len, rows)) + sum(width + _GAP for width in widths)
    if needed > console.width:
        _print_largest(console, comparison)
    else:
        _print_cells(console, rows, columns, cells)
    if kind == "input":
        _print_sums(console, comparison, cells)


def _with_baselines(comparison: Comparison) -> Array:
    """Return the matrix; of an input matrix with its baselines as last row and column."""
    assert comparison.matrix is not None  # noqa: S101 - the caller has asked for it
    row, column, corner = comparison.baseline_row, comparison.baseline_column, comparison.baseline
    if row is None or column is None or corner is None:
        return comparison.matrix
    last = np.append(row, corner)
    return np.vstack([np.column_stack([comparison.matrix, column]), last])


def _print_cells(console: Console, rows: list[str], columns: list[str], cells: Array) -> None:
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column("", style=Style(bold=True), no_wrap=True)
    for label in columns:
        table.add_column(label, justify="right", no_wrap=True)
    for label, row in zip(rows, cells, strict=True):
        table.add_row(label, *("" if math.isnan(value) else f"{value:.3f}" for value in row))
    console.print(table)


def _print_sums(console: Console, comparison: Comparison, cells: Array) -> None:
    assert comparison.matrix is not None  # noqa: S101 - the caller has asked for it
    tokens, total = (float(part.sum(dtype=np.float64)) for part in (comparison.matrix, cells))
    console.print(
        f"input: pairs {tokens:.6f}, baselines {total - tokens:+.6f}, sum {total:.6f}, the cosine is "
        f"{comparison.similarity:.6f} (off by {abs(total - comparison.similarity):.1e}).",
        soft_wrap=True,
    )


def _print_largest(console: Console, comparison: Comparison) -> None:
    table = Table(box=None, show_header=False, show_edge=False, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for first, second, value in comparison.top_pairs(_TOP):
        table.add_row(f"{value:+.4f}", f"{first} - {second}")
    console.print(table)
