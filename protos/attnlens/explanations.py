"""What the tokens of a text did for its embedding: the formulas that need no graph of their own.

    p      = the pooled vector through the dense layers, cut to the first components
    target = d . p / |p|

Sources: leave-one-out is erasure (Li et al. 2016, https://arxiv.org/abs/1612.08220), rollout is Abnar and
Zuidema 2020 (https://arxiv.org/abs/2005.00928), the interaction is a second difference. docs/explanations.md
says what each measures.

Letters: T tokens of a text, W words of it, D hidden size, E components of an embedding, L layers.
"""

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from attnlens.pooling import FloatArray, Pooling

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

ROLLOUT_RESIDUAL = 0.5


class ExplainMethod(IntEnum):
    """How to explain an embedding. The numbers are those of `attnlens.v1.ExplainMethod`, which says more."""

    CONTRIBUTIONS = 1
    OUTPUT_SHARE = 2
    LEAVE_ONE_OUT = 3
    ROLLOUT = 4
    RECEIVED_ATTENTION = 5
    CONTRIBUTION_NORM = 6


class ExplainLevel(IntEnum):
    """What scores are about. The numbers are those of `attnlens.v1.ExplainLevel`."""

    TOKENS = 1
    WORDS = 2


class PairMatrix(IntEnum):
    """What to say of pairs of tokens. The numbers are those of `attnlens.v1.PairMatrix`, which says more."""

    OUTPUT = 1
    INTERACTION = 2
    INPUT = 3


# Methods whose scores and baseline add up to the target. All others are for ranking only.
COMPLETE_METHODS = frozenset({ExplainMethod.CONTRIBUTIONS, ExplainMethod.OUTPUT_SHARE})
# Below this rank correlation with leave-one-out, scores are shown with a caution.
LOW_FAITHFULNESS = 0.7


def pooling_weights(pooling: Pooling, num_tokens: int, num_excluded: int = 0) -> FloatArray:
    """Return w (T,) with which `attnlens.pooling.pool` adds up token vectors: p = sum of w[t] h[t].

    Of MAX: 1 for each token that counts, since it is no sum.

    Args:
        pooling: which formula.
        num_tokens: T.
        num_excluded: how many tokens at the beginning don't count, less than T.
    """
    weights = np.zeros(num_tokens, dtype=np.float32)
    counted, count = weights[num_excluded:], num_tokens - num_excluded
    match pooling:
        case Pooling.CLS:
            counted[0] = 1
        case Pooling.LAST_TOKEN:
            counted[-1] = 1
        case Pooling.MAX:
            counted[:] = 1
        case Pooling.WEIGHTED_MEAN:
            positions = np.arange(num_excluded + 1, num_tokens + 1, dtype=np.float32)
            counted[:] = positions / positions.sum()
        case Pooling.MEAN_SQRT_LENGTH:
            counted[:] = 1 / math.sqrt(count)
        case Pooling.MEAN:
            counted[:] = 1 / count
    return weights


def without_token(weights: FloatArray, pooling: Pooling, token: int) -> FloatArray | None:
    """Return `pooling_weights` without a token; the others keep their positions. None: nothing counts."""
    left = weights.copy()
    left[token] = 0
    count = int(np.count_nonzero(left))
    if count == 0:
        return None
    if pooling in (Pooling.MEAN, Pooling.WEIGHTED_MEAN):
        left /= left.sum()
    elif pooling is Pooling.MEAN_SQRT_LENGTH:
        left[left > 0] = 1 / math.sqrt(count)
    return left


def pool_weighted(last_hidden_state: FloatArray, weights: FloatArray, pooling: Pooling) -> FloatArray:
    """Reduce (T, D) to (D,) with the weights (T,) of `pooling_weights` or `without_token`."""
    if pooling is Pooling.MAX:
        return np.asarray(last_hidden_state[weights > 0].max(axis=0))
    return np.asarray(weights @ last_hidden_state)


def unit(vector: npt.NDArray[np.floating]) -> Float64Array:
    """Scale (..., E) to length 1, in double precision; zeros stay."""
    double = np.asarray(vector, dtype=np.float64)
    lengths = np.linalg.norm(double, axis=-1, keepdims=True)
    return np.asarray(double / np.where(lengths > 0, lengths, 1))


