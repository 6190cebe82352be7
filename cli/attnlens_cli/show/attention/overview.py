"""Maps of several layers and heads for the terminal: a line for each. L' layers, H' heads, T tokens."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from rich.table import Table

from attnlens_cli.show.attention.map import AttentionMap
from attnlens_cli.show.console import make_console

_NEIGHBOURS = {"itself": 0, "previous": -1, "next": 1}
_TOP_OF_ROW = 8


def print_overview(attention: AttentionMap) -> None:
    """Print for each layer and head its largest weight and where its weight goes by place."""
    console = make_console()
    console.print(attention.caption)
    unit = "word" if attention.are_words else "token"
    shares = attention.has_distributions
    if shares:
        console.print(
            f"Shares of the weight, in %: on the {unit} itself, the previous one, the next one, special "
            f"tokens. A special token may be one of the others, too, so shares may overlap. Spread: how many "
            f"{unit}s a row reaches, the exponential of its entropy. Largest: the largest weight to what is "
            "not special."
        )
    table = _table(attention, *((*_NEIGHBOURS, "special", "spread") if shares else ()))
    table.add_column("largest", no_wrap=True, overflow="ellipsis")
    special = np.array([attention.result.tokens[unit[0]].is_special for unit in attention.units])
    for weights, numbers in _maps(attention):
        figures = _shares(weights, special) if shares else []
        table.add_row(*numbers, *figures, _largest(attention, weights, special))
    console.print(table)
    console.print("--json prints all weights, --image draws them, --token shows one row of each.")


def print_rows(attention: AttentionMap, row: int, top: int | None) -> None:
    """Print what token number `row` attends to in each layer and head, the largest weights first."""
    console = make_console()
    console.print(attention.caption)
    kind = "Word" if attention.are_words else "Token"
    console.print(f"{kind} {row}, {attention.names[row]!r}, attends to:")
    table = _table(attention)
    table.add_column("largest weights", no_wrap=True, overflow="ellipsis")
    for weights, numbers in _maps(attention):
        order = np.argsort(-np.abs(weights[row]), kind="stable")[: top or _TOP_OF_ROW]
        largest = (f"{weights[row, column]:.2f} {attention.labels[column]}" for column in order)
        table.add_row(*numbers, "  ".join(largest))
    console.print(table)


def _table(attention: AttentionMap, *figures: str) -> Table:
    """Return a table with the columns that say which map a line is of, and those of figures."""
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1), header_style="dim")
    for column in (*(axis.removesuffix("s") for axis in attention.axes), *figures):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _maps(attention: AttentionMap) -> Iterator[tuple[npt.NDArray[np.floating], list[str]]]:
    """Yield each map (T, T), with the numbers of its layer and head where these were asked for."""
    found = attention.result.attention[0]
    for place, head in np.ndindex(attention.stack.shape[:2]):
        of_axis = {"layers": found.layers[place], "heads": found.heads[head]}
        yield attention.stack[place, head], [str(of_axis[axis]) for axis in attention.axes]


def _shares(weights: npt.NDArray[np.floating], special: npt.NDArray[np.bool_]) -> list[str]:
    """Return the shares in %, and how many columns a row reaches, as means over rows."""
    wide = weights.astype(np.float64)
    of_neighbours = [np.trace(wide, offset) / len(wide) for offset in _NEIGHBOURS.values()]
    shares = [*of_neighbours, wide[:, special].sum() / len(wide)]
    entropy = -(wide * np.log(np.where(wide > 0, wide, 1))).sum(axis=-1)
    return [*(f"{100 * share:.0f}" for share in shares), f"{np.exp(entropy.mean()):.1f}"]


def _largest(
    attention: AttentionMap, weights: npt.NDArray[np.floating], special: npt.NDArray[np.bool_]
) -> str:
    columns = np.flatnonzero(~special) if not special.all() else np.arange(len(special))
    row, place = np.unravel_index(np.abs(weights[:, columns]).argmax(), (len(weights), len(columns)))
    column = columns[place]
    return f"{weights[row, column]:.2f} {attention.labels[int(row)]} → {attention.labels[column]}"
