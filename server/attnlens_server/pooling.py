"""From the token vectors of a text to one vector. T tokens, D hidden size."""

import numpy as np
import numpy.typing as npt

from attnlens.v1.manifest_pb2 import Pooling

FloatArray = npt.NDArray[np.float32]


def pool(last_hidden_state: FloatArray, pooling: Pooling.ValueType) -> FloatArray:
    """Reduce (T, D) to (D,). All T tokens count; there must be no padding among them."""
    if pooling == Pooling.POOLING_CLS:
        return np.asarray(last_hidden_state[0])
    if pooling == Pooling.POOLING_MAX:
        return np.asarray(last_hidden_state.max(axis=0))
    return np.asarray(last_hidden_state.mean(axis=0))


def normalize(vectors: FloatArray) -> FloatArray:
    """Scale each row of (N, D) to length 1; a row of zeros stays as it is."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12))
