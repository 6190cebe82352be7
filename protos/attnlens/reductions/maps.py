"""Maps of attention made of maps. Rows are what attends, columns what is attended to.

Letters: H heads, T tokens, W words, U units. Everything is fp32; where an intermediate sum is float64 it says
so. Nothing changes its arguments; a result may be an argument.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens.reductions.units import BoolArray, IndexArray

FloatArray = npt.NDArray[np.float32]


def word_level(maps: FloatArray, words: IndexArray) -> FloatArray:
    """Return the maps (H, W, W) between words of the maps (H, T, T) between tokens.

    The sum over the tokens of a word as key, the mean over its tokens as query (Clark et al. 2019,
    https://arxiv.org/abs/1906.04341, section 4.1): what a row sums to stays.

    Args:
        maps: (H, T, T).
        words: (T,), the number of each token's word: all numbers from 0 to W - 1 occur.
    """
    sizes = np.bincount(words)  # (W,)
    if len(sizes) == len(words):
        return maps
    order = np.argsort(words, kind="stable")
    if (order[1:] < order[:-1]).any():  # the tokens of a word do not stand together
        maps = maps[:, order][:, :, order]
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    # The first tokens of all words, then the second ones of those that have two, and so on: most have one.
    longer = [np.flatnonzero(sizes > place) for place in range(1, int(sizes.max()))]
    by_query = maps[:, starts]  # (H, W, T), rows first: they are copied whole
    for place, numbers in enumerate(longer, 1):
        by_query[:, numbers] += maps[:, starts[numbers] + place]
    by_query /= sizes[:, np.newaxis].astype(np.float32)
    by_word: FloatArray = by_query[:, :, starts]  # (H, W, W)
    for place, numbers in enumerate(longer, 1):
        by_word[:, :, numbers] += by_query[:, :, starts[numbers] + place]
    return by_word


def without(maps: FloatArray, dropped: BoolArray) -> tuple[FloatArray, FloatArray]:
    """Return maps (H, U', U') without some rows and columns, and what their rows had lost, (H, U').

    Each row is divided by what is left of it. A row of which nothing is left stays 0.

    Args:
        maps: (H, U, U), of which each row sums to 1.
        dropped: (U,).
    """
    kept = np.flatnonzero(~dropped)
    lost = maps[:, kept][:, :, dropped].sum(axis=2, dtype=np.float64).astype(np.float32)
    left = maps[:, kept[:, np.newaxis], kept]  # (H, U', U')
    sums = left.sum(axis=2, keepdims=True, dtype=np.float64).astype(np.float32)
    np.divide(left, sums, out=left, where=sums > 0)
    return left, lost


def mean_of_heads(maps: FloatArray) -> FloatArray:
    """Return the mean over axis 0, as an axis of length 1."""
    mean: FloatArray = maps.mean(axis=0, keepdims=True)
    return mean


def mean_of_layers(layers: Iterable[FloatArray]) -> FloatArray:
    """Return the mean of maps of one shape, at least one. Only one of them is held at a time."""
    total: FloatArray | None = None
    count = 0
    for maps in layers:
        if total is None:
            total = maps.copy()
        else:
            total += maps
        count += 1
    if total is None:
        raise ValueError("there is no mean of no layers")
    total /= np.float32(count)
    return total


def rollout(layers: Iterable[FloatArray], residual: float) -> FloatArray:
    """Return the rollout (1, U, U) of maps (1, U, U), the earliest layer first.

    R = (r I + (1 - r) A_L) ... (r I + (1 - r) A_1) (Abnar and Zuidema 2020,
    https://arxiv.org/abs/2005.00928, section 3): how much of each unit before the first of the layers there
    is in each unit after the last. The product is made in float64.
    """
    product: npt.NDArray[np.float64] | None = None
    for maps in layers:
        step = _step(maps, residual)
        product = step if product is None else step @ product
    if product is None:
        raise ValueError("there is no rollout of no layers")
    return product[np.newaxis].astype(np.float32)


def mean_of_rollout(layers_from_last: Iterable[FloatArray], residual: float) -> FloatArray:
    """Return the mean over the rows of a rollout, (1, 1, U), without making the rollout.

    Args:
        layers_from_last: maps (1, U, U), the latest layer first.
        residual: r, as in `rollout`.
    """
    row: npt.NDArray[np.float64] | None = None
    for maps in layers_from_last:
        num_units = maps.shape[-1]
        if row is None:
            row = np.full(num_units, 1 / max(1, num_units))
        row = residual * row + (1 - residual) * (row @ maps[0].astype(np.float64))
    if row is None:
        raise ValueError("there is no rollout of no layers")
    return row[np.newaxis, np.newaxis].astype(np.float32)


def mean_over_rows(maps: FloatArray) -> FloatArray:
    """Return the mean over the rows of maps (H, U, U), as (H, 1, U). The sum is made in float64."""
    sums = maps.sum(axis=1, keepdims=True, dtype=np.float64)
    mean: FloatArray = (sums / max(1, maps.shape[1])).astype(np.float32)
    return mean


def _step(maps: FloatArray, residual: float) -> npt.NDArray[np.float64]:
    """Return r I + (1 - r) A of a map (1, U, U)."""
    step: npt.NDArray[np.float64] = maps[0] * np.float64(1 - residual)
    step[np.diag_indices_from(step)] += residual
    return step


def shown(**arrays: npt.NDArray[Any] | None) -> str:
    """Return names, element types and shapes: the numbers are too many to be read."""
    parts = [f"{name} {array.dtype} {array.shape}" for name, array in arrays.items() if array is not None]
    return ", ".join(parts)
