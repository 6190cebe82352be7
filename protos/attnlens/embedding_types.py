"""Quantizes embeddings to bytes or bits.

Implements the formulas of `attnlens.v1.EmbeddingType`, like `quantize_embeddings` of sentence-transformers.

Dimension names: N texts, E embedding size.
"""

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens.pooling import FloatArray

NUM_LEVELS = 256


class EmbeddingType(IntEnum):
    """Types of embeddings, with the values of `attnlens.v1.EmbeddingType`."""

    FLOAT = 1
    INT8 = 2
    UINT8 = 3
    BINARY = 4
    UBINARY = 5

    @property
    def needs_ranges(self) -> bool:
        """Whether the quantization depends on the range of each component."""
        return self in (EmbeddingType.INT8, EmbeddingType.UINT8)

    def num_columns(self, dimensions: int) -> int:
        """Return the number of elements of a vector with this number of components."""
        return -(-dimensions // 8) if self in (EmbeddingType.BINARY, EmbeddingType.UBINARY) else dimensions


def quantize(
    vectors: FloatArray, embedding_type: EmbeddingType, ranges: FloatArray | None = None
) -> npt.NDArray[Any]:
    """Quantize finite vectors (N, E). FLOAT returns them unchanged.

    Args:
        vectors: Embeddings.
        embedding_type: Type of the result.
        ranges: Minimum and maximum of each component (2, E), for INT8 and UINT8. Values outside are clipped.

    Returns:
        (N, E) int8 or uint8, or (N, ceil(E / 8)) for BINARY (int8) and UBINARY (uint8).
    """
    match embedding_type:
        case EmbeddingType.FLOAT:
            return vectors
        case EmbeddingType.UBINARY | EmbeddingType.BINARY:
            levels = np.packbits(vectors > 0, axis=-1)
        case EmbeddingType.UINT8 | EmbeddingType.INT8:
            if ranges is None:
                raise ValueError("INT8 and UINT8 need ranges: specify the range of each component")
            levels = _levels(vectors, ranges)
    is_signed = embedding_type in (EmbeddingType.INT8, EmbeddingType.BINARY)
    return (levels ^ 0x80).view(np.int8) if is_signed else levels  # flips the sign bit: subtracts 128


def _levels(vectors: FloatArray, ranges: FloatArray) -> npt.NDArray[np.uint8]:
    steps = (ranges[1] - ranges[0]) / (NUM_LEVELS - 1)
    steps[steps == 0] = 1
    with np.errstate(over="ignore"):  # far outside the range
        levels = np.floor((vectors - ranges[0]) / steps)
    return np.asarray(np.clip(levels, 0, NUM_LEVELS - 1), dtype=np.uint8)


def ranges_problem(ranges: npt.NDArray[Any], dimensions: int) -> str | None:
    """Return the defect of the ranges of embeddings with this number of components, or None."""
    if ranges.dtype != np.float32:
        return f"has the type {ranges.dtype}, expected float32"
    if ranges.shape != (2, dimensions):
        return f"has the shape {list(ranges.shape)}, expected [2, {dimensions}]"
    with np.errstate(over="ignore", invalid="ignore"):
        widths = ranges[1] - ranges[0]
    if not np.isfinite(widths).all():
        return "contains NaN, infinity, or a difference beyond the range of float32"
    if (widths < 0).any():
        return f"has a minimum above the maximum in component {(widths < 0).argmax()}"
    return None
