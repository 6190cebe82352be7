"""Profiles the run time of a bundle's graph by component and text length.

`parts` assigns graph nodes to components, `trace` reads ONNX Runtime profiles, `measure` profiles each
length, and `page` renders the result.
"""

from attnlens_analysis.profile.lengths import chosen_lengths, parse_lengths
from attnlens_analysis.profile.measure import LengthProfile, Profile, measure
from attnlens_analysis.profile.page import (
    METHOD_NOTE,
    as_page,
    chart,
    describe,
    describe_crossover,
    reliability,
)
from attnlens_analysis.profile.parts import ATTENTION, PARTS, Part

__all__ = [
    "ATTENTION",
    "METHOD_NOTE",
    "PARTS",
    "LengthProfile",
    "Part",
    "Profile",
    "as_page",
    "chart",
    "chosen_lengths",
    "describe",
    "describe_crossover",
    "measure",
    "parse_lengths",
    "reliability",
]
