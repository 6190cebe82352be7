"""One attention map, or all of several layers and heads, as a picture. T tokens, L' layers, H' heads."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnlens_cli.show.attention.map import AttentionMap
from attnlens_cli.show.pictures import style

_INCHES_A_TOKEN, _MIN_INCHES, _MAX_INCHES = 0.22, 3.0, 8.5
_PANEL_INCHES_A_TOKEN, _MIN_PANEL_INCHES, _MAX_PANEL_INCHES = 0.12, 0.9, 1.5
_MAX_LIST_PANEL_INCHES = 2.6  # of one layer's heads, or of one head's layers
_LIST_COLUMNS = (4, 3)  # the first that fills all rows
_PANEL_GAP_INCHES = 0.08
_PANEL_TITLE_INCHES = 0.2
_BAR_INCHES, _BAR_GAP_INCHES = 0.12, 0.1
_BESIDE_INCHES = 0.6  # the colour bar and its numbers


def write_picture(attention: AttentionMap, path: Path, scale: style.Scale) -> str:
    """Write a heat map: rows are the tokens that attend, columns the tokens attended to.

    Of several layers and heads: a grid of maps on one scale, layers down and heads across.

    Args:
        attention: what to draw.
        path: ends in .png, .svg or .pdf, which is the format.
        scale: how weights become colours.

    Returns:
        What the picture leaves out, for the user to read; usually empty.

    Raises:
        OSError: it can't be written.
    """
    with style.drawing(style.all_texts(attention), path) as notes:
        is_single = attention.stack.shape[:2] == (1, 1)
        figure, side, note = (_single if is_single else _grid)(attention, scale)
        style.save(figure, path, len(attention.labels) / side)
    return "".join(f"; {said}" for said in (note, *notes) if said)


def _single(attention: AttentionMap, scale: style.Scale) -> tuple[Figure, float, str]:
    """Return the figure, the inches of the map's sides, and what it leaves out."""
    side = min(max(len(attention.labels) * _INCHES_A_TOKEN, _MIN_INCHES), _MAX_INCHES)
    figure = Figure(figsize=(side, side))
    look = style.colours(attention, scale)
    axes = figure.add_axes((0, 0, 1, 1))
    style.show_weights(axes, attention, (0, 0), look)
    step = _label(axes, attention, side, columns=True, rows=True)
    axes.set_xlabel("attended to (key)")
    axes.set_ylabel("attends (query)")
    style.add_title(axes, attention, side + _BESIDE_INCHES)
    bar = figure.add_axes((1 + _BAR_GAP_INCHES / side, 0, _BAR_INCHES / side, 1))
    style.add_colour_bar(figure, bar, attention, look, scale)
    return figure, side, f"one token in {step} has a label" if step > 1 else ""


def _label(axes: Axes, attention: AttentionMap, side: float, *, columns: bool, rows: bool) -> int:
    """Write the tokens beside a map of `side` inches, as many as have room; return the step between them."""
    count = len(attention.labels)
    step = -(-count // max(1, int(side / style.LABEL_PITCH_INCHES)))
    ticks = range(0, count, step)
    labels = [style.short(attention.labels[tick]) for tick in ticks]
    if columns:
        axes.set_xticks(ticks, labels=labels, rotation=90, parse_math=False)
    if rows:
        axes.set_yticks(ticks, labels=labels, parse_math=False)
    return step


def _grid(attention: AttentionMap, scale: style.Scale) -> tuple[Figure, float, str]:
    """Draw a small map for each layer and head; return what `_single` does."""
    num_layers, num_heads = attention.stack.shape[:2]
    places = [(layer, head) for layer in range(num_layers) for head in range(num_heads)]
    is_list = 1 in (num_layers, num_heads)
    full = next((columns for columns in _LIST_COLUMNS if len(places) % columns == 0), _LIST_COLUMNS[0])
    columns = min(full, len(places)) if is_list else num_heads
    rows = -(-len(places) // columns)
    most = _MAX_LIST_PANEL_INCHES if is_list else _MAX_PANEL_INCHES
    panel = min(max(len(attention.labels) * _PANEL_INCHES_A_TOKEN, _MIN_PANEL_INCHES), most)
    down = panel + (_PANEL_TITLE_INCHES if is_list else _PANEL_GAP_INCHES)
    width, height = columns * (panel + _PANEL_GAP_INCHES), rows * down
    figure = Figure(figsize=(width, height))
    look = style.colours(attention, scale)
    has_labels = len(attention.labels) * style.LABEL_PITCH_INCHES <= panel
    maps = []
    for number, place in enumerate(places):
        row, column = divmod(number, columns)
        left, bottom = column * (panel + _PANEL_GAP_INCHES) / width, 1 - (row * down + panel) / height
        axes = figure.add_axes((left, bottom, panel / width, panel / height), xticks=(), yticks=())
        style.show_weights(axes, attention, place, look)
        if has_labels:
            is_lowest = number + columns >= len(places)
            _label(axes, attention, panel, columns=is_lowest, rows=column == 0)
        maps.append(axes)
    _name(maps, attention, columns, is_list=is_list)
    style.add_title(maps[0], attention, max(width, _MIN_INCHES), gap_points=16)
    bar_height = (rows - 1) * down + panel  # from the top of the first row to the end of the last
    bar = figure.add_axes((1, 1 - bar_height / height, _BAR_INCHES / width, bar_height / height))
    style.add_colour_bar(figure, bar, attention, look, scale)
    return figure, panel, "" if has_labels else "maps this small have no labels"


def _name(maps: Sequence[Axes], attention: AttentionMap, columns: int, *, is_list: bool) -> None:
    """Say which layer and head each map is: above each of a list, at the edges of a grid."""
    layers, heads = attention.layers or [], attention.heads or []
    if is_list:
        kind, numbers = ("head", heads) if len(layers) <= 1 else ("layer", layers)
        for axes, number in zip(maps, numbers, strict=True):
            axes.set_title(f"{kind} {number}", fontsize=style.LABEL_POINTS, pad=2.5)
        return
    for axes, head in zip(maps, heads, strict=False):
        axes.set_title(f"head {head}", fontsize=style.LABEL_POINTS, pad=2.5)
    for axes, layer in zip(maps[::columns], layers, strict=True):
        axes.set_ylabel(f"layer {layer}")
