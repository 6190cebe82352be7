"""Pools token vectors and converts the result to an embedding.

    pool -> dense layers -> normalize -> keep the first dimensions -> normalize

Implements the formulas of `attnlens.v1.Pooling`, like sentence-transformers. `attnlens.dense` loads the dense
layers.

Dimension names: N texts, T tokens, D hidden size, E embedding size.
"""

import math
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


class Pooling(IntEnum):
    """Pooling methods, with the values of `attnlens.v1.Pooling`."""

    MEAN = 1
    CLS = 2
    MAX = 3
    LAST_TOKEN = 4
    WEIGHTED_MEAN = 5
    MEAN_SQRT_LENGTH = 6


def pool(last_hidden_state: FloatArray, pooling: Pooling, num_excluded: int = 0) -> FloatArray:
    """Pool token vectors (T, D) into one vector (D,).

    Args:
        last_hidden_state: Token vectors without padding.
        pooling: Pooling method.
        num_excluded: Number of leading tokens to exclude, less than T.
    """
    counted = last_hidden_state[num_excluded:]
    match pooling:
        case Pooling.CLS:
            return np.asarray(counted[0])
        case Pooling.MAX:
            return np.asarray(counted.max(axis=0))
        case Pooling.LAST_TOKEN:
            return np.asarray(counted[-1])
        case Pooling.WEIGHTED_MEAN:
            weights = np.arange(num_excluded + 1, len(last_hidden_state) + 1, dtype=np.float32)
            return np.asarray((weights / weights.sum()) @ counted)
        case Pooling.MEAN_SQRT_LENGTH:
            return np.asarray(counted.sum(axis=0) / np.float32(math.sqrt(len(counted))))
        case Pooling.MEAN:
            # The computation of counted.mean(axis=0), without its overhead.
            return np.asarray(np.add.reduce(counted, axis=0) / np.float32(len(counted)))


def finish(
    pooled: FloatArray,
    dense: Sequence[Callable[[FloatArray], FloatArray]],
    *,
    dimensions: int | None = None,
    normalize_first: bool = False,
    normalize_last: bool = False,
) -> FloatArray:
    """Convert pooled vectors (N, D) to embeddings (N, E).

    Args:
        pooled: One result of `pool` per text.
        dense: Dense layers to apply.
        dimensions: E, the number of components to keep. If None, all.
        normalize_first: Whether to scale to length 1 before components are removed, like
            sentence-transformers.
        normalize_last: Whether to scale the result to length 1.
    """
    vectors = pooled
    for layer in dense:
        vectors = layer(vectors)
    if normalize_first:
        vectors = normalize(vectors)
    vectors = vectors[:, :dimensions]
    return normalize(vectors) if normalize_last else vectors


def normalize(vectors: FloatArray) -> FloatArray:
    """Scale each row of (N, D) to length 1. Zero rows stay zero."""
    # The computation of np.linalg.norm, which needs more time to choose it than to compute one row.
    lengths = np.sqrt(np.add.reduce(vectors * vectors, axis=1, keepdims=True))
    return np.asarray(vectors / np.maximum(lengths, 1e-12))
