"""Diagrams of attention as SVG, with the sizes of a model. T tokens, D hidden size, H heads, K head size."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from attnlens_analysis.teach.content import Diagram

_HEIGHT = 44
_LIGHT = {"ground": "#ffffff", "box": "#e8f1f8", "learned": "#fdf0dc", "ink": "#1c2733", "line": "#51606e"}
_DARK = {"ground": "#14191f", "box": "#1f3a52", "learned": "#4d3a17", "ink": "#e6edf3", "line": "#9fb0bf"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes shown in the diagrams."""

    tokens: int
    hidden: int
    heads: int
    head: int
    layers: int


class _Canvas:
    """Collects boxes and arrows. Coordinates are in pixels."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.title, self.size, self.parts = title, (width, height), [""]

    def box(self, x: int, y: int, width: int, text: str, detail: str = "", *, learned: bool = False) -> None:
        """Draw a box with one or two lines of text. Boxes of learned parameters have another color."""
        kind, middle = "learned" if learned else "box", x + width / 2
        first = y + (18 if detail else 27)
        self.parts.append(
            f"<rect class='d-{kind}' x='{x}' y='{y}' width='{width}' height='{_HEIGHT}' rx='6'/>"
            f"<text x='{middle:g}' y='{first}' text-anchor='middle' font-weight='bold'>{escape(text)}</text>"
        )
        if detail:
            self.parts.append(
                f"<text x='{middle:g}' y='{y + 35}' text-anchor='middle'>{escape(detail)}</text>"
            )

    def arrow(self, *points: tuple[int, int], label: str = "") -> None:
        """Draw an arrow along points, with an optional label at the middle of its last segment."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f"<polyline class='d-line' points='{path}' marker-end='url(#d-head)'/>")
        if label:
            (x1, y1), (x2, y2) = points[-2:]
            x, y = (x1 + x2) / 2, (y1 + y2) / 2 - 6
            self.parts.append(f"<text x='{x:g}' y='{y:g}' text-anchor='middle'>{escape(label)}</text>")

    def svg(self, *, follows_theme: bool) -> str:
        """Return the SVG. If `follows_theme`, it has dark colors where the reader prefers these."""
        width, height = self.size
        style = _rules(_LIGHT)
        if follows_theme:
            style += f"@media (prefers-color-scheme:dark){{{_rules(_DARK)}}}"
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' role='img' class='diagram' width='{width}' "
            f"height='{height}' viewBox='0 0 {width} {height}' font-family='system-ui, sans-serif' "
            f"font-size='12'><title>{escape(self.title)}</title><style>{style}</style>"
            "<defs><marker id='d-head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
            "orient='auto'><path class='d-tip' d='M0,0 L8,4 L0,8 z'/></marker></defs>"
            f"<rect class='d-ground' width='{width}' height='{height}'/>{''.join(self.parts)}</svg>\n"
        )


def _rules(colors: dict[str, str]) -> str:
    return (
        f".d-ground{{fill:{colors['ground']}}}.diagram text,.d-tip{{fill:{colors['ink']}}}"
        f".d-box{{fill:{colors['box']};stroke:{colors['line']}}}"
        f".d-learned{{fill:{colors['learned']};stroke:{colors['line']}}}"
        f".d-line{{fill:none;stroke:{colors['line']};stroke-width:1.5}}"
    )


def head_diagram(sizes: Sizes, *, follows_theme: bool = False) -> Diagram:
    """Draw one head: input, projections, scores, softmax and weighted sum."""
    x, narrow, square = (f"[{a}, {b}]" for a, b in (
        (sizes.tokens, sizes.hidden), (sizes.tokens, sizes.head), (sizes.tokens, sizes.tokens)))  # fmt: skip
    title = "One attention head"
    canvas = _Canvas(title, 800, 208)
    canvas.box(12, 82, 86, "x", x)
    for y, name in ((12, "Q"), (82, "K"), (152, "V")):
        canvas.box(142, y, 64, f"W_{name}", learned=True)
        canvas.arrow((98, 104), (120, 104), (120, y + 22), (142, y + 22))
        canvas.box(236, y, 78, name, narrow)
        canvas.arrow((206, y + 22), (236, y + 22))
    canvas.box(358, 47, 104, "scale · Q Kᵀ", square)
    canvas.arrow((314, 34), (336, 34), (336, 62), (358, 62))
    canvas.arrow((314, 104), (336, 104), (336, 76), (358, 76))
    canvas.box(500, 47, 104, "softmax", square)
    canvas.arrow((462, 69), (500, 69))
    canvas.box(672, 100, 112, "weights · V", narrow)
    canvas.arrow((604, 69), (728, 69), (728, 100))
    canvas.arrow((314, 174), (728, 174), (728, 144))
    lines = [
        f"x {x} -> W_Q -> Q {narrow}, W_K -> K {narrow}, W_V -> V {narrow}",
        f"Q, K -> scale · Q K^T {square} -> softmax {square}",
        f"softmax, V -> weights V {narrow}",
    ]
    return Diagram(title, lines, canvas.svg(follows_theme=follows_theme))


