"""Attention maps for the terminal: a coloured table, the largest weights, or one row as bars. T tokens."""

import numpy as np
import numpy.typing as npt
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from attnlens_cli.show.attention.map import AttentionMap
from attnlens_cli.show.console import make_console
from attnlens_cli.show.printable import counted

_CELL_WIDTHS = (
    5,
    4,
    3,
)  # of a weight such as 0.12 or .12, or of a token's start; the first that fits
_LEADING_ZERO_FROM = 4
_GAP = 1
_COLUMN_GAP = 2
_TOP_OF_MAP = 5
_TOP_OF_ROW = 20
_BAR_WIDTH = 30
# The colours of the smallest, the largest and the most negative weight; below _FAINT of the largest: none.
_DARK, _BRIGHT, _NEGATIVE = np.array([40, 40, 60]), np.array([255, 170, 0]), np.array([90, 150, 255])
_FAINT = 0.05
_DARK_TEXT_FROM = 0.6


def _style(share: float) -> Style:
    """Return the background for a weight that is `share` of the largest, below 0 for a negative one."""
    if abs(share) < _FAINT:
        return Style(dim=True)
    text = "black" if abs(share) >= _DARK_TEXT_FROM else "white"
    return Style.parse(f"{text} on {_colour(share)}")


def _colour(share: float) -> str:
    towards = _BRIGHT if share >= 0 else _NEGATIVE
    red, green, blue = (_DARK + (towards - _DARK) * abs(share)).astype(int)
    return f"rgb({red},{green},{blue})"


def _order(row: npt.NDArray[np.floating]) -> npt.NDArray[np.intp]:
    """Return the columns of a row from the largest weight in magnitude."""
    return np.argsort(-np.abs(row), kind="stable")


def _meaning(attention: AttentionMap) -> str:
    if attention.has_distributions:
        return "Rows attend to columns; each row sums to 1."
    return "Rows attend to columns; a row may sum to any number, and weights may be negative."


def _label(attention: AttentionMap, row: int) -> str:
    return f"{row:>3} {attention.labels[row]}"


def print_map(attention: AttentionMap, top: int | None) -> None:
    """Print all weights as a table where that fits, else the `top` largest of each row."""
    console = make_console()
    count = len(attention.labels)
    label_width = max(cell_len(_label(attention, row)) for row in range(count))
    console.print(attention.caption)
    fitting = [width for width in _CELL_WIDTHS if label_width + count * (width + _GAP) <= console.width]
    if top is None and fitting:
        console.print(_meaning(attention))
        _print_table(console, attention, label_width, fitting[0])
        return
    rows = _largest(attention, top or _TOP_OF_MAP)
    if top is None:
        rows = _shortened(rows, console.width - label_width - _COLUMN_GAP)
        needed = label_width + count * (_CELL_WIDTHS[-1] + _GAP)
        console.print(
            f"The table needs {needed} columns and there are {console.width}: these are the {len(rows[0])} "
            "largest weights of each token. --image, --json and --token show more."
        )
    if not attention.has_distributions:
        console.print(_meaning(attention))
    _print_largest(console, attention, rows, label_width)


def _print_table(console: Console, attention: AttentionMap, label_width: int, cell_width: int) -> None:
    weights, largest = attention.weights, attention.largest
    numbers = Text(" " * label_width)
    tokens = Text(" " * label_width)
    for column, label in enumerate(attention.spellings):
        numbers.append(f"{column:>{cell_width + _GAP}}", Style(dim=True))
        short = label if cell_len(label) <= cell_width else set_cell_size(label, cell_width - 1) + "…"
        tokens.append(" " * (_GAP + cell_width - cell_len(short)) + short, Style(bold=True))
    console.print(numbers, tokens, sep="\n", soft_wrap=True)
    for row in range(len(weights)):
        line = Text(set_cell_size(_label(attention, row), label_width), Style(bold=True))
        for weight in weights[row]:
            line.append(" " * _GAP)
            line.append(_number(float(weight), cell_width), _style(float(weight) / largest))
        console.print(line, soft_wrap=True)


def _number(weight: float, width: int) -> str:
    """Return a weight in `width` characters, with as many digits as they hold."""
    for digits in (2, 1, 0):
        number = f"{weight:.{digits}f}"
        if width < _LEADING_ZERO_FROM:
            number = number.replace("0.", ".", 1) if abs(weight) < 1 and digits else number
        if len(number) <= width:
            break
    return number.rjust(width)[:width]


def _largest(attention: AttentionMap, top: int) -> list[list[Text]]:
    """Return for each token the `top` largest weights and what they go to."""
    weights, largest = attention.weights, attention.largest
    return [
        [
            Text.assemble(
                (f"{row[column]:.2f} {attention.labels[column]}", _style(float(row[column]) / largest))
            )
            for column in _order(row)[:top]
        ]
        for row in weights
    ]


def _shortened(rows: list[list[Text]], width: int) -> list[list[Text]]:
    """Return as many columns of `rows`, at least one, as fit into `width`."""
    ends = np.cumsum(
        [max(cell.cell_len for cell in column) + _COLUMN_GAP for column in zip(*rows, strict=True)]
    )
    fitting = max(1, int((ends - _COLUMN_GAP <= width).sum()))
    return [row[:fitting] for row in rows]


def _print_largest(
    console: Console, attention: AttentionMap, rows: list[list[Text]], label_width: int
) -> None:
    table = Table(
        box=None, show_header=False, show_edge=False, padding=(0, _COLUMN_GAP, 0, 0), pad_edge=False
    )
    table.add_column(no_wrap=True, width=label_width)
    for _ in rows[0]:
        table.add_column(no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(Text(_label(attention, number), Style(bold=True)), *row)
    console.print(table)


def print_row(attention: AttentionMap, row: int, top: int | None) -> None:
    """Print what token number `row` attends to, the `top` largest weights first, as bars."""
    console = make_console()
    weights = attention.weights[row]
    order = _order(weights)[: top or _TOP_OF_ROW]
    largest = float(np.abs(weights).max()) or 1.0
    console.print(attention.caption)
    console.print(
        f"{'Word' if attention.are_words else 'Token'} {row}, {attention.names[row]!r}, attends to:"
    )
    table = Table(box=box.SIMPLE, show_header=False, show_edge=False, padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for column in order:
        share = float(weights[column]) / largest
        length, tint = max(1, round(_BAR_WIDTH * abs(share))), max(share, _FAINT) if share >= 0 else share
        bar = Text("█" * length, Style.parse(_colour(tint)))
        table.add_row(f"{weights[column]:.4f}", _label(attention, int(column)), bar)
    console.print(table)
    if len(order) < len(weights):
        rest = float((weights.sum(dtype=np.float64)) - weights[order].sum(dtype=np.float64))
        left = len(weights) - len(order)
        unit = "more word" if attention.are_words else "more token"
        console.print(f"{counted(left, unit)} {'has' if left == 1 else 'share'} {rest:.4f}.")
