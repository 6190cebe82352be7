"""The weights of maps that matter most. Letters: H heads, R rows, U units, n entries."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attnlens.reductions.maps import FloatArray, shown
from attnlens.reductions.units import IndexArray

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIGN = np.uint32(1 << 31)
_LOW = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TopKWeights:
    """The largest weights of each row.

    Attributes:
        indices: (..., R, k) int32: their columns.
        values: (..., R, k): the weights, in descending order; of equal ones the lower column is first.
        remaining_mass: (..., R): sum of the other weights of each row.
    """

    indices: IndexArray
    values: FloatArray
    remaining_mass: FloatArray

    def __repr__(self) -> str:
        arrays = shown(indices=self.indices, values=self.values, remaining_mass=self.remaining_mass)
        return f"TopKWeights({arrays})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SparseWeights:
    """Some weights of each row, as compressed sparse rows.

    Row number r of all axes but the last, in row-major order, has the entries `indptr[r]` to
    `indptr[r + 1]` - 1, in ascending order of columns: with SciPy, `csr_array((values, indices, indptr))`.

    Attributes:
        indptr: (rows + 1,) int32.
        indices: (n,) int32: columns.
        values: (n,): the weights.
        kept_mass: (..., R): what the entries of each row sum to.
    """

    indptr: IndexArray
    indices: IndexArray
    values: FloatArray
    kept_mass: FloatArray

    def __repr__(self) -> str:
        return f"SparseWeights({shown(values=self.values, kept_mass=self.kept_mass)})"

    @classmethod
    def joined(cls, parts: "Sequence[SparseWeights]") -> "SparseWeights":
        """Return the rows of several, one after the other, with a new axis before those of `kept_mass`."""
        starts = np.cumsum([0, *(len(part.indices) for part in parts)])
        ends = [part.indptr[1:] + np.int32(start) for part, start in zip(parts, starts, strict=False)]
        return cls(
            np.concatenate([np.zeros(1, np.int32), *ends]),
            np.concatenate([part.indices for part in parts]),
            np.concatenate([part.values for part in parts]),
            np.stack([part.kept_mass for part in parts]),
        )


def top_weights(maps: FloatArray, k: int) -> TopKWeights:
    """Return the k largest weights of each row of maps (H, R, U), or U where that is less."""
    num_heads, num_rows, num_units = maps.shape
    k = min(k, num_units)
    indices = np.empty((num_heads, num_rows, k), dtype=np.int32)
    remaining_mass = np.empty((num_heads, num_rows), dtype=np.float32)
    for head, rows in enumerate(maps):
        indices[head] = _largest(rows, k)
        others = rows.copy()
        np.put_along_axis(others, indices[head], 0, axis=-1)
        remaining_mass[head] = others.sum(axis=-1, dtype=np.float64)
    return TopKWeights(indices, np.take_along_axis(maps, indices, axis=-1), remaining_mass)


def _largest(rows: FloatArray, k: int) -> npt.NDArray[np.intp]:
    """Return the columns (R, k) of the largest weights of rows (R, U).

    A weight and its column become one whole number, so that no two of a row are equal and a partial sort
    finds the same ones everywhere. Bits of floats are in the order of the numbers once those of negative
    ones are inverted.
    """
    num_units = rows.shape[-1]
    bits = np.ascontiguousarray(rows + np.float32(0)).view(np.uint32)  # -0.0 is 0
    ordered = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    keys = ordered.astype(np.uint64) << np.uint64(32)
    keys |= np.arange(num_units, 0, -1, dtype=np.uint64)  # the lower column is larger
    if 0 < k < num_units:
        keys.partition(num_units - k, axis=-1)
        keys = keys[:, num_units - k :]
    keys = np.sort(keys, axis=-1)[:, ::-1]
    columns: npt.NDArray[np.intp] = (num_units - (keys & _LOW)).astype(np.intp)
    return columns


def weights_from(maps: FloatArray, threshold: float) -> SparseWeights:
    """Return the weights of maps (H, R, U) that are at least `threshold`, which is compared in fp32."""
    is_kept = maps >= np.float32(threshold)
    counts = is_kept.sum(axis=-1)  # (H, R)
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    heads, rows, columns = np.nonzero(is_kept)
    values = maps[heads, rows, columns]
    kept_mass = np.where(is_kept, maps, np.float32(0)).sum(axis=-1, dtype=np.float64).astype(np.float32)
    return SparseWeights(indptr, columns.astype(np.int32), values, kept_mass)
