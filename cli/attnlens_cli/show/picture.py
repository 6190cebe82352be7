"""Heat maps of attention as PNG, SVG or PDF, drawn by matplotlib without pyplot.

Shapes: T tokens, L' layers, H' heads.
"""

import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, FuncNorm, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from rich.cells import cell_len, set_cell_size

from attnlens_cli.files.output_file import replacing
from attnlens_cli.printable import printable
from attnlens_cli.show.attention_map import AttentionMap

Scale = Literal["sqrt", "linear"]
Look = tuple[Normalize, Colormap]

_LABEL_POINTS = 7.0
_LABEL_PITCH_INCHES = 0.115  # minimum distance of two labels
_MAX_LABEL_CELLS = 24
_TITLE_POINTS = 9.0
_LINE_POINTS = 12.0
_CHARACTERS_PER_INCH = 15.0
_MAX_TEXT_LINES = 2
_NO_WEIGHT = "#dcdcdc"
_INK = "#222222"
_FAINT_INK = "#666666"
_TICKS = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
_MIN_TICK_DISTANCE = 0.09
_MIN_DOTS_PER_INCH = 150
_WHITENED = 64  # number of colors, of 256, that fade to white
_INCHES_PER_TOKEN, _MIN_INCHES, _MAX_INCHES = 0.22, 3.0, 8.5
_PANEL_INCHES_PER_TOKEN, _MIN_PANEL_INCHES, _MAX_PANEL_INCHES = 0.12, 0.9, 1.5
_MAX_LIST_PANEL_INCHES = 2.6  # panels of several heads of one layer, or several layers of one head
_LIST_COLUMNS = (4, 3)  # the first number that fills all rows is used
_PANEL_GAP_INCHES = 0.08
_PANEL_TITLE_INCHES = 0.2
_BAR_INCHES, _BAR_GAP_INCHES = 0.12, 0.1
_BESIDE_INCHES = 0.6  # color bar with numbers
_DEFAULT_FONT = "DejaVu Sans"  # included in matplotlib
_INVISIBLE = frozenset("\u200b\u200c\u200d\u2060\ufe0e\ufe0f")  # joiners and variation selectors
_BOXES = "Last Resort"  # included in matplotlib; draws a box with the name of the script
_PLAIN_WEIGHTS = (400, "normal", "regular", "book")


def write_picture(attention: AttentionMap, path: Path, scale: Scale) -> str:
    """Write a heat map whose rows are queries and whose columns are keys.

    Several layers and heads become a grid of maps with one color scale: layers down, heads across.

    Args:
        attention: Weights to draw.
        path: File that ends in .png, .svg or .pdf.
        scale: Color scale.

    Returns:
        Notes for the user about omitted labels and missing fonts. Usually empty.

    Raises:
        OSError: The file cannot be written.
    """
    with _drawing(_all_texts(attention), path) as notes:
        is_single = attention.stack.shape[:2] == (1, 1)
        figure, side, note = (_single if is_single else _grid)(attention, scale)
        _save(figure, path, len(attention.labels) / side)
    return "".join(f"; {text}" for text in (note, *notes) if text)


def _single(attention: AttentionMap, scale: Scale) -> tuple[Figure, float, str]:
    """Return a figure of one map, the side of the map in inches, and a note on omitted labels."""
    side = min(max(len(attention.labels) * _INCHES_PER_TOKEN, _MIN_INCHES), _MAX_INCHES)
    figure = Figure(figsize=(side, side))
    look = _colormap(attention, scale)
    axes = figure.add_axes((0, 0, 1, 1))
    _draw_weights(axes, attention, (0, 0), look)
    step = _add_labels(axes, attention, side, columns=True, rows=True)
    axes.set_xlabel("attended to (key)")
    axes.set_ylabel("attends (query)")
    _add_caption(axes, attention, side + _BESIDE_INCHES)
    bar = figure.add_axes((1 + _BAR_GAP_INCHES / side, 0, _BAR_INCHES / side, 1))
    _add_color_bar(figure, bar, attention, look, scale)
    return figure, side, f"one token in {step} has a label" if step > 1 else ""


