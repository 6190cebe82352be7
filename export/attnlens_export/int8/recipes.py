"""How a group of products is computed in int8, with all numbers that this takes.

All methods quantize the input with a scale that was calibrated, the same for every text: a text's vector
then can't depend on what it is batched with.

- plain: nothing more.
- smoothed: the input is divided by a factor per column first, or the norm before it is.
- exact columns: the few columns of the input with the largest values are multiplied in fp32, the others in
  int8. That suits what no factor helps, such as the inner values of a feed-forward block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from attnlens_export.graph import TracedGraph
from attnlens_export.int8.calibration import Activations
from attnlens_export.int8.products import FloatArray, Group
from attnlens_export.int8.rounding import (
    InputRange,
    RoundedWeight,
    choose_range,
    round_weight,
    smoothing_divisors,
)

ALPHAS = (0.4, 0.5, 0.6, 0.7, 0.8)
NUM_EXACT_COLUMNS = 16


class Method(StrEnum):
    """How a product is computed."""

    PLAIN = "plain"
    SMOOTHED = "smoothed"
    EXACT_COLUMNS = "exact_columns"
    FP32 = "fp32"


@dataclass(frozen=True)
class Recipe:
    """A group in int8.

    Attributes:
        group: the products.
        method: how they are computed.
        input_range: of the quantized input.
        weights: those of the group, rounded, in its order; rows of exact columns are 0.
        alpha: of the smoothing; 0: none.
        divisors: (K,), what the input is divided by; None: nothing.
        columns: which columns of the input are multiplied in fp32, in ascending order.
        column_weights: the rows of the weights for these, each (C, N).
    """

    group: Group
    method: Method
    input_range: InputRange
    weights: tuple[RoundedWeight, ...]
    alpha: float = 0.0
    divisors: FloatArray | None = None
    columns: npt.NDArray[np.int64] | None = None
    column_weights: tuple[FloatArray, ...] = ()


def make_recipe(group: Group, method: Method, graph: TracedGraph, activations: Activations) -> Recipe:
    """Round a group by a method, which is not fp32."""
    weights = [np.asarray(graph.weights[name], np.float32) for name in group.weights]
    match method:
        case Method.PLAIN:
            return _smoothed(group, method, weights, activations, (0.0,))
        case Method.SMOOTHED:
            return _smoothed(group, method, weights, activations, ALPHAS)
        case _:
            return _exact_columns(group, weights, activations)


def _smoothed(
    group: Group,
    method: Method,
    weights: list[FloatArray],
    activations: Activations,
    alphas: Sequence[float],
) -> Recipe:
    """Round with that alpha of several which makes the least error in the product; 0: no smoothing."""
    candidates = []
    for alpha in alphas:
        divisors = smoothing_divisors(activations.largest, weights, alpha) if alpha else None
        scaled = [_times(weight, divisors) for weight in weights]
        rows = activations.rows if divisors is None else activations.rows / divisors
        chosen, error = choose_range(rows, _importance(scaled))
        squares = activations.mean_squares if divisors is None else activations.mean_squares / divisors**2
        error += sum(_weight_error(each, squares) for each in scaled)
        candidates.append((error, alpha, divisors, chosen))
    _, alpha, divisors, chosen = min(candidates, key=lambda each: each[0])
    covariance = activations.covariance
    if divisors is not None:
        covariance = covariance / np.outer(divisors, divisors)
    rounded = tuple(round_weight(_times(weight, divisors), covariance) for weight in weights)
    return Recipe(group, method, chosen, rounded, alpha, divisors)


def _times(weight: FloatArray, divisors: FloatArray | None) -> FloatArray:
    return weight if divisors is None else weight * divisors[:, None]


def _exact_columns(group: Group, weights: list[FloatArray], activations: Activations) -> Recipe:
    columns = np.sort(np.argsort(-activations.largest, kind="stable")[:NUM_EXACT_COLUMNS])
    is_rounded = np.ones(len(activations.largest), np.float32)
    is_rounded[columns] = 0
    others = [weight * is_rounded[:, None] for weight in weights]
    chosen, _ = choose_range(activations.rows * is_rounded, _importance(others))
    covariance = activations.covariance * np.outer(is_rounded, is_rounded)
    return Recipe(
        group,
        Method.EXACT_COLUMNS,
        chosen,
        tuple(round_weight(weight, covariance) for weight in others),
        columns=columns,
        column_weights=tuple(np.ascontiguousarray(weight[columns]) for weight in weights),
    )


def _importance(weights: list[FloatArray]) -> FloatArray:
    """Return the squared length of each row of all weights together, (K,)."""
    return np.asarray(sum((weight**2).sum(axis=1) for weight in weights), np.float32)


def _weight_error(weight: FloatArray, mean_squares: FloatArray) -> float:
    """Return the mean squared error in the product if each value of a weight is rounded by itself.

    An error that is uniform over a step has the variance step**2 / 12.
    """
    steps = np.abs(weight).max(axis=0) / 127  # (N,)
    return float(mean_squares.sum() * (steps**2).sum() / 12)
