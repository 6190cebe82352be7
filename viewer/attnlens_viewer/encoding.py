"""Compact encoding of attention maps.

A weight A is quantized to round(255 sqrt(A)). The absolute error is at most about sqrt(A) / 255, so small
weights remain visible. Each layer is compressed with zlib, and the browser decompresses it on demand.

Shapes: T tokens, H heads, K weights kept per row.
"""

import base64
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

SMALL_ROW = 32
_LEVEL = 6
# Tolerance for fp16 and summation rounding errors.
_TOLERANCE = 1e-3


def square_root_bytes(weights: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Quantize weights of any shape to round(255 sqrt(weights)). uint8 arrays are returned unchanged.

    Raises:
        ValueError: A weight is not between 0 and 1.
    """
    if weights.dtype == np.uint8:
        return weights
    lowest, highest = float(weights.min()), float(weights.max())
    if not (lowest >= -_TOLERANCE and highest <= 1 + _TOLERANCE):  # also rejects NaN
        raise ValueError(
            f"attention weights must be between 0 and 1, but range from {lowest:g} to {highest:g}"
        )
    roots = np.sqrt(np.clip(weights, 0, 1), dtype=np.float32)
    return np.asarray(np.rint(roots * np.float32(255)), dtype=np.uint8)


def top_bytes(maps: npt.NDArray[np.uint8], kept: int) -> bytes:
    """Encode the `kept` largest values of each row of (H, T, T) maps. Ties keep the first columns.

    The result is the column indices, (H, T, K) little-endian uint16 in ascending order, followed by the
    values, (H, T, K) uint8.
    """
    order = np.argsort(-maps.astype(np.int16), axis=-1, kind="stable")[..., :kept]
    columns = np.sort(order, axis=-1)  # (H, T, K)
    return columns.astype("<u2").tobytes() + np.take_along_axis(maps, columns, axis=-1).tobytes()


def layer_bytes(maps: npt.NDArray[Any], kept: int | None) -> bytes:
    """Quantize and compress the (H, T, T) maps of a layer, or only the `kept` largest weights of each row."""
    roots = square_root_bytes(maps)
    content = np.ascontiguousarray(roots).tobytes() if kept is None else top_bytes(roots, kept)
    return zlib.compress(content, _LEVEL)


def to_base64(content: bytes) -> str:
    """Encode bytes as a base64 string, which needs no escaping in HTML."""
    return base64.b64encode(content).decode("ascii")