def _add_labels(axes: Axes, attention: AttentionMap, side: float, *, columns: bool, rows: bool) -> int:
    """Label the axes of a map of `side` inches. Returns n if only every n-th token has a label."""
    count = len(attention.labels)
    step = -(-count // max(1, int(side / _LABEL_PITCH_INCHES)))
    ticks = range(0, count, step)
    labels = [_shortened(attention.labels[tick]) for tick in ticks]
    if columns:
        axes.set_xticks(ticks, labels=labels, rotation=90, parse_math=False)
    if rows:
        axes.set_yticks(ticks, labels=labels, parse_math=False)
    return step


def _grid(attention: AttentionMap, scale: Scale) -> tuple[Figure, float, str]:
    """Return a figure with a map per layer and head, the side of a map in inches, and a note on labels."""
    num_layers, num_heads = attention.stack.shape[:2]
    indices = [(layer, head) for layer in range(num_layers) for head in range(num_heads)]
    is_list = 1 in (num_layers, num_heads)
    full = next((columns for columns in _LIST_COLUMNS if len(indices) % columns == 0), _LIST_COLUMNS[0])
    columns = min(full, len(indices)) if is_list else num_heads
    rows = -(-len(indices) // columns)
    limit = _MAX_LIST_PANEL_INCHES if is_list else _MAX_PANEL_INCHES
    panel = min(max(len(attention.labels) * _PANEL_INCHES_PER_TOKEN, _MIN_PANEL_INCHES), limit)
    down = panel + (_PANEL_TITLE_INCHES if is_list else _PANEL_GAP_INCHES)
    width, height = columns * (panel + _PANEL_GAP_INCHES), rows * down
    figure = Figure(figsize=(width, height))
    look = _colormap(attention, scale)
    has_labels = len(attention.labels) * _LABEL_PITCH_INCHES <= panel
    maps = []
    for number, index in enumerate(indices):
        row, column = divmod(number, columns)
        left, bottom = column * (panel + _PANEL_GAP_INCHES) / width, 1 - (row * down + panel) / height
        axes = figure.add_axes((left, bottom, panel / width, panel / height), xticks=(), yticks=())
        _draw_weights(axes, attention, index, look)
        if has_labels:
            is_lowest = number + columns >= len(indices)
            _add_labels(axes, attention, panel, columns=is_lowest, rows=column == 0)
        maps.append(axes)
    _add_titles(maps, attention, columns, is_list=is_list)
    _add_caption(maps[0], attention, max(width, _MIN_INCHES), gap_points=16)
    bar_height = (rows - 1) * down + panel  # height of all rows
    bar = figure.add_axes((1, 1 - bar_height / height, _BAR_INCHES / width, bar_height / height))
    _add_color_bar(figure, bar, attention, look, scale)
    return figure, panel, "" if has_labels else "the maps are too small for labels"


def _add_titles(maps: Sequence[Axes], attention: AttentionMap, columns: int, *, is_list: bool) -> None:
    """Title each map of a list, or the first row and column of a grid, with layer and head."""
    layers, heads = attention.layers or [], attention.heads or []
    if is_list:
        kind, indices = ("head", heads) if len(layers) <= 1 else ("layer", layers)
        for axes, index in zip(maps, indices, strict=True):
            axes.set_title(f"{kind} {index}", fontsize=_LABEL_POINTS, pad=2.5)
        return
    for axes, head in zip(maps, heads, strict=False):
        axes.set_title(f"head {head}", fontsize=_LABEL_POINTS, pad=2.5)
    for axes, layer in zip(maps[::columns], layers, strict=True):
        axes.set_ylabel(f"layer {layer}")


@contextmanager
def _drawing(texts: list[str], path: Path) -> Iterator[list[str]]:
    """Set matplotlib's fonts and lines for a picture of `texts`. Yields notes for the user."""
    families, missing = font_families(texts)
    notes: list[str] = []
    if missing:
        shown = " ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")  # noqa: PLR2004 - a short line
        remedy = (
            "viewers' fonts are used"
            if path.suffix == ".svg"
            else "shown as boxes; install a font such as Noto, or write an .svg, which uses viewers' fonts"
        )
        notes.append(f"no installed font has {shown}: {remedy}")
    settings = {
        "axes.edgecolor": _FAINT_INK,
        "axes.labelcolor": _INK,
        "axes.linewidth": 0.5,
        "font.family": [*families, "sans-serif"],
        "font.sans-serif": [_DEFAULT_FONT],
        "font.size": _LABEL_POINTS,
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
        warnings.filterwarnings(
            "ignore", r"Glyph \d+ .* missing from"
        )  # the notes contain it with the remedy
        yield notes


def _save(figure: Figure, path: Path, tokens_per_inch: float) -> None:
    """Write the figure in the format of its suffix, cropped. Files are reproducible.

    Every token has the same integer number of dots.
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


def _colormap(attention: AttentionMap, scale: Scale) -> Look:
    """Return normalization and colormap, diverging around 0 if there are negative weights."""
    largest, is_signed = attention.largest, bool(attention.stack.min() < 0)
    colormap = mpl.colormaps["RdBu_r"] if is_signed else _white_to_black()
    colormap = colormap.with_extremes(bad=_NO_WEIGHT)
    least = -largest if is_signed else 0.0
    if scale == "linear":
        return Normalize(least, largest), colormap
    return FuncNorm((_square_root, _square), least, largest), colormap


def _white_to_black() -> Colormap:
    """Return the perceptually uniform magma colormap, reversed and starting with white instead of yellow."""
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


def _draw_weights(axes: Axes, attention: AttentionMap, index: tuple[int, int], look: Look) -> None:
    """Draw the map of one layer and head. Pairs without a weight, as beyond a window, are gray."""
    layer, head = index
    weights = np.ma.masked_array(attention.stack[layer, head], mask=~attention.has_weight(layer))
    axes.imshow(weights, norm=look[0], cmap=look[1], aspect="auto")
    axes.tick_params(pad=1.5)


def _add_color_bar(figure: Figure, axes: Axes, attention: AttentionMap, look: Look, scale: Scale) -> None:
    """Draw the color bar into `axes`."""
    bar = figure.colorbar(ScalarMappable(*look), cax=axes)
    ticks = _ticks(look[0])
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    kind = "composed attention weight" if attention.role == "attention_composed" else "attention weight"
    bar.set_label(f"{kind} ({'square-root' if scale == 'sqrt' else 'linear'} scale)")


def _ticks(norm: Normalize) -> list[float]:
    """Return round numbers, including 0, that are at least _MIN_TICK_DISTANCE of the bar apart."""
    least, largest = float(norm.vmin or 0), float(norm.vmax or 1)
    power = 10.0 ** min(0, np.floor(np.log10(largest)) + 1)
    kept = [0.0]
    for tick in (power * tick for tick in _TICKS):
        distances = [abs(float(norm(tick)) - float(norm(other))) for other in kept]
        if tick <= largest and min(distances) >= _MIN_TICK_DISTANCE:
            kept.append(tick)
    return sorted({*kept, *(-tick for tick in kept)} if least < 0 else kept)


def _shortened(label: str) -> str:
    """Return a label, truncated with an ellipsis if it is long."""
    cut = set_cell_size(label, _MAX_LABEL_CELLS - 1).rstrip() + "…"
    return label if cell_len(label) <= _MAX_LABEL_CELLS else cut


def _add_caption(axes: Axes, attention: AttentionMap, width_inches: float, gap_points: float = 5) -> None:
    """Write the caption and the texts above `axes`, aligned with its left edge."""
    characters = int(width_inches * _CHARACTERS_PER_INCH)
    texts = [attention.texts["text"], *filter(None, [attention.texts.get("second_text")])]
    lines = [line for text in texts for line in _wrapped(text, characters)]
    above: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "va": "bottom",
        "parse_math": False,
    }
    for number, line in enumerate(reversed(lines)):
        offset = (0, gap_points + number * _LINE_POINTS)
        axes.annotate(line, (0, 1), xytext=offset, fontsize=_TITLE_POINTS - 1, color=_FAINT_INK, **above)
    caption = textwrap.wrap(attention.caption, characters, break_long_words=False)
    for number, line in enumerate(reversed(caption)):
        offset = (0, gap_points + (len(lines) + number) * _LINE_POINTS + 1)
        axes.annotate(line, (0, 1), xytext=offset, fontsize=_TITLE_POINTS, **above)


def _wrapped(text: str, cells: int) -> list[str]:
    """Return the quoted text in lines of `cells` columns, truncated after _MAX_TEXT_LINES lines."""
    rest, lines = printable(" ".join(text.split())), list[str]()
    while rest and len(lines) < _MAX_TEXT_LINES:
        line = rest if cell_len(rest) <= cells else set_cell_size(rest, cells).rstrip()
        is_cut_in_word = len(line) < len(rest) and not rest[len(line)].isspace()
        if is_cut_in_word and " " in line:
            line = line.rpartition(" ")[0]
        lines.append(line)
        rest = rest[len(line) :].lstrip()
    if not lines:
        return []
    lines[0] = f"“{lines[0]}"
    lines[-1] += " …”" if rest else "”"
    return lines


def _all_texts(attention: AttentionMap) -> list[str]:
    """Return all text in a picture that the user or the model provides."""
    return [attention.caption, *attention.texts.values(), *attention.labels, "“”…"]


def font_families(texts: Iterable[str]) -> tuple[list[str], str]:
    """Return the font families for `texts` in order of preference, and the characters that no font has.

    System fonts are opened only if matplotlib's font lacks a character.
    """
    needed = {letter for text in texts for letter in text if not letter.isspace()} - _INVISIBLE
    families, missing = [_DEFAULT_FONT], needed - _characters(font_manager.findfont(_DEFAULT_FONT))
    if missing:
        _find_new_fonts()
    for family, path in _plain_fonts().items() if missing else ():
        covered = missing & _characters(path)
        if covered:
            families.append(family)
            missing -= covered
        if not missing:
            break
    return families, "".join(sorted(missing))


def _find_new_fonts() -> None:
    """Add fonts that were installed after matplotlib cached its list of fonts."""
    known = {font.fname for font in font_manager.fontManager.ttflist}
    for path in font_manager.findSystemFonts():
        if path not in known:
            with suppress(OSError, RuntimeError, ValueError):  # matplotlib does not support the font
                font_manager.fontManager.addfont(path)


def _plain_fonts() -> dict[str, str]:
    """Map upright families of regular weight to their files, sans-serif families first."""
    fonts = {
        font.name: font.fname
        for font in font_manager.fontManager.ttflist
        if font.style == "normal"
        and font.weight in _PLAIN_WEIGHTS
        and "mono" not in font.name.lower()
        and not font.name.startswith(_BOXES)
    }
    return dict(sorted(fonts.items(), key=lambda item: ("Sans" not in item[0], item[0])))


@cache
def _characters(path: str) -> frozenset[str]:
    """Return the characters of a font. Empty if matplotlib does not support it, such as a bitmap font."""
    try:
        return frozenset(map(chr, FT2Font(path).get_charmap()))
    except (OSError, RuntimeError, ValueError):
        return frozenset()
