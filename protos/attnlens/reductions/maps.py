"""Reductions of attention maps to smaller maps: words, dropped tokens, means and rollout.

Rows are queries and columns are keys. All values are fp32, except where a comment states float64 for
intermediate results. Functions do not modify their arguments, but may return one of them.

Dimension names: H heads, T tokens, W words, U units.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from attnlens.reductions.units import BoolArray, IndexArray

FloatArray = npt.NDArray[np.float32]


def word_level(maps: FloatArray, words: IndexArray) -> FloatArray:
    """Convert maps between tokens (H, T, T) to maps between words (H, W, W).

    Weights are summed over the tokens of a key word and averaged over the tokens of a query word, which
    preserves row sums (Clark et al. 2019, https://arxiv.org/abs/1906.04341, section 4.1).

    Args:
        maps: (H, T, T).
        words: (T,): Word index of each token. Every index from 0 to W - 1 occurs.
    """
    sizes = np.bincount(words)  # (W,)
    if len(sizes) == len(words):
        return maps
    order = np.argsort(words, kind="stable")
    if (order[1:] < order[:-1]).any():  # the tokens of a word are not adjacent
        maps = maps[:, order][:, :, order]
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    # Add the first tokens of all words, then the second tokens of the words that have one, and so on. Most
    # words have a single token.
    longer = [np.flatnonzero(sizes > offset) for offset in range(1, int(sizes.max()))]
    by_query = maps[:, starts]  # (H, W, T), rows first because they are contiguous
    for offset, indices in enumerate(longer, 1):
        by_query[:, indices] += maps[:, starts[indices] + offset]
    by_query /= sizes[:, np.newaxis].astype(np.float32)
    by_word: FloatArray = by_query[:, :, starts]  # (H, W, W)
    for offset, indices in enumerate(longer, 1):
        by_word[:, :, indices] += by_query[:, :, starts[indices] + offset]
    return by_word


def drop_units(maps: FloatArray, dropped: BoolArray) -> tuple[FloatArray, FloatArray]:
    """Remove rows and columns, and divide each row by its remaining sum.

    Rows with a remaining sum of 0 stay 0.

    Args:
        maps: (H, U, U). Each row sums to 1.
        dropped: (U,): Units to remove.

    Returns:
        The maps (H, U', U') of the other units, and the weight that was removed from each row, (H, U').
    """
    kept = np.flatnonzero(~dropped)
    lost = maps[:, kept][:, :, dropped].sum(axis=2, dtype=np.float64).astype(np.float32)
    left = maps[:, kept[:, np.newaxis], kept]  # (H, U', U')
    sums = left.sum(axis=2, keepdims=True, dtype=np.float64).astype(np.float32)
    np.divide(left, sums, out=left, where=sums > 0)
    return left, lost


def mean_of_heads(maps: FloatArray) -> FloatArray:
    """Return the mean over axis 0, with an axis of length 1."""
    mean: FloatArray = maps.mean(axis=0, keepdims=True)
    return mean


def mean_of_layers(layers: Iterable[FloatArray]) -> FloatArray:
    """Return the mean of at least one array of equal shape. Only one array at a time is in memory."""
    total: FloatArray | None = None
    count = 0
    for maps in layers:
        if total is None:
            total = maps.copy()
        else:
            total += maps
        count += 1
    if total is None:
        raise ValueError("the mean needs at least one layer")
    total /= np.float32(count)
    return total


def rollout(layers: Iterable[FloatArray], residual: float) -> FloatArray:
    """Return the attention rollout (1, U, U) of maps (1, U, U), given from the first layer to the last.

    R = (r I + (1 - r) A_L) ... (r I + (1 - r) A_1), computed in float64 (Abnar and Zuidema 2020,
    https://arxiv.org/abs/2005.00928, section 3). Element (i, j) is the share of unit j before the first layer
    in unit i after the last.
    """
    product: npt.NDArray[np.float64] | None = None
    for maps in layers:
        step = _rollout_step(maps, residual)
        product = step if product is None else step @ product
    if product is None:
        raise ValueError("a rollout needs at least one layer")
    return product[np.newaxis].astype(np.float32)


def mean_of_rollout(layers_from_last: Iterable[FloatArray], residual: float) -> FloatArray:
    """Return the mean over the rows of a rollout, (1, 1, U), without computing the matrix product.

    Args:
        layers_from_last: Maps (1, U, U), from the last layer to the first.
        residual: r of `rollout`.
    """
    row: npt.NDArray[np.float64] | None = None
    for maps in layers_from_last:
        num_units = maps.shape[-1]
        if row is None:
            row = np.full(num_units, 1 / max(1, num_units))
        row = residual * row + (1 - residual) * (row @ maps[0].astype(np.float64))
    if row is None:
        raise ValueError("a rollout needs at least one layer")
    return row[np.newaxis, np.newaxis].astype(np.float32)


def mean_over_rows(maps: FloatArray) -> FloatArray:
    """Return the mean over the rows of maps (H, U, U), (H, 1, U). Sums are computed in float64."""
    sums = maps.sum(axis=1, keepdims=True, dtype=np.float64)
    mean: FloatArray = (sums / max(1, maps.shape[1])).astype(np.float32)
    return mean


def _rollout_step(maps: FloatArray, residual: float) -> npt.NDArray[np.float64]:
    """Return r I + (1 - r) A for a map (1, U, U)."""
    step: npt.NDArray[np.float64] = maps[0] * np.float64(1 - residual)
    step[np.diag_indices_from(step)] += residual
    return step
