"""Formulas that score the tokens of a text, computed from model outputs with NumPy.

    p      = pooled vector after the dense layers, reduced to the first E components
    target = d . p / |p|, with a direction d

Sources: leave-one-out is the erasure method of Li et al. 2016 (https://arxiv.org/abs/1612.08220); rollout
    comes from Abnar and Zuidema 2020 (https://arxiv.org/abs/2005.00928). docs/explanations.md describes each
    method.

Dimension names: T tokens, W words, D hidden size, E embedding size, L layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from attnlens.pooling import FloatArray, Pooling

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

ROLLOUT_RESIDUAL = 0.5


class ExplainMethod(IntEnum):
    """Explanation methods. Values match `attnlens.v1.ExplainMethod`, which documents them."""

    CONTRIBUTIONS = 1
    OUTPUT_SHARE = 2
    LEAVE_ONE_OUT = 3
    ROLLOUT = 4
    RECEIVED_ATTENTION = 5
    CONTRIBUTION_NORM = 6


class ExplainLevel(IntEnum):
    """Unit of scores. Values match `attnlens.v1.ExplainLevel`."""

    TOKENS = 1
    WORDS = 2


class PairMatrix(IntEnum):
    """Matrices of token pairs. Values match `attnlens.v1.PairMatrix`, which documents them."""

    OUTPUT = 1
    INTERACTION = 2
    INPUT = 3


# Methods whose scores and baseline add up to the target. All other methods only rank tokens.
COMPLETE_METHODS = frozenset({ExplainMethod.CONTRIBUTIONS, ExplainMethod.OUTPUT_SHARE})
# Minimum contribution of a relevant word, relative to the largest.
RELEVANT_SHARE = 0.25
# A warning is shown if the rank correlation of a method with leave-one-out is below this value.
LOW_FAITHFULNESS = 0.7
# Faithfulness is measured on texts of this many tokens: at least 5 that are not special, at most 128 of all.
MIN_MEASURED_TOKENS = 5
MAX_MEASURED_TOKENS = 128


def pooling_weights(pooling: Pooling, num_tokens: int, num_excluded: int = 0) -> FloatArray:
    """Return the weight of each token vector h[t] in the pooled vector, w (T,): p = sum of w[t] h[t].

    MAX is not a weighted sum. Its weights are 1 for included tokens and 0 for excluded ones.

    Args:
        pooling: Pooling method.
        num_tokens: T.
        num_excluded: Number of leading tokens to exclude, less than T.
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


def exclude_token(weights: FloatArray, pooling: Pooling, token: int) -> FloatArray | None:
    """Return pooling weights with one additional token excluded, or None if no token would be left.

    The other tokens keep their positions.

    Args:
        weights: Result of `pooling_weights`, (T,).
        pooling: Pooling method.
        token: Index of the token to exclude.
    """
    result = weights.copy()
    result[token] = 0
    count = int(np.count_nonzero(result))
    if count == 0:
        return None
    if pooling in (Pooling.MEAN, Pooling.WEIGHTED_MEAN):
        result /= result.sum()
    elif pooling is Pooling.MEAN_SQRT_LENGTH:
        result[result > 0] = 1 / math.sqrt(count)
    return result


def pool_weighted(last_hidden_state: FloatArray, weights: FloatArray, pooling: Pooling) -> FloatArray:
    """Pool (T, D) into (D,) with weights (T,) from `pooling_weights` or `exclude_token`."""
    if pooling is Pooling.MAX:
        return np.asarray(last_hidden_state[weights > 0].max(axis=0))
    return np.asarray(weights @ last_hidden_state)


def to_unit_length(vectors: npt.NDArray[np.floating]) -> Float64Array:
    """Scale vectors (..., E) to length 1 in float64. Zero vectors stay zero."""
    double = np.asarray(vectors, dtype=np.float64)
    lengths = np.linalg.norm(double, axis=-1, keepdims=True)
    return np.asarray(double / np.where(lengths > 0, lengths, 1))


def output_shares(
    last_hidden_state: FloatArray, weights: FloatArray, direction: Float64Array, length: float
) -> Float64Array:
    """Return w[t] h[t] . d / |p| for each token, (T,). The values add up to the target.

    Only valid without dense layers.

    Args:
        last_hidden_state: h, (T, D).
        weights: w, (T,).
        direction: d, (E,). Only the first E components of h are used.
        length: |p|.
    """
    shares = last_hidden_state[:, : len(direction)].astype(np.float64) @ direction
    return np.asarray(weights * shares / length)


def leave_one_out_effects(
    direction: Float64Array, embedding: Float64Array, masked_embeddings: Float64Array
) -> Float64Array:
    """Return d . (p / |p| - p' / |p'|) for each token, (T,): the decrease in the target without the token.

    For logits p, both are not normalized.

    Args:
        direction: d, (E,).
        embedding: p / |p|, (E,).
        masked_embeddings: p' / |p'| with each token left out in turn, (T, E). NaN for tokens that cannot be
            left out.
    """
    return np.asarray((embedding - masked_embeddings) @ direction)


def rollout(
    attention: Sequence[npt.NDArray[np.floating]], weights: FloatArray, residual: float = ROLLOUT_RESIDUAL
) -> Float64Array:
    """Return the attention rollout w R, (T,), which sums to 1.

    R is the matrix product of r I + (1 - r) A over the layers, with later layers on the left.

    Args:
        attention: A for each layer, first layer first: the mean over heads, (T, T).
        weights: w, (T,). Scaled to sum to 1.
        residual: r.
    """
    row: Float64Array = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    for layer in reversed(attention):
        row = residual * row + (1 - residual) * (row @ layer.astype(np.float64))
    return row


