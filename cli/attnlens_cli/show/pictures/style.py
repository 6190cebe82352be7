"""What pictures of attention have in common: colours, colour bar, title, labels, files. T tokens."""

import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, FuncNorm, ListedColormap, Normalize
from matplotlib.figure import Figure
from rich.cells import cell_len, set_cell_size

from attnlens_cli.files.new_file import replacing
from attnlens_cli.show.attention.map import AttentionMap
from attnlens_cli.show.pictures.fonts import FIRST, families_for
from attnlens_cli.show.printable import printable

Scale = Literal["sqrt", "linear"]
Look = tuple[Normalize, Colormap]

LABEL_POINTS = 7.0
LABEL_PITCH_INCHES = 0.115
"""The least distance of two labels, side by side."""
_MAX_LABEL_CELLS = 24
_TITLE_POINTS = 9.0
_LINE_POINTS = 12.0
_CHARACTERS_AN_INCH = 15.0
_MAX_TEXT_LINES = 2
_NO_WEIGHT = "#dcdcdc"
_INK = "#222222"
_FAINT_INK = "#666666"
_TICKS = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
_MIN_TICK_DISTANCE = 0.09
_MIN_DOTS_PER_INCH = 150
_WHITENED = 64  # of the 256 colours


@contextmanager
def drawing(texts: list[str], path: Path) -> Iterator[list[str]]:
    """Set fonts and lines for a picture of `texts`; yield a list of what the user should know of it."""
    families, missing = families_for(texts)
    notes: list[str] = []
    if missing:
        shown = " ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")  # noqa: PLR2004 - a short line
        remedy = (
            "the reader's own fonts are used"
            if path.suffix == ".svg"
            else "shown as boxes; install one, such as Noto, or write an .svg, which uses the reader's fonts"
        )
        notes.append(f"no font here has {shown}: {remedy}")
    settings = {
        "axes.edgecolor": _FAINT_INK,
        "axes.labelcolor": _INK,
        "axes.linewidth": 0.5,
        "font.family": [*families, "sans-serif"],
        "font.sans-serif": [FIRST],
        "font.size": LABEL_POINTS,
        "image.interpolation": "nearest",
        "pdf.fonttype": 42,
        "svg.fonttype": "none" if missing else "path",  # paths look the same everywhere
        "svg.hashsalt": "attnlens",
        "text.color": _INK,
        "xtick.color": _INK,
        "xtick.major.size": 2.0,
        "xtick.major.width": 0.5,
        "ytick.color": _INK,
        "ytick.major.size": 2.0,
        "ytick.major.width": 0.5,
    }
    with mpl.rc_context(settings), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from")  # said above, with the remedy
        yield notes


