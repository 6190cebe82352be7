"""Attention maps in few bytes.

A weight A becomes the byte round(255 sqrt(A)): its error is about sqrt(A) / 255 at most, so small weights
stay visible. The page holds the bytes of a layer in zlib's form and base64; a browser inflates them when the
layer is wanted.

Letters: T tokens, H heads, k weights that are kept of a row.
"""

import base64
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

SMALL_ROW = 32
_LEVEL = 6
# Rounding of fp16 and of sums; beyond it a number is no attention weight.
_SLACK = 1e-3


def square_root_bytes(weights: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return round(255 sqrt(weights)), of any shape; bytes are returned as they are.

    Raises:
        ValueError: a weight is not between 0 and 1.
    """
    if weights.dtype == np.uint8:
        return weights
    lowest, highest = float(weights.min()), float(weights.max())
    if not (lowest >= -_SLACK and highest <= 1 + _SLACK):  # NaN, too
        raise ValueError(
            f"the weights are from {lowest:g} to {highest:g}: a page shows attention weights, from 0 to 1"
        )
    roots = np.sqrt(np.clip(weights, 0, 1), dtype=np.float32)
    return np.asarray(np.rint(roots * np.float32(255)), dtype=np.uint8)


def top_bytes(maps: npt.NDArray[np.uint8], kept: int) -> bytes:
    """Return the `kept` largest bytes of each row of maps (H, T, T), the first ones where several are equal.

    First come the columns, (H, T, k) little-endian uint16 in rising order, then their bytes, (H, T, k) uint8.
    """
    order = np.argsort(-maps.astype(np.int16), axis=-1, kind="stable")[..., :kept]
    columns = np.sort(order, axis=-1)  # (H, T, k)
    return columns.astype("<u2").tobytes() + np.take_along_axis(maps, columns, axis=-1).tobytes()


def layer_bytes(maps: npt.NDArray[Any], kept: int | None) -> bytes:
    """Return zlib's form of one layer's maps (H, T, T): all bytes, or the `kept` largest of each row."""
    roots = square_root_bytes(maps)
    content = np.ascontiguousarray(roots).tobytes() if kept is None else top_bytes(roots, kept)
    return zlib.compress(content, _LEVEL)


def to_base64(content: bytes) -> str:
    """Return `content` in the characters that HTML leaves alone."""
    return base64.b64encode(content).decode("ascii")
