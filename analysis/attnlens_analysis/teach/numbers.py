"""Arithmetic of the lesson steps, in float64. T tokens, H heads, K head size."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sharpness:
    """Sharpness of attention rows, averaged over rows.

    Attributes:
        entropy: -sum a ln(a), in nats. 0 if one weight is 1.
        largest: Largest weight.
        trace: Trace of the softmax Jacobian, sum a (1 - a). If 0, no gradient reaches the scores.
    """

    entropy: float
    largest: float
    trace: float


def softmax(scores: Array, allowed: npt.NDArray[np.bool_]) -> Array:
    """Return the weights (..., T) of scores (..., T), with 0 at masked positions."""
    shifted = np.where(allowed, scores, -np.inf)
    exponentials: Array = np.exp(shifted - shifted.max(axis=-1, keepdims=True))
    weights: Array = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return weights


def sharpness(weights: Array) -> Sharpness:
    """Compute the sharpness of weights (..., T)."""
    logarithms = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    return Sharpness(
        entropy=float(-(weights * logarithms).sum(axis=-1).mean()),
        largest=float(weights.max(axis=-1).mean()),
        trace=float(1.0 - (weights**2).sum(axis=-1).mean()),
    )


def is_own_largest(weights: Array) -> npt.NDArray[np.bool_]:
    """Return whether each row of (..., T, T) has its largest weight on the diagonal."""
    largest: npt.NDArray[np.bool_] = weights.argmax(axis=-1) == np.arange(weights.shape[-1])
    return largest


def joined(parts: Iterable[npt.NDArray[np.generic]]) -> npt.NDArray[Any]:
    """Concatenate arrays of several layers, each (H, T) or (H, T, T)."""
    return np.concatenate(list(parts))


def chance_of_own(allowed: npt.NDArray[np.bool_]) -> float:
    """Return the expected share of rows (..., T, T) with the largest weight on the diagonal by chance."""
    return float((1.0 / allowed.sum(axis=-1)).mean())


def norms(vectors: Array) -> Array:
    """Return the Euclidean norm of each vector (..., K)."""
    lengths: Array = np.linalg.norm(vectors, axis=-1)
    return lengths


def cosine(first: Array, second: Array) -> float:
    """Return the cosine similarity of two vectors."""
    return float(first @ second / (np.linalg.norm(first) * np.linalg.norm(second)))


def principal_cosines(first: Array, second: Array) -> Array:
    """Return the cosines of the principal angles between the column spaces of two matrices (D, K).

    See Björck and Golub 1973, "Numerical Methods for Computing Angles Between Linear Subspaces".
    """
    bases = [np.linalg.qr(each)[0] for each in (first, second)]
    cosines: Array = np.linalg.svd(bases[0].T @ bases[1], compute_uv=False)
    return cosines
