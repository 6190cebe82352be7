"""Recipes: how a group of matrix products is computed in int8, with all scales and rounded weights.

A group contains the MatMuls that read the same value, such as the queries, keys and values of a layer. They
share one quantized input. Its scale is calibrated and the same for all texts, so that a vector never depends
on the batch.

The methods:

- plain: only quantization.
- smoothed: the input, or the norm before it, is divided by a factor per column first (SmoothQuant).
- evened: smoothed until all columns have the same maximum. The error is the smallest of all methods for texts
  within the calibrated range, and the largest for texts outside it, whose values are clipped.
- exact columns: a few columns of the input are multiplied in fp32, the others in int8, smoothed if that
  reduces the error. This suits inputs that smoothing can't improve, such as the hidden layer of a
  feed-forward block.
- exact values: queries and keys are smoothed, values stay in fp32. Most of the error of an attention layer
  comes from the values, since the softmax is insensitive to small errors of queries and keys.

Rounding to 8 bits:

- Weights become integers from -127 to 127 with one scale per column. GPTQ (Frantar et al. 2022, arXiv
  2210.17323, algorithm 1) rounds one row after the other and compensates its error in the remaining rows,
  using the covariance of the inputs. The rows with the largest inputs come first.
- Inputs become integers from 0 to 255 with one scale. Values outside a range are clipped. The selected range
  has the smallest error in the product, with each column weighted by its row of the weight.
- Smoothing divides column k of the input by s(k) and multiplies row k of the weight by it:
  s(k) = max|x(k)|^alpha / max|w(k)|^(1 - alpha) (SmoothQuant, Xiao et al. 2022, arXiv 2211.10438, equation
  4).

Shapes: B texts in a batch, T tokens, R sampled input rows, K width of the input, N width of the result, C
exact columns.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import onnx
import torch

from attnlens_export.graph.trace import TracedGraph

LARGEST_WEIGHT = 127
LARGEST_INPUT = 255
ALPHAS = (0.4, 0.6, 0.8)
# One in 24 columns is exact, but at least 16.
MIN_EXACT_COLUMNS = 16
EXACT_COLUMNS_SHARE = 24
# Added to the diagonal of the covariance, relative to its mean. Makes it invertible if a column is always 0.
DAMPING = 0.01
# Number of weight rows that are rounded before the remaining rows are corrected in one step.
BLOCK_ROWS = 128
_SCALE_STEPS = (1.0, 0.95, 0.9, 0.85, 0.8)
_RANGE_STEPS = (1.0, 0.9)
_SMALLEST = 1e-5
# Approximate share of the weight error that remains after GPTQ.
_WEIGHT_ERROR_LEFT = 0.3
# Smoothing takes time. It is used if it reduces the error to this share or less.
_WORTH_SMOOTHING = 0.8

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Group:
    """MatMuls that read the same value.

    Attributes:
        source: Name of the value, (B, T, K).
        results: Names of the results, each (B, T, N).
        weights: Names of the weights, each (K, N).
        kind: Names of the weights without the layer index. Equal for corresponding groups of all layers.
    """

    source: str
    results: tuple[str, ...]
    weights: tuple[str, ...]
    kind: str


def find_groups(graph: TracedGraph) -> list[Group]:
    """Return the groups of a graph in the order of computation."""
    members: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.proto.graph.node:
        if _is_quantizable(node, graph):
            members.setdefault(node.input[0], []).append(node)
    return [_to_group(source, nodes) for source, nodes in members.items()]


def _is_quantizable(node: onnx.NodeProto, graph: TracedGraph) -> bool:
    """Return whether a node multiplies a computed value with an fp32 weight (K, N)."""
    if node.op_type != "MatMul" or node.input[0] in graph.weights or node.input[1] not in graph.weights:
        return False
    weight = graph.weights[node.input[1]]
    return weight.ndim == 2 and weight.dtype == np.float32  # noqa: PLR2004 - a matrix


def _to_group(source: str, nodes: list[onnx.NodeProto]) -> Group:
    weights = tuple(node.input[1] for node in nodes)
    kind = " ".join(re.sub(r"\d+", "*", weight.removesuffix(".T")) for weight in weights)
    return Group(source, tuple(node.output[0] for node in nodes), weights, kind)


@dataclass
class Activations:
    """Statistics of a group's input over the calibration texts. Padding is excluded.

    All kinds of text have the same weight in the mean, as have all texts of a kind and all tokens of a text.
    Otherwise very short texts would have almost no effect.

    Attributes:
        lowest: Minimum of each column, (K,).
        highest: Maximum of each column, (K,).
        covariance: Weighted mean of x x', (K, K).
        rows: Samples of x, each representing the same share of the mean, (R, K).
    """

    lowest: FloatArray
    highest: FloatArray
    covariance: FloatArray
    rows: FloatArray

    @property
    def largest(self) -> FloatArray:
        """Maximum magnitude of each column, (K,)."""
        return np.maximum(np.abs(self.lowest), np.abs(self.highest))

    @property
    def mean_squares(self) -> FloatArray:
        """Weighted mean of x^2, (K,)."""
        return np.asarray(np.diag(self.covariance))


class Method(StrEnum):
    """Method to compute the products of a group."""

    PLAIN = "plain"
    SMOOTHED = "smoothed"
    EVENED = "evened"
    EXACT_COLUMNS = "exact_columns"
    EXACT_VALUES = "exact_values"
    FP32 = "fp32"


@dataclass(frozen=True)
class RoundedWeight:
    """A weight as `values` (K, N) int8 times `scales` (N,) fp32."""

    values: npt.NDArray[np.int8]
    scales: FloatArray


@dataclass(frozen=True)
class InputRange:
    """Quantization of an input: (integer - zero_point) * scale, with integers from 0 to 255."""

    scale: np.float32
    zero_point: np.uint8


@dataclass(frozen=True)
class Recipe:
    """A group in int8.

    Attributes:
        group: Matrix products.
        method: Method.
        input_range: Quantization of the input.
        weights: Rounded weights in the order of the group. Rows of exact columns are 0. None for a weight
            that stays in fp32.
        alpha: Exponent of smoothing. 0 without smoothing.
        divisors: Divisors of the input columns, (K,). None without smoothing.
        columns: Indices of the input columns that are multiplied in fp32, in ascending order.
        column_weights: Rows of the weights for `columns`, each (C, N).
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
    """Return the methods that can compute a group."""
    has_values = any(_is_values(name) for name in group.weights) and len(group.weights) > 1
    return tuple(method for method in Method if method != Method.EXACT_VALUES or has_values)


