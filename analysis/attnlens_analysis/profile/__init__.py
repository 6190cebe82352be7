"""Which part of a bundle's graph takes the time, and how that changes with the length of the text.

`parts` says what each node of a graph belongs to, `trace` reads ONNX Runtime's profile, `measure` runs the
lengths, and `page` draws them.
"""

from attnlens_analysis.profile.lengths import chosen_lengths, parse_lengths
from attnlens_analysis.profile.measure import LengthProfile, Profile, measure
from attnlens_analysis.profile.page import HOW, as_page, chart, describe, overtaking, reliability
from attnlens_analysis.profile.parts import ATTENTION, PARTS, Part

__all__ = [
    "ATTENTION",
    "HOW",
    "PARTS",
    "LengthProfile",
    "Part",
    "Profile",
    "as_page",
    "chart",
    "chosen_lengths",
    "describe",
    "measure",
    "overtaking",
    "parse_lengths",
    "reliability",
]
