"""How far two tensors are apart, on the tokens that count.

B batch, T tokens, D width, H heads, N live tokens of a batch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Difference:
    """The difference of two tensors on live tokens.

    Attributes:
        max_abs: the largest absolute difference; NaN where either holds one.
        mean_abs: the mean absolute difference.
        p99_abs: the 99th percentile of the absolute difference.
        min_cosine: the smallest cosine between rows (of D, or of T for attention); 1 where both are zero.
        count: the number of elements.
        index: where the largest difference is.
        values: what the two tensors hold there.
    """

    max_abs: float
    mean_abs: float
    p99_abs: float
    min_cosine: float
    count: int
    index: tuple[int, ...]
    values: tuple[float, float]


def select_live(tensor: FloatArray, live: BoolArray) -> FloatArray:
    """Select what belongs to live tokens, for attention the queries with all their columns.

    (B, T, D) -> (N, D), or (B, H, T, T) -> (N, H, T), by `live` (B, T).
    """
    return tensor.transpose(0, 2, 1, 3)[live] if _is_attention(tensor) else tensor[live]


def max_abs_difference(first: FloatArray, second: FloatArray) -> float:
    """Return the largest absolute difference of two arrays of one shape; 0 for empty ones."""
    return float(np.abs(np.subtract(first, second, dtype=np.float64)).max(initial=0.0))


def difference(measured: FloatArray, expected: FloatArray, live: BoolArray) -> Difference:
    """Compare two tensors on live tokens.

    Both are (B, T, D), or both (B, H, T, T); `live` is (B, T) with at least one token. A reported index is
    one of the whole tensor.
    """
    first, second = select_live(measured, live), select_live(expected, live)
    error = np.abs(np.subtract(first, second, dtype=np.float64))
    place = np.unravel_index(int(error.argmax()), error.shape)
    row, token = (int(axis) for axis in np.argwhere(live)[place[0]])
    rest = [int(axis) for axis in place[1:]]
    return Difference(
        max_abs=float(error.max()),
        mean_abs=float(error.mean()),
        p99_abs=_percentile99(error),
        min_cosine=_min_cosine(first, second),
        count=error.size,
        index=(row, rest[0], token, rest[1]) if _is_attention(measured) else (row, token, *rest),
        values=(float(first[place]), float(second[place])),
    )


def _is_attention(tensor: FloatArray) -> bool:
    return tensor.ndim == 4  # noqa: PLR2004 - (B, H, T, T)


def _percentile99(error: npt.NDArray[np.float64]) -> float:
    rank = int(0.99 * (error.size - 1))
    return float(np.partition(error, rank, axis=None)[rank])


def _min_cosine(first: FloatArray, second: FloatArray) -> float:
    first, second = first.astype(np.float64), second.astype(np.float64)
    products = np.einsum("...e,...e->...", first, second)
    norms = np.sqrt(np.einsum("...e,...e->...", first, first) * np.einsum("...e,...e->...", second, second))
    cosines = np.divide(products, norms, out=np.ones_like(products), where=norms != 0)
    return float(cosines.min())