def _is_values(weight: str) -> bool:
    return ".attention.value." in weight


def make_recipe(group: Group, method: Method, graph: TracedGraph, activations: Activations) -> Recipe:
    """Quantize a group with a method other than fp32."""
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
            better = [draft for draft in smoothed if draft.error <= _WORTH_SMOOTHING * plain.error]
            drafts = better or [plain]
    return _finish(group, method, weights, activations, min(drafts, key=lambda draft: draft.error))


def num_exact_columns(width: int) -> int:
    """Return the number of exact columns for an input of a width."""
    return min(width, max(MIN_EXACT_COLUMNS, width // EXACT_COLUMNS_SHARE))


@dataclass(frozen=True)
class _Draft:
    """Choices that are made before the weights are rounded.

    Attributes:
        alpha: Exponent of smoothing. 0 without smoothing.
        divisors: Divisors of the input columns, (K,). None without smoothing.
        columns: Indices of the exact columns, in ascending order.
        input_range: Quantization of the input.
        error: Expected mean squared error of the product.
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
    # Without smoothing, the largest columns determine the scale of all others. With smoothing, the columns
    # with the largest effect on the product are exact.
    cost = largest if divisors is None else largest**2 * _importance(scaled)
    columns = np.sort(np.argsort(-cost, kind="stable")[:num_columns])
    scaled = [_with_zeros(weight, columns, axis=0) for weight in scaled]
    rows = _with_zeros(activations.rows if divisors is None else activations.rows / divisors, columns, axis=1)
    input_range, error = choose_range(rows, _extremes(activations, divisors, columns), _importance(scaled))
    squares = activations.mean_squares if divisors is None else activations.mean_squares / divisors**2
    squares = _with_zeros(squares, columns, axis=0)
    error += _WEIGHT_ERROR_LEFT * sum(_weight_error(weight, squares) for weight in scaled)
    return _Draft(alpha, divisors, columns, input_range, error)


def _extremes(
    activations: Activations, divisors: FloatArray | None, columns: npt.NDArray[np.int64]
) -> tuple[float, float]:
    """Return the minimum and maximum of a smoothed input without its exact columns."""
    lowest, highest = (
        _with_zeros(values if divisors is None else values / divisors, columns, axis=0)
        for values in (activations.lowest, activations.highest)
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
    covariance = _with_zeros(_with_zeros(covariance, columns, axis=0), columns, axis=1)
    is_kept = [method == Method.EXACT_VALUES and _is_values(name) for name in group.weights]
    rounded = iter(
        round_weights(
            [
                _with_zeros(_times(weight, divisors), columns, axis=0)
                for weight, kept in zip(weights, is_kept, strict=True)
                if not kept
            ],
            covariance,
        )
    )
    return Recipe(
        group,
        method,
        draft.input_range,
        tuple(None if kept else next(rounded) for kept in is_kept),
        draft.alpha,
        divisors,
        columns if len(columns) else None,
        tuple(np.ascontiguousarray(weight[columns]) for weight in weights) if len(columns) else (),
    )


def _times(weight: FloatArray, divisors: FloatArray | None) -> FloatArray:
    return weight if divisors is None else weight * divisors[:, None]


def _with_zeros(array: FloatArray, indices: npt.NDArray[np.int64], axis: int) -> FloatArray:
    """Return a copy of an array with zeros at some indices of an axis."""
    if not len(indices):
        return array
    changed = array.copy()
    changed[(slice(None),) * axis + (indices,)] = 0
    return changed


def _importance(weights: Sequence[FloatArray]) -> FloatArray:
    """Return the squared norm of each row, over all weights, (K,)."""
    return np.asarray(sum((weight**2).sum(axis=1) for weight in weights), np.float32)


def _weight_error(weight: FloatArray, mean_squares: FloatArray) -> float:
    """Return the mean squared error of the product if every weight is rounded to nearest.

    An error that is uniform over a step has the variance step**2 / 12.
    """
    steps = np.abs(weight).max(axis=0) / LARGEST_WEIGHT  # (N,)
    return float(mean_squares.sum() * (steps**2).sum() / 12)


def smoothing_divisors(largest: FloatArray, weights: list[FloatArray], alpha: float) -> FloatArray:
    """Return s (K,) with geometric mean 1, for inputs of maximum magnitude `largest` (K,)."""
    rows = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0)  # (K,)
    divisors = np.maximum(largest, _SMALLEST) ** alpha / np.maximum(rows, _SMALLEST) ** (1 - alpha)
    return np.asarray(divisors / np.exp(np.log(divisors).mean()), np.float32)


def choose_range(
    rows: FloatArray, extremes: tuple[float, float], importance: FloatArray
) -> tuple[InputRange, float]:
    """Return the range with the smallest error, and its mean squared error in the product.

    Args:
        rows: Samples of the input, (R, K).
        extremes: Minimum and maximum of the whole input.
        importance: Weight of the squared error of each column, (K,).
    """
    low, high = min(extremes[0], 0.0), max(extremes[1], _SMALLEST)
    candidates = []
    for low_step in _RANGE_STEPS if low < -_SMALLEST else (1.0,):
        for high_step in _RANGE_STEPS:
            scale = np.float32((high * high_step - low * low_step) / LARGEST_INPUT)
            zero_point = np.uint8(np.clip(np.rint(-low * low_step / scale), 0, LARGEST_INPUT))
            candidate = InputRange(scale, zero_point)
            error = round_inputs(rows, candidate) - rows
            error *= error
            candidates.append((float((error @ importance).mean()), candidate))
    smallest_error, chosen = min(candidates, key=lambda candidate: candidate[0])
    return chosen, smallest_error


def round_inputs(rows: FloatArray, input_range: InputRange) -> FloatArray:
    """Return the inputs after QuantizeLinear and DequantizeLinear."""
    zero_point = np.float32(input_range.zero_point)
    integers = np.clip(np.rint(rows / input_range.scale), -zero_point, LARGEST_INPUT - zero_point)
    return np.asarray(integers * input_range.scale, np.float32)


def round_weights(weights: Sequence[FloatArray], covariance: FloatArray) -> list[RoundedWeight]:
    """Round the weights (K, N) of a group with GPTQ, given the mean of x x' over the inputs x, (K, K)."""
    importance = np.diag(covariance)
    order = np.argsort(-importance, kind="stable")
    factor = _correction(covariance[np.ix_(order, order)])
    return [_round_weight(weight, importance, order, factor) for weight in weights]


def _round_weight(
    weight: FloatArray, importance: FloatArray, order: npt.NDArray[np.int64], factor: FloatArray
) -> RoundedWeight:
    scales = _choose_scales(weight, importance)
    remaining = weight[order]
    integers = np.zeros(weight.shape, np.int8)
    for start in range(0, len(remaining), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        values, errors = _round_block(remaining[block], factor[block, block], scales)
        integers[order[block]] = values
        remaining[start + BLOCK_ROWS :] -= factor[block, start + BLOCK_ROWS :].T @ errors
    return RoundedWeight(integers, scales)


def _round_block(
    rows: FloatArray, factor: FloatArray, scales: FloatArray
) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """Round rows in order and return them with the scaled error of each. Changes `rows`."""
    values, errors = np.empty(rows.shape, np.int8), np.empty_like(rows)
    for index, row in enumerate(rows):
        values[index] = np.clip(np.rint(row / scales), -LARGEST_WEIGHT, LARGEST_WEIGHT)
        errors[index] = (row - values[index] * scales) / factor[index, index]
        rows[index:] -= np.outer(factor[index, index:], errors[index])
    return values, errors


def _correction(covariance: FloatArray) -> FloatArray:
    """Return the upper Cholesky factor of the inverse, (K, K).

    With rows and columns in reverse order, it is the inverse of the lower factor of the covariance. This
    takes a third of the time of inverting the covariance.
    """
    damped = covariance.astype(np.float64)
    damped[np.diag_indices(len(damped))] += DAMPING * np.diag(damped).mean() + np.finfo(np.float32).tiny
    lower = torch.linalg.cholesky(torch.from_numpy(damped).flip(0, 1))
    identity = torch.eye(len(damped), dtype=torch.float64)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    return np.asarray(inverse.flip(0, 1).numpy(), np.float32)


def _choose_scales(weight: FloatArray, importance: FloatArray) -> FloatArray:
    """Return the scale of each column (N,) with the smallest error. Small scales clip large weights."""
    full_range = np.abs(weight).max(axis=0) / np.float32(LARGEST_WEIGHT)
    full_range[full_range == 0] = 1
    candidates = [full_range * np.float32(step) for step in _SCALE_STEPS]
    errors = []
    for scales in candidates:
        rounded = np.clip(np.rint(weight / scales), -LARGEST_WEIGHT, LARGEST_WEIGHT) * scales
        errors.append(importance @ (rounded - weight) ** 2)
    best = np.argmin(errors, axis=0)  # (N,)
    return np.asarray(np.take_along_axis(np.array(candidates), best[None], axis=0)[0], np.float32)
