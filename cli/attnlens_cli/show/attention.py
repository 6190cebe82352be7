"""Attention in the terminal: a table, the largest weights, one row as bars, an overview, or head gates.

Shapes: T tokens, L' selected layers, H' selected heads.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from attnlens_cli.printable import counted
from attnlens_cli.show.attention_map import AttentionMap
from attnlens_cli.show.console import make_console

_CELL_WIDTHS = (5, 4, 3)  # width of weights and token labels; the first one that fits is used
_LEADING_ZERO_FROM = 4
_GAP = 1
_COLUMN_GAP = 2
_NUM_MAP_WEIGHTS = 5
_NUM_ROW_WEIGHTS = 20
_NUM_OVERVIEW_WEIGHTS = 8
_BAR_WIDTH = 30
_NEIGHBORS = {"itself": 0, "previous": -1, "next": 1}
# Colors of the smallest, largest and most negative weight. Weights below _FAINT of the largest have no color.
_DARK, _BRIGHT, _NEGATIVE = np.array([40, 40, 60]), np.array([255, 170, 0]), np.array([90, 150, 255])
_FAINT = 0.05
_DARK_TEXT_FROM = 0.6


def _style(share: float) -> Style:
    """Return the background of a weight, given as a signed share of the largest magnitude."""
    if abs(share) < _FAINT:
        return Style(dim=True)
    text = "black" if abs(share) >= _DARK_TEXT_FROM else "white"
    return Style.parse(f"{text} on {_color(share)}")


def _color(share: float) -> str:
    towards = _BRIGHT if share >= 0 else _NEGATIVE
    red, green, blue = (_DARK + (towards - _DARK) * abs(share)).astype(int)
    return f"rgb({red},{green},{blue})"


def _order(row: npt.NDArray[np.floating]) -> npt.NDArray[np.intp]:
    """Return the columns of a row by descending magnitude."""
    return np.argsort(-np.abs(row), kind="stable")


def _legend(attention: AttentionMap) -> str:
    if attention.has_distributions:
        return "Rows attend to columns; each row sums to 1."
    return "Rows attend to columns; rows may have any sum, and weights may be negative."


def _label(attention: AttentionMap, row: int) -> str:
    return f"{row:>3} {attention.labels[row]}"


def print_map(attention: AttentionMap, top: int | None) -> None:
    """Print all weights as a table if it fits, otherwise the `top` largest weights of each row."""
    console = make_console()
    count = len(attention.labels)
    label_width = max(cell_len(_label(attention, row)) for row in range(count))
    console.print(attention.caption)
    fitting = [width for width in _CELL_WIDTHS if label_width + count * (width + _GAP) <= console.width]
    if top is None and fitting:
        console.print(_legend(attention))
        _print_table(console, attention, label_width, fitting[0])
        return
    rows = _largest(attention, top or _NUM_MAP_WEIGHTS)
    if top is None:
        rows = _shortened(rows, console.width - label_width - _COLUMN_GAP)
        needed = label_width + count * (_CELL_WIDTHS[-1] + _GAP)
        console.print(
            f"The table needs {needed} columns, and the terminal has {console.width}. These are the "
            f"{len(rows[0])} largest weights of each token; --image, --json and --token show more."
        )
    if not attention.has_distributions:
        console.print(_legend(attention))
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
    """Return a weight with as many digits as fit into `width` characters."""
    for digits in (2, 1, 0):
        number = f"{weight:.{digits}f}"
        if width < _LEADING_ZERO_FROM:
            number = number.replace("0.", ".", 1) if abs(weight) < 1 and digits else number
        if len(number) <= width:
            break
    return number.rjust(width)[:width]


def _largest(attention: AttentionMap, top: int) -> list[list[Text]]:
    """Return the `top` largest weights of each token with their targets."""
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
    """Return the columns of `rows` that fit into `width`, but at least one."""
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
    """Print the `top` largest weights of a row as bars."""
    console = make_console()
    weights = attention.weights[row]
    order = _order(weights)[: top or _NUM_ROW_WEIGHTS]
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
        bar = Text("█" * length, Style.parse(_color(tint)))
        table.add_row(f"{weights[column]:.4f}", _label(attention, int(column)), bar)
    console.print(table)
    if len(order) < len(weights):
        rest = float((weights.sum(dtype=np.float64)) - weights[order].sum(dtype=np.float64))
        remaining = len(weights) - len(order)
        unit = "more word" if attention.are_words else "more token"
        console.print(f"{counted(remaining, unit)} {'has' if remaining == 1 else 'share'} {rest:.4f}.")


def print_overview(attention: AttentionMap) -> None:
    """Print one line per layer and head: shares of the weight by position, and the largest weight."""
    console = make_console()
    console.print(attention.caption)
    unit = "word" if attention.are_words else "token"
    shares = attention.has_distributions
    if shares:
        console.print(
            f"Shares of the weight in %: on the {unit} itself, on the previous and the next {unit}, and on "
            f"special tokens, which may be neighbors, too. Spread: the exponential of the entropy of a row, "
            f"an effective number of {unit}s. Largest: the largest weight on a {unit} that is not special."
        )
    table = _stack_table(attention, *((*_NEIGHBORS, "special", "spread") if shares else ()))
    table.add_column("largest", no_wrap=True, overflow="ellipsis")
    special = np.array([attention.result.tokens[unit[0]].is_special for unit in attention.units])
    for weights, indices in _maps(attention):
        figures = _shares(weights, special) if shares else []
        table.add_row(*indices, *figures, _largest_pair(attention, weights, special))
    console.print(table)
    console.print("--json prints all weights, --image draws them, --token shows one row of each.")


def print_rows(attention: AttentionMap, row: int, top: int | None) -> None:
    """Print the `top` largest weights of a row in each layer and head."""
    console = make_console()
    console.print(attention.caption)
    kind = "Word" if attention.are_words else "Token"
    console.print(f"{kind} {row}, {attention.names[row]!r}, attends to:")
    table = _stack_table(attention)
    table.add_column("largest weights", no_wrap=True, overflow="ellipsis")
    for weights, indices in _maps(attention):
        order = np.argsort(-np.abs(weights[row]), kind="stable")[: top or _NUM_OVERVIEW_WEIGHTS]
        largest = (f"{weights[row, column]:.2f} {attention.labels[column]}" for column in order)
        table.add_row(*indices, "  ".join(largest))
    console.print(table)


def _stack_table(attention: AttentionMap, *figures: str) -> Table:
    """Return an empty table with a column per axis and per figure."""
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1), header_style="dim")
    for column in (*(axis.removesuffix("s") for axis in attention.axes), *figures):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _maps(attention: AttentionMap) -> Iterator[tuple[npt.NDArray[np.floating], list[str]]]:
    """Yield each map (T, T) with its indices along the requested axes."""
    found = attention.result.attention[0]
    for index, head in np.ndindex(attention.stack.shape[:2]):
        of_axis = {"layers": found.layers[index], "heads": found.heads[head]}
        yield attention.stack[index, head], [str(of_axis[axis]) for axis in attention.axes]


def _shares(weights: npt.NDArray[np.floating], special: npt.NDArray[np.bool_]) -> list[str]:
    """Return the shares in % and the spread, as means over rows."""
    wide = weights.astype(np.float64)
    of_neighbors = [np.trace(wide, offset) / len(wide) for offset in _NEIGHBORS.values()]
    shares = [*of_neighbors, wide[:, special].sum() / len(wide)]
    entropy = -(wide * np.log(np.where(wide > 0, wide, 1))).sum(axis=-1)
    return [*(f"{100 * share:.0f}" for share in shares), f"{np.exp(entropy.mean()):.1f}"]


def _largest_pair(
    attention: AttentionMap, weights: npt.NDArray[np.floating], special: npt.NDArray[np.bool_]
) -> str:
    columns = np.flatnonzero(~special) if not special.all() else np.arange(len(special))
    row, index = np.unravel_index(np.abs(weights[:, columns]).argmax(), (len(weights), len(columns)))
    column = columns[index]
    return f"{weights[row, column]:.2f} {attention.labels[int(row)]} → {attention.labels[column]}"


def print_gates(attention: AttentionMap) -> None:
    """Print one row per token. A dot is a head that the token does not use."""
    found = attention.result.attention[0]
    console = make_console()
    console.print(attention.caption)
    console.print("Gate of each head per token. Load: share of tokens that use the head.")
    for index, layer in enumerate(found.layers):
        if "layers" in attention.axes:
            console.print(f"Layer {layer}:")
        _print_gate_layer(console, attention, index)


def _print_gate_layer(console: Console, attention: AttentionMap, index: int) -> None:
    found = attention.result.attention[0]
    gates = found.weights[index]  # (T, H')
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("token", no_wrap=True)
    for head in found.heads:
        table.add_column(str(head), justify="right", no_wrap=True)
    for number, (label, row) in enumerate(zip(attention.labels, gates, strict=True)):
        table.add_row(f"{number:>3} {label}", *("·" if gate == 0 else f"{gate:.2f}" for gate in row))
    table.add_section()
    load = attention.head_load(index)
    table.add_row("load", *(f"{share:.2f}" for share in load), style="bold")
    table.add_row("mean", *(f"{mean:.2f}" for mean in gates.mean(axis=0, dtype=np.float64)), style="bold")
    console.print(table)
