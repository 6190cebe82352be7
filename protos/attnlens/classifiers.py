"""Scores of classifiers and rerankers: functions of their logits.

Dimension names: N texts, C labels.
"""

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens.explanations import Float64Array


class ScoreActivation(IntEnum):
    """Functions from logits to scores, with the values of `attnlens.v1.Activation`."""

    IDENTITY = 1
    SIGMOID = 5
    SOFTMAX = 7


def scores_of(logits: npt.NDArray[Any], activation: ScoreActivation) -> Float64Array:
    """Return the scores of logits (..., C), in float64: fp32 rounds sigmoids of large logits to 1."""
    values = np.asarray(logits, dtype=np.float64)
    match activation:
        case ScoreActivation.IDENTITY:
            return values
        case ScoreActivation.SIGMOID:
            exponential = np.exp(-np.abs(values))  # at most 1
            return np.asarray(np.where(values >= 0, 1.0, exponential) / (1.0 + exponential))
        case ScoreActivation.SOFTMAX:
            exponential = np.exp(values - values.max(axis=-1, keepdims=True))
            return np.asarray(exponential / exponential.sum(axis=-1, keepdims=True))