def output_shares(
    last_hidden_state: FloatArray, weights: FloatArray, direction: Float64Array, length: float
) -> Float64Array:
    """Return w[t] h[t] . d / |p| for each token, (T,): they add up to the target.

    Args:
        last_hidden_state: (T, D); there are no dense layers.
        weights: w, (T,).
        direction: d, (E,): of the first E components of D.
        length: |p|.
    """
    shares = last_hidden_state[:, : len(direction)].astype(np.float64) @ direction
    return np.asarray(weights * shares / length)


def leave_one_out_effects(
    direction: Float64Array, embedding: Float64Array, left_out: Float64Array
) -> Float64Array:
    """Return d . (p / |p| - p' / |p'|) for each token, (T,): how much the target falls without it.

    Args:
        direction: d, (E,).
        embedding: p / |p|, (E,).
        left_out: p' / |p'| without each token, (T, E); NaN where a token was not left out.
    """
    return np.asarray((embedding - left_out) @ direction)


def rollout(
    attention: Sequence[npt.NDArray[np.floating]], weights: FloatArray, residual: float = ROLLOUT_RESIDUAL
) -> Float64Array:
    """Return w' R for R the product over layers of r I + (1 - r) A, later layers on the left: (T,), sum 1.

    Args:
        attention: the mean over heads of each layer, L of (T, T), first layer first.
        weights: (T,), scaled to sum to 1 here.
        residual: r.
    """
    row: Float64Array = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    for layer in reversed(attention):
        row = residual * row + (1 - residual) * (row @ layer.astype(np.float64))
    return row


def received_attention(attention: npt.NDArray[np.floating]) -> Float64Array:
    """Return what all tokens of (T, T), the mean over heads of the last layer, give to each: (T,), sum T."""
    return np.asarray(attention.sum(axis=0, dtype=np.float64))


def output_matrix(
    first: tuple[FloatArray, FloatArray], second: tuple[FloatArray, FloatArray], lengths: float, size: int
) -> Float64Array:
    """Return w[i] h[i] . w'[j] h'[j] / (|p| |p'|) for two texts, (T, T'): the sum is the cosine of p and p'.

    Args:
        first: h (T, D) and w (T,) of the first text.
        second: those of the second one.
        lengths: |p| |p'|.
        size: E, how many components of D the embedding has.
    """
    rows, columns = (
        weights[:, None].astype(np.float64) * hidden[:, :size] for hidden, weights in (first, second)
    )
    return np.asarray(rows @ columns.T / lengths)


def interaction_matrix(
    first: tuple[Float64Array, Float64Array], second: tuple[Float64Array, Float64Array]
) -> Float64Array:
    """Return s - s(-i) - s(-j) + s(-i-j) of the cosine s of two texts, (T, T').

    Each text is its embedding, p / |p| (E,), and the one without each token (T, E). The second difference of
    a product of two vectors is the product of their differences.
    """
    rows, columns = (embedding - left_out for embedding, left_out in (first, second))
    return np.asarray(rows @ columns.T)


def sum_over_words(scores: Float64Array, unit_ids: Sequence[int], axis: int = 0) -> Float64Array:
    """Add up the scores of the tokens of each word, along an axis: (T, ...) to (W, ...). NaN stays NaN.

    Args:
        scores: one a token.
        unit_ids: the number of each token's word, from 0, T of them; none is left out.
        axis: of tokens.
    """
    moved = np.moveaxis(scores, axis, 0)
    sums = np.zeros((max(unit_ids, default=-1) + 1, *moved.shape[1:]))
    np.add.at(sums, np.asarray(unit_ids, dtype=np.int64), moved)
    return np.moveaxis(sums, 0, axis)


def rank_correlation(scores: npt.NDArray[np.floating], effects: npt.NDArray[np.floating]) -> float:
    """Return Spearman's rank correlation over the places where both are numbers; equal numbers share a rank.

    NaN where there are fewer than three such places, or all numbers of one are equal.
    """
    known = np.isfinite(scores) & np.isfinite(effects)
    if np.count_nonzero(known) < 3:  # noqa: PLR2004 - two always agree or disagree
        return math.nan
    return spearman(scores[known], effects[known])


def spearman(first: npt.NDArray[np.floating], second: npt.NDArray[np.floating]) -> float:
    """Return Spearman's rank correlation of two samples; equal numbers share a rank. NaN: all are equal."""
    ranks = [_ranks(np.asarray(numbers, dtype=np.float64)) for numbers in (first, second)]
    left, right = (numbers - numbers.mean() for numbers in ranks)
    length = math.sqrt(float(left @ left) * float(right @ right))
    return float(left @ right) / length if length else math.nan


def _ranks(numbers: Float64Array) -> Float64Array:
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[places], dtype=np.float64)
