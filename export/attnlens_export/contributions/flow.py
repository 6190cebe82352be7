"""Classification of values by their dependence on the token embeddings.

- CONSTANT: independent of the embeddings, such as a parameter or a mask.
- LINEAR: an affine function of the embeddings.
- ACTIVATED: linear, and the result of an activation.
- FROZEN: any other function of the embeddings, which is held constant: attention weights, the standard
  deviation in a norm, the ratio by which an activation scales its input. Products of frozen and linear values
  are linear.
- OFFSET: a frozen value times a parameter, such as an attention-weighted bias. It may be added to a linear
  value and is part of the baseline. A frozen value times a matrix of parameters is frozen: it is a projection
  of something for which there is no rule.

A product of two linear values is linear if one of them is the result of an activation, which is then held
constant, as in gated feed-forward layers. So is one factor of the square of an activation. All other products
of linear values, such as queries and keys, are frozen. A linear value divided by the standard deviation of a
norm, or multiplied by its reciprocal, is linear, not activated.
"""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
import onnx

from attnlens_export.graph.names import EMBEDDED
from attnlens_export.graph.simplify import CONSTANT_PREFIX, TARGET_PREFIX

Constants = Mapping[str, npt.NDArray[np.generic]]


class Flow(Enum):
    """Dependence of a value on the token embeddings."""

    CONSTANT = auto()
    LINEAR = auto()
    ACTIVATED = auto()
    OFFSET = auto()
    FROZEN = auto()

    @property
    def is_linear(self) -> bool:
        """Whether the value is an affine function of the embeddings."""
        return self in (Flow.LINEAR, Flow.ACTIVATED)

    @property
    def is_activated(self) -> bool:
        """Whether the value is held constant when multiplied by another linear value."""
        return self is Flow.ACTIVATED


# Operators that only move, sum or copy elements.
_MOVING = frozenset(
    {
        "Cast",
        "Concat",
        "Expand",
        "Gather",
        "Identity",
        "ReduceSum",
        "Reshape",
        "Slice",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)
_MATRIX_AXES = 2
_ADDING = frozenset({"Add", "Sub"})
# Functions f with f(0) = 0, which are linear if the ratio f(x) / x is held constant.
_ACTIVATIONS = frozenset({"Relu", "Tanh"})


def find_flows(graph: onnx.GraphProto, weights: Constants, frozen: Collection[str]) -> dict[str, Flow]:
    """Return the flow of all values that are not constant, by name.

    Args:
        graph: Graph with nodes in topological order. The token embeddings are the value `EMBEDDED`.
        weights: Initializers of the graph.
        frozen: Names of values that are always frozen.
    """
    flows: dict[str, Flow] = {EMBEDDED: Flow.LINEAR}
    parameters = {name for name in weights if not name.startswith((CONSTANT_PREFIX, TARGET_PREFIX))}
    reciprocals: set[str] = set()
    for node in graph.node:
        inputs = [flows.get(name, Flow.CONSTANT) for name in node.input if name]
        flow = _flow(node, inputs, weights, parameters)
        if flow is Flow.ACTIVATED and node.op_type == "Mul" and not reciprocals.isdisjoint(node.input):
            flow = next(kind for kind in inputs if kind.is_linear)  # a division
        if node.op_type == "Reciprocal" or _is_negative_power(node, weights):
            reciprocals.update(node.output)
        if node.input and parameters.issuperset(node.input[:1]) and set(inputs) == {Flow.CONSTANT}:
            parameters.update(node.output)  # a reshaped or transposed parameter
        for name in node.output:
            if name == EMBEDDED:
                continue
            if name in frozen:
                flow = Flow.FROZEN
            if flow is not Flow.CONSTANT:
                flows[name] = flow
    return flows


def _flow(  # noqa: PLR0911 - one for each kind of operator
    node: onnx.NodeProto, inputs: list[Flow], weights: Constants, parameters: AbstractSet[str]
) -> Flow:
    """Return the flow of the results of a node."""
    kinds = set(inputs)
    if kinds <= {Flow.CONSTANT} or node.op_type == "Shape":
        return Flow.CONSTANT
    match node.op_type:
        case "Mul" | "MatMul" | "Div":
            return _flow_of_product(node, inputs, weights, parameters)
        case "LayerNormalization" | "Conv":
            return Flow.LINEAR if inputs[0].is_linear else Flow.FROZEN
        case "Pow":
            is_square = inputs[0].is_activated and _is_two(weights.get(node.input[1]))
            return Flow.ACTIVATED if is_square else Flow.FROZEN
        case kind if kind in _ACTIVATIONS:
            return Flow.ACTIVATED if inputs[0].is_linear else Flow.FROZEN
        case kind if kind in _MOVING | _ADDING:
            return _flow_of_sum(kinds)
    return Flow.FROZEN


def _flow_of_sum(kinds: set[Flow]) -> Flow:
    if Flow.LINEAR in kinds:
        return Flow.LINEAR
    for kind in (Flow.ACTIVATED, Flow.FROZEN, Flow.OFFSET):
        if kind in kinds:
            return kind
    return Flow.CONSTANT


def _flow_of_product(
    node: onnx.NodeProto, inputs: list[Flow], weights: Constants, parameters: AbstractSet[str]
) -> Flow:
    if any(_is_zero(weights.get(name)) for name in node.input):
        return Flow.CONSTANT  # zeros in the shape of the other factor
    first, second = inputs
    if first.is_linear and second.is_linear:
        one_is_gate = (first is Flow.ACTIVATED) != (second is Flow.ACTIVATED)
        return Flow.ACTIVATED if node.op_type == "Mul" and one_is_gate else Flow.FROZEN
    if first.is_linear or (second.is_linear and node.op_type != "Div"):
        other = second if first.is_linear else first
        own = first if first.is_linear else second
        if node.op_type == "MatMul":
            return Flow.LINEAR
        is_activation = node.op_type == "Mul" and other in (Flow.FROZEN, Flow.OFFSET)
        return Flow.ACTIVATED if is_activation else own
    has_parameter = Flow.CONSTANT in inputs and not parameters.isdisjoint(node.input)
    if has_parameter and node.op_type != "Div" and not _is_projection(node, weights):
        return Flow.OFFSET
    return Flow.FROZEN


def _is_projection(node: onnx.NodeProto, weights: Constants) -> bool:
    """Return whether a node multiplies rows by a matrix."""
    matrix = weights.get(node.input[1])
    return node.op_type == "MatMul" and matrix is not None and matrix.ndim == _MATRIX_AXES


def _is_two(array: npt.NDArray[np.generic] | None) -> bool:
    return array is not None and array.size == 1 and bool(array == 2)  # noqa: PLR2004 - a square


def _is_negative_power(node: onnx.NodeProto, weights: Constants) -> bool:
    exponent = weights.get(node.input[1]) if node.op_type == "Pow" else None
    return exponent is not None and bool((exponent.astype(np.float64) < 0).all())


def _is_zero(array: npt.NDArray[np.generic] | None) -> bool:
    return array is not None and array.dtype == np.float32 and array.size == 1 and not array.any()
