"""Compact forms of attention maps: largest weights, sparse rows, statistics and 8-bit weights.

Dimension names: H heads, R rows, U units, n entries. Sums are computed in float64.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnlens.reductions.maps import FloatArray
from attnlens.reductions.units import BoolArray, IndexArray

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUM_LEVELS = 255
_SIGN_BIT = np.uint32(1 << 31)
_LOW_BITS = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TopKWeights:
    """The largest weights of each row.

    Attributes:
        indices: (..., R, k) int32: column of each weight.
        values: (..., R, k): Weights in descending order. Equal weights are sorted by column.
        remaining_mass: (..., R): Sum of the other weights of each row.
    """

    indices: IndexArray
    values: FloatArray
    remaining_mass: FloatArray

    def __repr__(self) -> str:
        arrays = _describe_arrays(
            indices=self.indices, values=self.values, remaining_mass=self.remaining_mass
        )
        return f"TopKWeights({arrays})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SparseWeights:
    """Selected weights of each row, as a compressed sparse row matrix.

    With all axes except the last flattened in row-major order, row r has the entries from `indptr[r]` to
    `indptr[r + 1] - 1`, sorted by column. For SciPy, use `csr_array((values, indices, indptr))`.

    Attributes:
        indptr: (rows + 1,) int32: Index of each row's first entry.
        indices: (n,) int32: Column of each entry.
        values: (n,): Weight of each entry.
        kept_mass: (..., R): Sum of the entries of each row.
    """

    indptr: IndexArray
    indices: IndexArray
    values: FloatArray
    kept_mass: FloatArray

    def __repr__(self) -> str:
        return f"SparseWeights({_describe_arrays(values=self.values, kept_mass=self.kept_mass)})"

    @classmethod
    def joined(cls, parts: "Sequence[SparseWeights]") -> "SparseWeights":
        """Concatenate the rows of several matrices. `kept_mass` gets a new first axis."""
        starts = np.cumsum([0, *(len(part.indices) for part in parts)])
        ends = [part.indptr[1:] + np.int32(start) for part, start in zip(parts, starts, strict=False)]
        return cls(
            np.concatenate([np.zeros(1, np.int32), *ends]),
            np.concatenate([part.indices for part in parts]),
            np.concatenate([part.values for part in parts]),
            np.stack([part.kept_mass for part in parts]),
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RowStatistics:
    """Statistics of rows and columns. None if not requested.

    Attributes:
        received: (..., U): Column sums, i.e. the attention that each unit receives.
        entropy: (..., R): Entropy of each row in nats.
    """

    received: FloatArray | None = None
    entropy: FloatArray | None = None

    def __repr__(self) -> str:
        return f"RowStatistics({_describe_arrays(received=self.received, entropy=self.entropy)})"


def _describe_arrays(**arrays: npt.NDArray[Any] | None) -> str:
    """Return names, dtypes and shapes. The values would make a repr too long."""
    parts = [f"{name} {array.dtype} {array.shape}" for name, array in arrays.items() if array is not None]
    return ", ".join(parts)


def top_weights(maps: FloatArray, k: int) -> TopKWeights:
    """Return the k largest weights of each row of maps (H, R, U), or all U if U < k."""
    num_heads, num_rows, num_units = maps.shape
    k = min(k, num_units)
    indices = np.empty((num_heads, num_rows, k), dtype=np.int32)
    remaining_mass = np.empty((num_heads, num_rows), dtype=np.float32)
    for head, rows in enumerate(maps):
        indices[head] = _largest_columns(rows, k)
        others = rows.copy()
        np.put_along_axis(others, indices[head], 0, axis=-1)
        remaining_mass[head] = others.sum(axis=-1, dtype=np.float64)
    return TopKWeights(indices, np.take_along_axis(maps, indices, axis=-1), remaining_mass)


def _largest_columns(rows: FloatArray, k: int) -> npt.NDArray[np.intp]:
    """Return the columns (R, k) of the largest weights of rows (R, U).

    Each weight and its column are combined into one integer key. All keys of a row are different, so a
    partial sort gives the same result on every platform. Float bits sort like their values if those of
    negative numbers are inverted.
    """
    num_units = rows.shape[-1]
    bits = np.ascontiguousarray(rows + np.float32(0)).view(np.uint32)  # converts -0.0 to 0.0
    ordered = np.where(bits & _SIGN_BIT, ~bits, bits | _SIGN_BIT)
    keys = ordered.astype(np.uint64) << np.uint64(32)
    keys |= np.arange(num_units, 0, -1, dtype=np.uint64)  # lower columns get larger keys
    if 0 < k < num_units:
        keys.partition(num_units - k, axis=-1)
        keys = keys[:, num_units - k :]
    keys = np.sort(keys, axis=-1)[:, ::-1]
    columns: npt.NDArray[np.intp] = (num_units - (keys & _LOW_BITS)).astype(np.intp)
    return columns


def weights_from(maps: FloatArray, threshold: float) -> SparseWeights:
    """Return the weights of maps (H, R, U) that are at least `threshold`, compared in fp32."""
    is_kept = maps >= np.float32(threshold)
    counts = is_kept.sum(axis=-1)  # (H, R)
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    heads, rows, columns = np.nonzero(is_kept)
    values = maps[heads, rows, columns]
    kept_mass = np.where(is_kept, maps, np.float32(0)).sum(axis=-1, dtype=np.float64).astype(np.float32)
    return SparseWeights(indptr, columns.astype(np.int32), values, kept_mass)


def received(maps: FloatArray, is_special: BoolArray | None) -> FloatArray:
    """Return the column sums (H, U) of maps (H, U, U).

    Args:
        maps: (H, U, U).
        is_special: (U,): Rows to exclude. If None, all rows are included.
    """
    rows = maps if is_special is None else maps[:, ~is_special]
    sums: FloatArray = rows.sum(axis=1, dtype=np.float64).astype(np.float32)
    return sums


def entropy(maps: FloatArray) -> FloatArray:
    """Return the entropy (H, R) in nats of each row of maps (H, R, U): - sum A ln A with 0 ln 0 = 0."""
    sums = np.zeros(maps.shape[:-1], dtype=np.float32)
    for head, rows in enumerate(maps):
        logs = np.zeros_like(rows)
        np.log(rows, out=logs, where=rows > 0)
        logs *= rows
        sums[head] = -logs.sum(axis=-1, dtype=np.float64)
    sums += np.float32(0)  # converts -0.0 to 0.0
    return sums


def to_levels(maps: FloatArray) -> npt.NDArray[np.uint8]:
    """Quantize weights A, clipped to [0, 1], to round(255 sqrt(A)). Halves are rounded to even.

    The square root preserves small weights.
    """
    levels = np.sqrt(np.clip(maps, 0, 1))
    levels *= np.float32(_NUM_LEVELS)
    return np.rint(levels, out=levels).astype(np.uint8)


def from_levels(levels: npt.NDArray[np.uint8]) -> FloatArray:
    """Return the weights of quantized levels: (level / 255)²."""
    roots = levels.astype(np.float32) / np.float32(_NUM_LEVELS)
    return roots * roots