def heads_diagram(sizes: Sizes, *, follows_theme: bool = False) -> Diagram:
    """Draw the heads of a layer, their concatenation and the output projection."""
    x, narrow = f"[{sizes.tokens}, {sizes.hidden}]", f"[{sizes.tokens}, {sizes.head}]"
    wide = f"[{sizes.tokens}, {sizes.heads * sizes.head}]"
    title = f"{sizes.heads} heads, concatenated and projected"
    canvas = _Canvas(title, 800, 236)
    canvas.box(12, 96, 96, "all of x", x)
    shown = _ends([f"head {head}" for head in range(sizes.heads)])
    for index, name in enumerate(shown):
        y = 12 + index * 168 // max(1, len(shown) - 1)
        canvas.arrow((108, 118), (130, 118), (130, y + 22), (168, y + 22))
        canvas.box(168, y, 100, name, narrow if name != "…" else "")
        canvas.arrow((268, y + 22), (300, y + 22), (300, 118), (330, 118))
    canvas.box(330, 96, 120, "concatenate", wide)
    canvas.arrow((450, 118), (490, 118))
    canvas.box(490, 96, 112, "W_O", f"[{sizes.heads * sizes.head}, {sizes.hidden}]", learned=True)
    canvas.arrow((602, 118), (660, 118))
    canvas.box(660, 96, 120, "output", x)
    lines = [f"all of x {x}", *(f"  -> {name} {narrow}".replace(f"… {narrow}", "…") for name in shown),
             f"  => concatenate {wide} -> W_O -> output {x}"]  # fmt: skip
    return Diagram(title, lines, canvas.svg(follows_theme=follows_theme))


def stack_diagram(sizes: Sizes, *, is_pre_norm: bool, follows_theme: bool = False) -> Diagram:
    """Draw a layer with residual connections and norms, and the stack of layers."""
    title = f"{sizes.layers} layers with residual connections and norms"
    canvas = _Canvas(title, 824, 150)
    order = ("norm", "attention", "add", "norm", "feed-forward", "add")
    names = order if is_pre_norm else ("attention", "add", "norm", "feed-forward", "add", "norm")
    canvas.box(8, 72, 62, "x")
    start, left = 70, 94
    branch = 82
    for name in names:
        width = 104 if name in {"attention", "feed-forward"} else 56
        canvas.arrow((start, 94), (left, 94))
        canvas.box(left, 72, width, "+" if name == "add" else name, learned=name != "add")
        if name == "add":
            middle = left + width // 2
            canvas.arrow((branch, 94), (branch, 40), (middle, 40), (middle, 72))
            canvas.parts.append(
                f"<text x='{(branch + middle) / 2:g}' y='32' text-anchor='middle'>residual</text>"
            )
        start, left = left + width, left + width + 26
        if name == ("add" if is_pre_norm else "norm"):
            branch = start + 12
    canvas.arrow((start, 94), (left, 94))
    canvas.box(left, 72, 116, f"{sizes.layers} layers", "one after another")
    lines = ["x", *(f"  -> {'+ residual' if name == 'add' else name}" for name in names),
             f"repeated in {sizes.layers} layers"]  # fmt: skip
    return Diagram(title, lines, canvas.svg(follows_theme=follows_theme))


def _ends(names: Sequence[str]) -> list[str]:
    """Return the names, or the first two and the last one if there are more than four."""
    return list(names) if len(names) <= 4 else [*names[:2], "…", names[-1]]  # noqa: PLR2004 - fits the drawing
