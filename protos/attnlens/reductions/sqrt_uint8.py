"""Weights in 8 bits, for viewers. On a scale of square roots small weights keep their place."""

import numpy as np
import numpy.typing as npt

from attnlens.reductions.maps import FloatArray

LEVELS = 255


def to_levels(maps: FloatArray) -> npt.NDArray[np.uint8]:
    """Return round(255 sqrt(A)) of weights A, halves to even; what is beyond 0 and 1 is put to them."""
    levels = np.sqrt(np.clip(maps, 0, 1))
    levels *= np.float32(LEVELS)
    return np.rint(levels, out=levels).astype(np.uint8)


def from_levels(levels: npt.NDArray[np.uint8]) -> FloatArray:
    """Return the weights that levels stand for: (level / 255) squared."""
    roots = levels.astype(np.float32) / np.float32(LEVELS)
    return roots * roots
