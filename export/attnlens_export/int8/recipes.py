"""How a group of products is computed in int8, with all numbers that this takes.

All methods quantize the input with a scale that was calibrated, the same for every text: a text's vector
then can't depend on what it is batched with.

- plain: nothing more.
- smoothed: the input is divided by a factor per column first, or the norm before it is.
- evened: smoothed so far that all columns have the same largest value. That makes the least error where
  texts stay within the values of the calibration, and cuts off most where they do not.
- exact columns: a few columns of the input are multiplied in fp32, the others in int8, smoothed where that
  helps. That suits what no factor helps, such as the inner values of a feed-forward block.
- exact values: queries and keys smoothed, values in fp32. Most of what an attention layer's input loses by
  rounding comes through the values, since the softmax forgives queries and keys.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from attnlens_export.graph.trace import TracedGraph
from attnlens_export.int8.calibration import Activations
from attnlens_export.int8.products import FloatArray, Group
from attnlens_export.int8.rounding import (
    InputRange,
    RoundedWeight,
    choose_range,
    round_weight,
    smoothing_divisors,
)

ALPHAS = (0.4, 0.6, 0.8)
# Of an input that is narrower than 16 times 24 columns; of others one in 24.
MIN_EXACT_COLUMNS = 16
EXACT_COLUMNS_SHARE = 24
# The part of the error of a weight that GPTQ leaves, about: what remains has little to do with real inputs.
_WEIGHT_ERROR_LEFT = 0.3
# The error that smoothing must leave at most to be worth its time, as a share of that without it.
_WORTH_SMOOTHING = 0.8


class Method(StrEnum):
    """How a product is computed."""

    PLAIN = "plain"
    SMOOTHED = "smoothed"
    EVENED = "evened"
    EXACT_COLUMNS = "exact_columns"
    EXACT_VALUES = "exact_values"
    FP32 = "fp32"


@dataclass(frozen=True)
class Recipe:
    """A group in int8.

    Attributes:
        group: the products.
        method: how they are computed.
        input_range: of the quantized input.
        weights: those of the group, rounded, in its order; rows of exact columns are 0; None: stays in fp32.
        alpha: of the smoothing; 0: none.
        divisors: (K,), what the input is divided by; None: nothing.
        columns: which columns of the input are multiplied in fp32, in ascending order.
        column_weights: the rows of the weights for these, each (C, N).
    """

    group: Group
    method: Method
    input_range: InputRange
    weights: tuple[RoundedWeight | None, ...]
    alpha: float = 0.0
    divisors: FloatArray | None = None
    columns: npt.NDArray[np.int64] | None = None
    column_weights: tuple[FloatArray, ...] = ()


def methods_for(group: Group) -> tuple[Method, ...]:
    """Return how a group can be computed."""
    has_values = any(_is_values(name) for name in group.weights) and len(group.weights) > 1
    return tuple(method for method in Method if method != Method.EXACT_VALUES or has_values)


def _is_values(weight: str) -> bool:
    return ".attention.value." in weight


def make_recipe(group: Group, method: Method, graph: TracedGraph, activations: Activations) -> Recipe:
    """Round a group by a method, which is not fp32."""
    weights = [np.asarray(graph.weights[name], np.float32) for name in group.weights]
    match method:
        case Method.PLAIN:
            drafts = [_draft(0.0, weights, activations, 0)]
        case Method.EVENED:
            drafts = [_draft(1.0, weights, activations, 0)]
        case Method.SMOOTHED | Method.EXACT_VALUES:
            drafts = [_draft(alpha, weights, activations, 0) for alpha in ALPHAS]
        case _:
            num_columns = num_exact_columns(len(activations.largest))
            plain, *smoothed = [_draft(alpha, weights, activations, num_columns) for alpha in (0.0, *ALPHAS)]
            worth = [each for each in smoothed if each.error <= _WORTH_SMOOTHING * plain.error]
            drafts = worth or [plain]
    return _finish(group, method, weights, activations, min(drafts, key=lambda draft: draft.error))


def num_exact_columns(width: int) -> int:
    """Return how many columns of an input of so many are exact."""
    return min(width, max(MIN_EXACT_COLUMNS, width // EXACT_COLUMNS_SHARE))


@dataclass(frozen=True)
class _Draft:
    """What is chosen before the weights are rounded.

    Attributes:
        alpha: of the smoothing; 0: none.
        divisors: (K,); None: none.
        columns: which are exact, in ascending order.
        input_range: of the quantized input.
        error: the mean squared error in the product that is expected.
    """

    alpha: float
    divisors: FloatArray | None
    columns: npt.NDArray[np.int64]
    input_range: InputRange
    error: float


def _draft(alpha: float, weights: list[FloatArray], activations: Activations, num_columns: int) -> _Draft:
    divisors = smoothing_divisors(activations.largest, weights, alpha) if alpha else None
    scaled = [_times(weight, divisors) for weight in weights]
    largest = activations.largest if divisors is None else activations.largest / divisors
    # Without smoothing the largest values make the range; with it, what counts is what an error there does.
    cost = largest if divisors is None else largest**2 * _importance(scaled)
    columns = np.sort(np.argsort(-cost, kind="stable")[:num_columns])
    scaled = [_without(weight, columns, axis=0) for weight in scaled]
    rows = _without(activations.rows if divisors is None else activations.rows / divisors, columns, axis=1)
    extremes = _extremes(activations, divisors, columns)
    chosen, error = choose_range(rows, extremes, _importance(scaled))
    squares = activations.mean_squares if divisors is None else activations.mean_squares / divisors**2
    squares = _without(squares, columns, axis=0)
    error += _WEIGHT_ERROR_LEFT * sum(_weight_error(each, squares) for each in scaled)
    return _Draft(alpha, divisors, columns, chosen, error)


def _extremes(
    activations: Activations, divisors: FloatArray | None, columns: npt.NDArray[np.int64]
) -> tuple[float, float]:
    """Return the least and the largest value of a smoothed input without its exact columns."""
    lowest, highest = (
        _without(each if divisors is None else each / divisors, columns, axis=0)
        for each in (activations.lowest, activations.highest)
    )
    return float(lowest.min()), float(highest.max())


def _finish(
    group: Group, method: Method, weights: list[FloatArray], activations: Activations, draft: _Draft
) -> Recipe:
    """Round the weights."""
    divisors, columns = draft.divisors, draft.columns
    covariance = (
        activations.covariance
        if divisors is None
        else (activations.covariance / np.outer(divisors, divisors))
    )
    covariance = _without(_without(covariance, columns, axis=0), columns, axis=1)
    rounded = tuple(
        None
        if method == Method.EXACT_VALUES and _is_values(name)
        else round_weight(_without(_times(weight, divisors), columns, axis=0), covariance)
        for name, weight in zip(group.weights, weights, strict=True)
    )
    return Recipe(
        group,
        method,
        draft.input_range,
        rounded,
        draft.alpha,
        divisors,
        columns if len(columns) else None,
        tuple(np.ascontiguousarray(weight[columns]) for weight in weights) if len(columns) else (),
    )


def _times(weight: FloatArray, divisors: FloatArray | None) -> FloatArray:
    return weight if divisors is None else weight * divisors[:, None]


def _without(array: FloatArray, columns: npt.NDArray[np.int64], axis: int) -> FloatArray:
    """Return an array with 0 in some places of an axis."""
    if not len(columns):
        return array
    changed = array.copy()
    changed[(slice(None),) * axis + (columns,)] = 0
    return changed


def _importance(weights: list[FloatArray]) -> FloatArray:
    """Return the squared length of each row of all weights together, (K,)."""
    return np.asarray(sum((weight**2).sum(axis=1) for weight in weights), np.float32)


def _weight_error(weight: FloatArray, mean_squares: FloatArray) -> float:
    """Return the mean squared error in the product if each value of a weight is rounded by itself.

    An error that is uniform over a step has the variance step**2 / 12.
    """
    steps = np.abs(weight).max(axis=0) / 127  # (N,)
    return float(mean_squares.sum() * (steps**2).sum() / 12)
