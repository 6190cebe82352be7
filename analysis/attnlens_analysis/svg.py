"""SVG charts for HTML pages or separate files. All text is escaped."""

from collections.abc import Sequence
from html import escape

_FONT = "font-family='system-ui, sans-serif' font-size='12'"
_ROW = 18
_CELL = 20
_MAX_BAR = 240
_CHAR = 7.2
# Color-blind safe palette of Okabe and Ito.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#999999", "#F0E442")


def bars(
    title: str, labels: Sequence[str], values: Sequence[float], marked: Sequence[int], figures: Sequence[str]
) -> str:
    """Return a horizontal bar chart with a figure next to each bar. Negative bars point left."""
    left = 12 + _CHAR * max(map(len, labels), default=0)
    figure_width = 12 + _CHAR * max(map(len, figures), default=0)
    lowest, highest = min(0.0, *values), max(0.0, *values)
    scale = _MAX_BAR / (highest - lowest or 1.0)
    zero, parts = left - lowest * scale, list[str]()
    for index, (label, value, figure) in enumerate(zip(labels, values, figures, strict=True)):
        y = 26 + index * _ROW
        color = COLORS[1] if value < 0 else COLORS[0]
        weight = " font-weight='bold'" if index in marked else ""
        start, length = zero + min(0.0, value) * scale, abs(value) * scale
        parts += [
            f"<text x='{left - 6:.1f}' y='{y + 12}' text-anchor='end'{weight}>{escape(label)}</text>",
            f"<rect x='{start:.1f}' y='{y + 2}' width='{length:.2f}' height='{_ROW - 4}' fill='{color}'/>",
            f"<text x='{start + length + 5:.1f}' y='{y + 12}'{weight}>{escape(figure)}</text>",
        ]
    if lowest < 0:
        parts.append(f"<path d='M{zero:.1f} 26V{26 + _ROW * len(labels)}' stroke='#555'/>")
    return _drawing(title, left + _MAX_BAR + figure_width, 32 + _ROW * len(labels), parts)


def grid(title: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]]) -> str:
    """Return a heat map from white (0) to dark blue (1), with the value of each cell as its tooltip."""
    left = 12 + _CHAR * max(map(len, rows), default=0)
    head = 34 + 0.75 * _CHAR * max(map(len, columns), default=0)
    parts = []
    for column, label in enumerate(columns):
        x = left + column * _CELL + 12
        parts.append(
            f"<text transform='translate({x:.1f} {head - 5:.1f}) rotate(-50)'>{escape(label)}</text>"
        )
    for row, label in enumerate(rows):
        y = head + row * _CELL
        parts.append(f"<text x='{left - 6:.1f}' y='{y + 14:.1f}' text-anchor='end'>{escape(label)}</text>")
        for column, value in enumerate(values[row]):
            x = left + column * _CELL
            parts.append(
                f"<rect x='{x:.1f}' y='{y:.1f}' width='{_CELL - 1}' height='{_CELL - 1}' "
                f"fill='{_blue(value)}' stroke='#ddd' stroke-width='0.5'>"
                f"<title>{escape(f'{label} → {columns[column]}: {value:.4f}')}"
                "</title></rect>"
            )
    width = left + _CELL * len(columns) + 0.6 * _CHAR * max(map(len, columns), default=0) + 12
    return _drawing(title, width, head + _CELL * len(rows) + 8, parts)


def stacked(
    title: str, labels: Sequence[str], shares_of: Sequence[Sequence[float]], names: Sequence[str]
) -> str:
    """Return a stacked bar chart with a legend. Each row of `shares_of` sums to 1."""
    left = 12 + _CHAR * max(map(len, labels), default=0)
    elements = []
    for index, (label, shares) in enumerate(zip(labels, shares_of, strict=True)):
        y, x = 26 + index * (_ROW + 4), left
        elements.append(f"<text x='{left - 6:.1f}' y='{y + 14}' text-anchor='end'>{escape(label)}</text>")
        for share, name, color in zip(shares, names, COLORS, strict=False):
            width = share * 480
            elements.append(
                f"<rect x='{x:.1f}' y='{y}' width='{width:.2f}' height='{_ROW}' fill='{color}'>"
                f"<title>{escape(f'{label}, {name}: {100 * share:.1f} %')}</title></rect>"
            )
            x += width
    y, x = 26 + len(labels) * (_ROW + 4) + 8, left
    for name, color in zip(names, COLORS, strict=False):
        if x + 30 + _CHAR * len(name) > left + 500:
            x, y = left, y + 20
        elements += [
            f"<rect x='{x:.1f}' y='{y}' width='12' height='12' fill='{color}'/>",
            f"<text x='{x + 17:.1f}' y='{y + 11}'>{escape(name)}</text>",
        ]
        x += 34 + _CHAR * len(name)
    return _drawing(title, left + 510, y + 22, elements)


def _drawing(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    width = max(width, 24 + _CHAR * len(title))
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' role='img' width='{width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {width:.0f} {height:.0f}' {_FONT}><title>{escape(title)}</title>"
        f"<rect width='100%' height='100%' fill='#fff'/>"
        f"<text x='6' y='16' font-weight='bold'>{escape(title)}</text>{''.join(parts)}</svg>\n"
    )


def _blue(value: float) -> str:
    """Return a color between white and dark blue. The square root makes small values visible."""
    share = max(0.0, min(1.0, value)) ** 0.5
    red, green, blue = (round(255 + share * (dark - 255)) for dark in (0, 51, 102))
    return f"#{red:02x}{green:02x}{blue:02x}"
