"""Fonts for any script: matplotlib's own, and of this machine those that have what it lacks."""

from collections.abc import Iterable
from contextlib import suppress
from functools import cache

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

FIRST = "DejaVu Sans"  # comes with matplotlib
_INVISIBLE = frozenset("\u200b\u200c\u200d\u2060\ufe0e\ufe0f")  # they join or vary others, and show nothing
_BOXES = "Last Resort"  # comes with matplotlib: a box with the name of its script for every character
_PLAIN_WEIGHTS = (400, "normal", "regular", "book")


def families_for(texts: Iterable[str]) -> tuple[list[str], str]:
    """Return the font families that `texts` need, in the order to try them, and what no font has.

    Fonts of this machine are opened only where matplotlib's own lacks a character.
    """
    needed = {letter for text in texts for letter in text if not letter.isspace()} - _INVISIBLE
    families, missing = [FIRST], needed - _letters(font_manager.findfont(FIRST))
    if missing:
        _find_new_fonts()
    for family, path in _plain_fonts().items() if missing else ():
        found = missing & _letters(path)
        if found:
            families.append(family)
            missing -= found
        if not missing:
            break
    return families, "".join(sorted(missing))


def _find_new_fonts() -> None:
    """Add the fonts that were installed after matplotlib made its list, which it keeps in a file."""
    known = {font.fname for font in font_manager.fontManager.ttflist}
    for path in font_manager.findSystemFonts():
        if path not in known:
            with suppress(OSError, RuntimeError, ValueError):  # no font that matplotlib can draw with
                font_manager.fontManager.addfont(path)


def _plain_fonts() -> dict[str, str]:
    """Map each upright family of ordinary weight to its file; families for many scripts come first."""
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
def _letters(path: str) -> frozenset[str]:
    """Return the characters of a font; none of one that matplotlib can't draw with, such as bitmaps."""
    try:
        return frozenset(map(chr, FT2Font(path).get_charmap()))
    except (OSError, RuntimeError, ValueError):
        return frozenset()