def save(figure: Figure, path: Path, tokens_per_inch: float) -> None:
    """Write the figure in the format of its suffix, cut to what is drawn. The same picture is the same file.

    Every token gets the same whole number of dots.
    """
    dots_per_token = -(-_MIN_DOTS_PER_INCH // tokens_per_inch)
    kind = path.suffix[1:]
    settings: dict[str, dict[str, Any]] = {
        "png": {"pil_kwargs": {"compress_level": 3}},  # 6 takes three times as long
        "svg": {"metadata": {"Date": None}},
        "pdf": {"metadata": {"CreationDate": None}},
    }
    with replacing(path) as file:
        figure.savefig(
            file,
            format=kind,
            dpi=dots_per_token * tokens_per_inch,
            bbox_inches="tight",
            pad_inches=0.08,
            **settings[kind],
        )


def colours(attention: AttentionMap, scale: Scale) -> Look:
    """Return scale and colours of weights, from 0 or, where some are negative, from both sides of it."""
    largest, is_signed = attention.largest, bool(attention.stack.min() < 0)
    colormap = mpl.colormaps["RdBu_r"] if is_signed else _white_to_black()
    colormap = colormap.with_extremes(bad=_NO_WEIGHT)
    least = -largest if is_signed else 0.0
    if scale == "linear":
        return Normalize(least, largest), colormap
    return FuncNorm((_square_root, _square), least, largest), colormap


def _white_to_black() -> Colormap:
    """Return the colours of magma backwards, which get darker evenly, from white instead of yellow."""
    magma = mpl.colormaps["magma_r"](np.linspace(0, 1, 256))  # (256, RGBA)
    share = np.linspace(0, 1, _WHITENED)[:, None]
    magma[:_WHITENED] = share * magma[:_WHITENED] + (1 - share)
    return ListedColormap(magma)


def _square_root(values: npt.ArrayLike) -> npt.NDArray[Any]:
    roots: npt.NDArray[Any] = np.sign(values) * np.sqrt(np.abs(values))
    return roots


def _square(values: npt.ArrayLike) -> npt.NDArray[Any]:
    squares: npt.NDArray[Any] = np.sign(values) * np.square(values)
    return squares


def show_weights(axes: Axes, attention: AttentionMap, place: tuple[int, int], look: Look) -> None:
    """Draw the map of one layer and head; grey is where there is no weight at all, as beyond a window."""
    layer, head = place
    weights = np.ma.masked_array(attention.stack[layer, head], mask=~attention.has_weight(layer))
    axes.imshow(weights, norm=look[0], cmap=look[1], aspect="auto")
    axes.tick_params(pad=1.5)


def add_colour_bar(figure: Figure, axes: Axes, attention: AttentionMap, look: Look, scale: Scale) -> None:
    """Fill `axes` with the colour bar; its ticks keep a distance on either scale."""
    bar = figure.colorbar(ScalarMappable(*look), cax=axes)
    ticks = _ticks(look[0])
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    what = "composed attention weight" if attention.role == "attention_composed" else "attention weight"
    bar.set_label(f"{what} ({'square-root' if scale == 'sqrt' else 'linear'} scale)")


def _ticks(norm: Normalize) -> list[float]:
    """Return round numbers within the scale, 0 included, at least _MIN_TICK_DISTANCE of its length apart."""
    least, largest = float(norm.vmin or 0), float(norm.vmax or 1)
    power = 10.0 ** min(0, np.floor(np.log10(largest)) + 1)
    kept = [0.0]
    for tick in (power * tick for tick in _TICKS):
        distances = [abs(float(norm(tick)) - float(norm(other))) for other in kept]
        if tick <= largest and min(distances) >= _MIN_TICK_DISTANCE:
            kept.append(tick)
    return sorted({*kept, *(-tick for tick in kept)} if least < 0 else kept)


def short(label: str) -> str:
    """Return a label of a row or column, cut where it is long."""
    cut = set_cell_size(label, _MAX_LABEL_CELLS - 1).rstrip() + "…"
    return label if cell_len(label) <= _MAX_LABEL_CELLS else cut


def add_title(axes: Axes, attention: AttentionMap, width_inches: float, gap_points: float = 5) -> None:
    """Write what the picture shows and the text above `axes`, whose left edge is that of the picture."""
    characters = int(width_inches * _CHARACTERS_AN_INCH)
    texts = [attention.texts["text"], *filter(None, [attention.texts.get("second_text")])]
    lines = [line for text in texts for line in _wrapped(text, characters)]
    above: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "va": "bottom",
        "parse_math": False,
    }
    for number, line in enumerate(reversed(lines)):
        place = (0, gap_points + number * _LINE_POINTS)
        axes.annotate(line, (0, 1), xytext=place, fontsize=_TITLE_POINTS - 1, color=_FAINT_INK, **above)
    caption = textwrap.wrap(attention.caption, characters, break_long_words=False)
    for number, line in enumerate(reversed(caption)):
        place = (0, gap_points + (len(lines) + number) * _LINE_POINTS + 1)
        axes.annotate(line, (0, 1), xytext=place, fontsize=_TITLE_POINTS, **above)


def _wrapped(text: str, cells: int) -> list[str]:
    """Return the text in a few lines of so many cells, in quotes; what does not fit is left out."""
    left, lines = printable(" ".join(text.split())), list[str]()
    while left and len(lines) < _MAX_TEXT_LINES:
        line = left if cell_len(left) <= cells else set_cell_size(left, cells).rstrip()
        is_cut_in_word = len(line) < len(left) and not left[len(line)].isspace()
        if is_cut_in_word and " " in line:
            line = line.rpartition(" ")[0]
        lines.append(line)
        left = left[len(line) :].lstrip()
    if not lines:
        return []
    lines[0] = f"“{lines[0]}"
    lines[-1] += " …”" if left else "”"
    return lines


def all_texts(attention: AttentionMap) -> list[str]:
    """Return everything of a picture that comes from a user or a model."""
    return [attention.caption, *attention.texts.values(), *attention.labels, "“”…"]
