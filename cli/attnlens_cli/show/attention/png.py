"""An attention map as a picture. T tokens."""

import warnings
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from attnlens_cli.files.new_file import replacing
from attnlens_cli.show.attention.map import AttentionMap

_INCHES_A_TOKEN, _MIN_INCHES, _MAX_INCHES = 0.26, 4.0, 24.0
_MARGIN_INCHES = 2.0
_DOTS_PER_INCH = 150


def write_png(attention: AttentionMap, path: Path) -> str:
    """Write a heat map: rows are the tokens that attend, columns the tokens attended to.

    What has no weight at all, as beyond a window, is white. Weights of both signs are red and blue.

    Returns:
        What the picture leaves out, for the user to read; usually empty.
    """
    count = len(attention.labels)
    side = min(max(count * _INCHES_A_TOKEN, _MIN_INCHES), _MAX_INCHES)
    figure = Figure(figsize=(side + _MARGIN_INCHES, side + _MARGIN_INCHES), layout="constrained")
    axes = figure.add_subplot()
    image = _draw(axes, attention)
    step = -(-count // int(_MAX_INCHES / _INCHES_A_TOKEN))  # every token has a label while there is room
    ticks = range(0, count, step)
    labels = [attention.labels[tick] for tick in ticks]
    axes.set_xticks(ticks, labels=labels, rotation=90, parse_math=False)
    axes.set_yticks(ticks, labels=labels, parse_math=False)
    axes.set_xlabel("attended to (key)")
    axes.set_ylabel("attends (query)")
    axes.set_title(attention.caption.replace(", layer", "\nlayer"), parse_math=False)
    label = "composed attention weight" if attention.role == "attention_composed" else "attention weight"
    figure.colorbar(image, ax=axes, label=label, shrink=0.8)
    with warnings.catch_warnings(record=True) as caught, replacing(path) as file:
        warnings.simplefilter("always")
        figure.savefig(file, format="png", dpi=_DOTS_PER_INCH)
    notes = []
    if step > 1:
        notes.append(f"one token in {step} has a label")
    if any("missing from" in str(warning.message) for warning in caught):
        notes.append("the font lacks some characters, which show as boxes")
    return "".join(f"; {note}" for note in notes)


def _draw(axes: Axes, attention: AttentionMap) -> AxesImage:
    shown = np.ma.masked_array(attention.weights, mask=~attention.has_weight)
    if attention.weights.min() < 0:
        largest = attention.largest
        return axes.imshow(shown, cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest")
    return axes.imshow(shown, cmap="viridis", vmin=0.0, interpolation="nearest")
