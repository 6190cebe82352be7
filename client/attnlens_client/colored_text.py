"""Text and HTML representations of results. Texts are escaped.

The HTML has no scripts or style sheets, which notebooks remove from untrusted output. Scores are blue or
vermilion, which most color-blind people can distinguish (Okabe and Ito), and shown as numbers in tooltips.
"""

import html
import math
from collections.abc import Sequence

_BLUE, _VERMILION, _GRAY = "0,114,178", "213,94,0", "127,127,127"
_MAX_OPACITY = 0.6  # black and white text remain readable
_MAX_LABELS = 2000
_BOX = "line-height:2;overflow-wrap:anywhere;max-width:70em"
_CHIP = "padding:2px 3px;border-radius:4px;unicode-bidi:isolate"


def printable(text: str) -> str:
    r"""Return `text` with control characters escaped, such as `\x1b`."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def colored(labels: Sequence[str], values: Sequence[float]) -> str:
    """Return labels with backgrounds that show their scores. NaN has no background."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 1.0
    chips = [
        _chip(label, _background(value, largest), f"{label}: {_number(value)}")
        for label, value in list(zip(labels, values, strict=True))[:_MAX_LABELS]
    ]
    return _box(chips, len(labels))


def plain(labels: Sequence[str], titles: Sequence[str]) -> str:
    """Return gray labels with tooltips."""
    pairs = list(zip(labels, titles, strict=True))[:_MAX_LABELS]
    return _box([_chip(label, f"rgba({_GRAY},0.12)", title) for label, title in pairs], len(labels))


def line(text: str) -> str:
    """Return a line of small text."""
    return f'<div style="font-size:85%;opacity:0.8">{html.escape(text)}</div>'


def rows(*lines: str) -> str:
    """Return lines below each other."""
    return f'<div style="margin:0.3em 0 0.6em">{"".join(lines)}</div>'


def _box(chips: Sequence[str], count: int) -> str:
    more = f" … and {count - len(chips)} more" if count > len(chips) else ""
    return f'<div style="{_BOX}" dir="auto">{" ".join(chips)}{more}</div>'


def _chip(label: str, background: str, title: str) -> str:
    style = f"background:{background};{_CHIP}"
    return f'<span style="{style}" title="{html.escape(title, quote=True)}">{html.escape(label)}</span>'


def _background(value: float, largest: float) -> str:
    if not math.isfinite(value):
        return "none"
    color = _BLUE if value >= 0 else _VERMILION
    return f"rgba({color},{_MAX_OPACITY * abs(value) / largest:.3f})"


def _number(value: float) -> str:
    return f"{value:+.4f}" if math.isfinite(value) else "undefined"
