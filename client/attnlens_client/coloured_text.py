"""Results as text and as a few lines of HTML, for reprs. Everything that comes from a text is escaped.

No script, no style sheet: notebooks remove them from what they do not trust. A signed score is blue or
vermilion (Okabe and Ito), which most colour-blind people tell apart; each number also stands in a title.
"""

import html
import math
from collections.abc import Sequence

_BLUE, _VERMILION, _GREY = "0,114,178", "213,94,0", "127,127,127"
_STRONGEST = 0.6  # opacity, at which black text and white text can still be read
_MOST_SHOWN = 2000  # tokens or words
_BOX = "line-height:2;overflow-wrap:anywhere;max-width:70em"
_CHIP = "padding:2px 3px;border-radius:4px;unicode-bidi:isolate"


def printable(text: str) -> str:
    r"""Return `text` with escapes such as `\x1b` for what a terminal would not show but obey."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def coloured(labels: Sequence[str], values: Sequence[float]) -> str:
    """Return labels whose backgrounds show their scores; NaN has none."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 1.0
    chips = [
        _chip(label, _background(value, largest), f"{label}: {_number(value)}")
        for label, value in list(zip(labels, values, strict=True))[:_MOST_SHOWN]
    ]
    return _box(chips, len(labels))


def plain(labels: Sequence[str], titles: Sequence[str]) -> str:
    """Return labels with titles, all of one colour."""
    pairs = list(zip(labels, titles, strict=True))[:_MOST_SHOWN]
    return _box([_chip(label, f"rgba({_GREY},0.12)", title) for label, title in pairs], len(labels))


def line(text: str) -> str:
    """Return a line of small text."""
    return f'<div style="font-size:85%;opacity:0.8">{html.escape(text)}</div>'


def part(*rows: str) -> str:
    """Return rows below each other."""
    return f'<div style="margin:0.3em 0 0.6em">{"".join(rows)}</div>'


def _box(chips: Sequence[str], count: int) -> str:
    more = f" … and {count - len(chips)} more" if count > len(chips) else ""
    return f'<div style="{_BOX}" dir="auto">{" ".join(chips)}{more}</div>'


def _chip(label: str, background: str, title: str) -> str:
    style = f"background:{background};{_CHIP}"
    return f'<span style="{style}" title="{html.escape(title, quote=True)}">{html.escape(label)}</span>'


def _background(value: float, largest: float) -> str:
    if not math.isfinite(value):
        return "none"
    colour = _BLUE if value >= 0 else _VERMILION
    return f"rgba({colour},{_STRONGEST * abs(value) / largest:.3f})"


def _number(value: float) -> str:
    return f"{value:+.4f}" if math.isfinite(value) else "no number"
