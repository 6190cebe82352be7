"""How a group of products is computed in int8, with all numbers that this takes.

All methods quantize the input with a scale that was calibrated, the same for every text: a text's vector
then can't depend on what it is batched with.

- plain: nothing more.
- smoothed: the input is divided by a factor per column first, and where that costs nothing the middle of each
  column's values is taken off it: see folding.py.
- evened: smoothed so far that all columns have the same largest value. That makes the least error where
  texts stay within the values of the calibration, and cuts off most where they do not.
- split columns: of an activation, the columns with the largest values are split: see splitting.py. That suits
  the inner values of a feed-forward block, where few columns are far larger than all others.
- exact columns: a few columns of the input are multiplied in fp32, the others in int8, smoothed where that
  helps. That suits what no factor helps, such as the inner values of a feed-forward block.
- exact values: queries and keys smoothed, values in fp32. Most of what an attention layer's input loses by
  rounding comes through the values, since the softmax forgives queries and keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from attnlens_export.graph.trace import TracedGraph
from attnlens_export.int8.calibration import Activations
from attnlens_export.int8.folding import Structure
from attnlens_export.int8.products import FloatArray, Group
from attnlens_export.int8.rounding import (
    InputRange,
    RoundedWeight,
    choose_range,
    round_inputs,
    round_weight,
    smoothing_divisors,
    whole_range,
)
from attnlens_export.int8.splitting import Activation, Split, possible_splits

ALPHAS = (0.4, 0.6, 0.8, 0.9)
# Of an input that is narrower than 16 times 24 columns; of others one in 24.
MIN_EXACT_COLUMNS = 16
EXACT_COLUMNS_SHARE = 24
# At most one further column for so many.
SPLIT_COLUMNS_SHARE = 24
# The part of the error of a weight that GPTQ leaves, about: what remains has little to do with real inputs.
_WEIGHT_ERROR_LEFT = 0.3
# The error that smoothing must leave at most to be worth its time, as a share of that without it.
_WORTH_SMOOTHING = 0.8


class Method(StrEnum):
    """How a product is computed."""

    PLAIN = "plain"
    SMOOTHED = "smoothed"
    EVENED = "evened"
    SPLIT_COLUMNS = "split_columns"
    EXACT_COLUMNS = "exact_columns"
    EXACT_VALUES = "exact_values"
    FP32 = "fp32"


_ALPHAS = {
    Method.PLAIN: (0.0,),
    Method.SMOOTHED: ALPHAS,
    Method.EVENED: (1.0,),
    Method.SPLIT_COLUMNS: (0.0,),
    Method.EXACT_COLUMNS: (0.0, *ALPHAS),
    Method.EXACT_VALUES: ALPHAS,
}


@dataclass(frozen=True)
class Recipe:
    """A group in int8.

    Attributes:
        group: the products.
        method: how they are computed.
        input_range: of the quantized input.
        weights: those of the group, rounded, in its order; rows of exact columns are 0; None: it stays fp32.
        alpha: of the smoothing; 0: none.
        divisors: (K,), what the input is divided by; None: nothing.
        centres: (K,), what is taken off the input before; None: nothing.
        columns: which columns of the input are multiplied in fp32, in ascending order.
        column_weights: the rows of the weights for these, each (C, N).
        split: further columns of the input; the weights have their rows.
        biases: what is added to each result, each (N,): what the centres lack, and what the results are off by
            in the mean; none where there is no bias that could take them up.
    """

    group: Group
    method: Method
    input_range: InputRange
    weights: tuple[RoundedWeight | None, ...]
    alpha: float = 0.0
    divisors: FloatArray | None = None
    centres: FloatArray | None = None
    columns: npt.NDArray[np.int64] | None = None
    column_weights: tuple[FloatArray, ...] = ()
    split: Split | None = None
    biases: tuple[FloatArray, ...] = ()


def methods_for(group: Group, structure: Structure) -> tuple[Method, ...]:
    """Return how a group can be computed."""
    left_out = set()
    if not any(_is_values(name) for name in group.weights) or len(group.weights) == 1:
        left_out.add(Method.EXACT_VALUES)
    if structure.activation(group) is None:
        left_out.add(Method.SPLIT_COLUMNS)
    return tuple(method for method in Method if method not in left_out)


def _is_values(weight: str) -> bool:
    return ".attention.value." in weight


def make_recipe(
    group: Group, method: Method, graph: TracedGraph, structure: Structure, activations: Activations
) -> Recipe:
    """Round a group by a method, which is not fp32."""
    weights = [np.asarray(graph.weights[name], np.float32) for name in group.weights]
    has_biases = all(structure.biased(result) is not None for result in group.results)
    if not has_biases:
        activations = activations.about_zero()
    nodes = structure.activation(group) if method == Method.SPLIT_COLUMNS else None
    activation = nodes and Activation.tabulate(graph, nodes.nodes, nodes.source, group.source)
    centres = None
    is_smoothed = method not in {Method.PLAIN, Method.SPLIT_COLUMNS}
    if is_smoothed and has_biases and structure.can_centre(group):
        centres = (activations.lowest + activations.highest) / 2
        activations = activations.without(centres)
    draft = _best_draft(method, weights, activations, activation, signed=centres is not None)
    recipe = _finish(group, method, weights, activations, centres, draft)
    if has_biases:
        recipe = replace(recipe, biases=tuple(_biases(recipe, weights, activations, activation)))
    return recipe


def _biases(
    recipe: Recipe, weights: list[FloatArray], activations: Activations, activation: Activation | None
) -> Iterator[FloatArray]:
    """Yield what each result lacks in the mean over the samples, `activations` being without the centres."""
    rows = activations.rows
    quantized = rows if recipe.divisors is None else rows / recipe.divisors
    if recipe.split is not None and activation is not None:
        quantized = recipe.split.parts(quantized, activation)
    rounded = round_inputs(_without(quantized, recipe.columns, axis=1), recipe.input_range).mean(axis=0)
    for index, (weight, whole) in enumerate(zip(recipe.weights, weights, strict=True)):
        lacking = np.zeros(whole.shape[1], np.float32) if recipe.centres is None else recipe.centres @ whole
        if weight is not None:
            lacking += rows.mean(axis=0) @ whole - rounded @ weight.restored()
        if recipe.columns is not None:
            lacking -= rows[:, recipe.columns].mean(axis=0) @ recipe.column_weights[index]
        yield np.asarray(lacking, np.float32)


def num_exact_columns(width: int) -> int:
    """Return how many columns of an input of so many are exact."""
    return min(width, max(MIN_EXACT_COLUMNS, width // EXACT_COLUMNS_SHARE))


@dataclass(frozen=True)
class _Draft:
    """What is chosen before the weights are rounded.

    Attributes:
        alpha: of the smoothing; 0: none.
        divisors: (K,); None: none.
        columns: which are exact, in ascending order; None: none.
        split: further columns of the input; None: none.
        input_range: of the quantized input.
        error: the mean squared error in the product that is expected.
    """

    alpha: float
    divisors: FloatArray | None
    columns: npt.NDArray[np.int64] | None
    split: Split | None
    input_range: InputRange
    error: float


def _best_draft(
    method: Method,
    weights: list[FloatArray],
    activations: Activations,
    activation: Activation | None,
    *,
    signed: bool,
) -> _Draft:
    """Return the draft with the least error; for exact columns, smooth only where that is worth it."""
    if activation is not None:
        return min(_split_drafts(weights, activations, activation), key=lambda draft: draft.error)
    drafts = [_draft(alpha, weights, activations, method, signed=signed) for alpha in _ALPHAS[method]]
    if method == Method.EXACT_COLUMNS:
        plain, *smoothed = drafts
        drafts = [each for each in smoothed if each.error <= _WORTH_SMOOTHING * plain.error] or [plain]
    return min(drafts, key=lambda draft: draft.error)


def _draft(
    alpha: float, weights: list[FloatArray], activations: Activations, method: Method, *, signed: bool
) -> _Draft:
    divisors = smoothing_divisors(activations.largest, weights, alpha) if alpha else None
    scaled = [_times(weight, divisors) for weight in weights]
    divided = activations if divisors is None else activations.divided(divisors)
    columns = _exact_columns(divided, scaled, alpha) if method == Method.EXACT_COLUMNS else None
    scaled = [_without(weight, columns, axis=0) for weight in scaled]
    rows = _without(divided.rows, columns, axis=1)
    extremes = (
        float(_without(divided.lowest, columns, axis=0).min()),
        float(_without(divided.highest, columns, axis=0).max()),
    )
    chosen, error = choose_range(rows, extremes, _importance(scaled), signed=signed)
    squares = _without(divided.mean_squares, columns, axis=0)
    error += _WEIGHT_ERROR_LEFT * sum(_weight_error(each, squares) for each in scaled)
    return _Draft(alpha, divisors, columns, None, chosen, error)


def _split_drafts(
    weights: list[FloatArray], activations: Activations, activation: Activation
) -> Iterator[_Draft]:
    importance, lowest = _importance(weights), float(activations.lowest.min())
    rows = activations.rows[::2]
    for split in possible_splits(activations.highest, len(importance) // SPLIT_COLUMNS_SHARE):
        chosen = whole_range(lowest, split.width)
        rounded = round_inputs(split.parts(rows, activation), chosen)
        error = split.merged(rounded) - rows
        error *= error
        yield _Draft(0.0, None, None, split, chosen, float((error @ importance).mean()))


def _exact_columns(
    activations: Activations, weights: list[FloatArray], alpha: float
) -> npt.NDArray[np.int64]:
    # Without smoothing the largest values make the range; with it, what counts is what an error there does.
    largest = activations.largest
    cost = largest**2 * _importance(weights) if alpha else largest
    return np.sort(np.argsort(-cost, kind="stable")[: num_exact_columns(len(largest))])


def _finish(
    group: Group,
    method: Method,
    weights: list[FloatArray],
    activations: Activations,
    centres: FloatArray | None,
    draft: _Draft,
) -> Recipe:
    """Round the weights, `activations` being without the centres."""
    divisors, columns, split = draft.divisors, draft.columns, draft.split
    if centres is not None and divisors is None:
        divisors = np.ones_like(centres)
    covariance = activations.covariance if divisors is None else activations.divided(divisors).covariance
    covariance = _without(_without(covariance, columns, axis=0), columns, axis=1)
    rounded = [
        None
        if method == Method.EXACT_VALUES and _is_values(name)
        else round_weight(_without(_times(weight, divisors), columns, axis=0), covariance)
        for name, weight in zip(group.weights, weights, strict=True)
    ]
    if split is not None:
        rounded = [each and each.lengthened(split) for each in rounded]
    return Recipe(
        group,
        method,
        draft.input_range,
        tuple(rounded),
        draft.alpha,
        divisors,
        centres,
        columns=columns,
        column_weights=() if columns is None else tuple(weight[columns] for weight in weights),
        split=split,
    )


def _times(weight: FloatArray, divisors: FloatArray | None) -> FloatArray:
    return weight if divisors is None else weight * divisors[:, None]


def _without(array: FloatArray, columns: npt.NDArray[np.int64] | None, axis: int) -> FloatArray:
    """Return an array with 0 in some places of an axis."""
    if columns is None:
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
