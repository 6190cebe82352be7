"""From the token vectors of a text to its embedding. N texts, T tokens, D hidden size, E components.

    pool -> dense layers -> normalize -> cut -> normalize

The formulas are those of `attnlens.v1.Pooling`, and of sentence-transformers. The server and the exporter's
gate of int8 use the same code. `attnlens.dense` reads the layers.
"""

import math
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


class Pooling(IntEnum):
    """How the token vectors of a text become one. The numbers are those of `attnlens.v1.Pooling`."""

    MEAN = 1
    CLS = 2
    MAX = 3
    LAST_TOKEN = 4
    WEIGHTED_MEAN = 5
    MEAN_SQRT_LENGTH = 6


def pool(last_hidden_state: FloatArray, pooling: Pooling, num_excluded: int = 0) -> FloatArray:
    """Reduce (T, D) to (D,).

    Args:
        last_hidden_state: the token vectors, without padding.
        pooling: which formula.
        num_excluded: how many tokens at the beginning don't count, less than T.
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
            return np.asarray(counted.mean(axis=0))


def finish(
    pooled: FloatArray,
    dense: Sequence[Callable[[FloatArray], FloatArray]],
    *,
    dimensions: int | None = None,
    normalize_first: bool = False,
    normalize_last: bool = False,
) -> FloatArray:
    """Turn pooled vectors (N, D) into embeddings (N, E).

    Args:
        pooled: what `pool` returned for each text.
        dense: the layers that pooled vectors go through.
        dimensions: E, how many components are kept; None: all.
        normalize_first: scale to length 1 before components are cut off, as publishers do.
        normalize_last: scale to length 1 at the end.
    """
    vectors = pooled
    for layer in dense:
        vectors = layer(vectors)
    if normalize_first:
        vectors = normalize(vectors)
    vectors = vectors[:, :dimensions]
    return normalize(vectors) if normalize_last else vectors


def normalize(vectors: FloatArray) -> FloatArray:
    """Scale each row of (N, D) to length 1; a row of zeros stays as it is."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12))