def received_attention(attention: npt.NDArray[np.floating]) -> Float64Array:
    """Return the column sums (T,), whose sum is T, of the last layer's mean attention over heads (T, T)."""
    return np.asarray(attention.sum(axis=0, dtype=np.float64))


def output_matrix(
    first: tuple[FloatArray, FloatArray], second: tuple[FloatArray, FloatArray], lengths: float, size: int
) -> Float64Array:
    """Return w[i] h[i] . w'[j] h'[j] / (|p| |p'|) for two texts, (T, T'). The sum is the cosine of p and p'.

    Args:
        first: h (T, D) and w (T,) of the first text.
        second: h' and w' of the second text.
        lengths: |p| |p'|.
        size: E. Only the first E components of h and h' are used.
    """
    rows, columns = (
        weights[:, None].astype(np.float64) * hidden[:, :size] for hidden, weights in (first, second)
    )
    return np.asarray(rows @ columns.T / lengths)


def interaction_matrix(
    first: tuple[Float64Array, Float64Array], second: tuple[Float64Array, Float64Array]
) -> Float64Array:
    """Return s - s(-i) - s(-j) + s(-i-j), (T, T'), where s(-i) is the cosine of two texts without token i.

    The second difference of a dot product is the dot product of the differences.

    Args:
        first: Normalized embedding (E,) of the first text, and its normalized embeddings with each token left
            out in turn, (T, E).
        second: The same for the second text.
    """
    rows, columns = (embedding - masked for embedding, masked in (first, second))
    return np.asarray(rows @ columns.T)


def sum_over_words(scores: Float64Array, unit_ids: Sequence[int], axis: int = 0) -> Float64Array:
    """Sum the scores of each word's tokens along an axis: (T, ...) to (W, ...). NaN propagates.

    Args:
        scores: Scores with one entry per token along `axis`.
        unit_ids: Word index of each token.
        axis: Token axis.
    """
    moved = np.moveaxis(scores, axis, 0)
    sums = np.zeros((max(unit_ids, default=-1) + 1, *moved.shape[1:]))
    np.add.at(sums, np.asarray(unit_ids, dtype=np.int64), moved)
    return np.moveaxis(sums, 0, axis)


@dataclass(frozen=True, slots=True)
class RelevantSpan:
    """Part of a document that raises its logit.

    Attributes:
        start: Index of its first code point in the document.
        end: Index after its last code point.
        score: Its share of the positive contributions of the document's words, from 0 to 1.
    """

    start: int
    end: int
    score: float


def relevant_spans(
    spans: Sequence[tuple[int, int]],
    contributions: Sequence[float],
    *,
    threshold: float = 0.0,
    max_spans: int | None = None,
) -> list[RelevantSpan]:
    """Return the parts of a document that raise its logit, in the order of the document.

    Words are relevant if their contribution is at least a quarter of the largest. Relevant words in
    succession form one span.

    Args:
        spans: Start and end of each word of the document in code points, in order.
        contributions: Contribution of each word to the logit.
        threshold: Minimum score of a span.
        max_spans: Maximum number of spans. The ones with the highest scores are kept. None means all.

    >>> words = [(0, 4), (5, 11), (12, 17), (18, 22)]
    >>> found = relevant_spans(words, [1.0, 3.0, -2.0, 1.0])
    >>> [(span.start, span.end, span.score) for span in found]
    [(0, 11, 0.8), (18, 22, 0.2)]
    """
    largest, total = max(contributions, default=0.0), math.fsum(value for value in contributions if value > 0)
    if largest <= 0:
        return []
    found: list[RelevantSpan] = []
    follows = False
    for (start, end), value in zip(spans, contributions, strict=True):
        is_relevant = value >= RELEVANT_SHARE * largest
        if is_relevant and follows:
            last = found.pop()
            found.append(RelevantSpan(last.start, end, last.score + value / total))
        elif is_relevant:
            found.append(RelevantSpan(start, end, value / total))
        follows = is_relevant
    found = [span for span in found if span.score >= threshold]
    best = sorted(found, key=lambda span: -span.score)[:max_spans]
    return sorted(best, key=lambda span: span.start)


def rank_correlation(scores: npt.NDArray[np.floating], effects: npt.NDArray[np.floating]) -> float:
    """Return Spearman's rank correlation over the positions where both values are finite.

    NaN if there are fewer than three such positions, or if all values of one array are equal.
    """
    is_finite = np.isfinite(scores) & np.isfinite(effects)
    if np.count_nonzero(is_finite) < 3:  # noqa: PLR2004 - the correlation of two values is always 1 or -1
        return math.nan
    return spearman(scores[is_finite], effects[is_finite])


def spearman(first: npt.NDArray[np.floating], second: npt.NDArray[np.floating]) -> float:
    """Return Spearman's rank correlation, or NaN if all values of one array are equal. Ties share a rank."""
    ranks = [_ranks(np.asarray(values, dtype=np.float64)) for values in (first, second)]
    left, right = (values - values.mean() for values in ranks)
    length = math.sqrt(float(left @ left) * float(right @ right))
    return float(left @ right) / length if length else math.nan


def _ranks(values: Float64Array) -> Float64Array:
    _, indices, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[indices], dtype=np.float64)
