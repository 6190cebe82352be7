"""The arithmetic of the steps, in float64. T tokens, H heads, K head width."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sharpness:
    """How sharp rows of weights are, each figure a mean over them.

    Attributes:
        entropy: - sum a log a, in nats; 0 where one weight is 1.
        largest: the largest weight.
        trace: of the Jacobian of the softmax, sum a (1 - a): how far the weights follow the scores. At 0
            nothing passes back to the scores in training.
    """

    entropy: float
    largest: float
    trace: float


def softmax(scores: Array, allowed: npt.NDArray[np.bool_]) -> Array:
    """Return the weights (..., T) of scores (..., T), 0 at places that are not allowed."""
    shifted = np.where(allowed, scores, -np.inf)
    powers: Array = np.exp(shifted - shifted.max(axis=-1, keepdims=True))
    weights: Array = powers / powers.sum(axis=-1, keepdims=True)
    return weights


def sharpness(weights: Array) -> Sharpness:
    """Measure rows of weights (..., T)."""
    logarithms = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    return Sharpness(
        entropy=float(-(weights * logarithms).sum(axis=-1).mean()),
        largest=float(weights.max(axis=-1).mean()),
        trace=float(1.0 - (weights**2).sum(axis=-1).mean()),
    )


def is_own_largest(weights: Array) -> npt.NDArray[np.bool_]:
    """Return for each row of (..., T, T) whether no weight is above that of the token itself."""
    largest: npt.NDArray[np.bool_] = weights.argmax(axis=-1) == np.arange(weights.shape[-1])
    return largest


def joined(parts: Iterable[npt.NDArray[np.generic]]) -> npt.NDArray[Any]:
    """Return the rows of several layers, each (H, T) or (H, T, T), as one array."""
    return np.concatenate(list(parts))


def chance_of_own(allowed: npt.NDArray[np.bool_]) -> float:
    """Return in which share of the rows (..., T, T) the token itself would be by chance."""
    return float((1.0 / allowed.sum(axis=-1)).mean())


def norms(vectors: Array) -> Array:
    """Return the length of each vector (..., K)."""
    lengths: Array = np.linalg.norm(vectors, axis=-1)
    return lengths


def cosine(first: Array, second: Array) -> float:
    """Return the cosine of the angle between two vectors."""
    return float(first @ second / (np.linalg.norm(first) * np.linalg.norm(second)))
