"""Computes the last layer of an encoder only for the token that a head pools.

A head with cls or last-token pooling reads one token vector per text. The last layer computes the keys and
values of all tokens, and everything else, from the query to the feed-forward network, for this token alone.
The products are the same, so the result is exact up to rounding.
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from attnlens_export.contributions.writer import GraphWriter
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import BATCH_AXIS, HIDDEN_OUTPUT, LENGTH_AXIS
from attnlens_export.graph.trace import TracedGraph, drop_unread

# Operators that compute each row from the same row of their first input; other inputs are constants.
_ROW_OPERATORS = frozenset(
    {
        "DequantizeLinear",
        "Erf",
        "LayerNormalization",
        "Neg",
        "Pow",
        "QuantizeLinear",
        "Reciprocal",
        "Relu",
        "Sigmoid",
        "Softmax",
        "Sqrt",
        "Tanh",
    }
)
_ELEMENTWISE = frozenset({"Add", "Div", "Mul", "Sub"})


class _NotSelectableError(Exception):
    """A value can't be computed for one token."""


def last_hidden_state_of_one_token(writer: GraphWriter, weights: str) -> str | None:
    """Return the name of the last hidden state (B, 1, D) of one token per text.

    Args:
        writer: Embeddings graph, to which nodes are appended.
        weights: Name of the weights (B, T): 1 for the token, 0 for all others.

    Returns:
        None if the last layer has a form for which there is no rule.
    """
    return _select_last(writer, weights)[0]


def _select_last(writer: GraphWriter, weights: str) -> tuple[str | None, dict[tuple[str, int], str]]:
    """Return the name of the last hidden state of one token, or None, and all selected values."""
    try:
        selection = _Selection(writer, weights)
        return selection.select(HIDDEN_OUTPUT, 1), selection.selected
    except (_NotSelectableError, GraphError):
        return None, {}


def _rename_selected(graph: onnx.GraphProto, selected: dict[tuple[str, int], str]) -> dict[str, str]:
    """Give selected values the names of the values that no node computes anymore. Return the new names."""
    computed = {name for node in graph.node for name in node.output}
    # A value may be selected along several axes.
    first = {value: new for (value, _), new in reversed(selected.items())}
    names = {new: value for value, new in first.items() if new in computed and value not in computed}
    for node in graph.node:
        for fields in (node.input, node.output):
            fields[:] = [names.get(name, name) for name in fields]
    return names


def limit_to_one_token(embeddings: TracedGraph, weights: str) -> TracedGraph | None:
    """Return an embeddings graph with the last hidden state (B, 1, D) of one token per text.

    Args:
        embeddings: Graph with the last hidden state (B, T, D), which does not change.
        weights: Name of an additional input (B, T): 1 for the token, 0 for all others.

    Returns:
        The graph, or None if the last layer has an unsupported form.
    """
    proto = copy.deepcopy(embeddings.proto)
    graph = proto.graph
    writer = GraphWriter(graph, embeddings.weights, embeddings.shapes, "token")
    vector, selected = _select_last(writer, weights)
    if vector is None:
        return None
    graph.output[0].CopyFrom(helper.make_tensor_value_info(vector, TensorProto.FLOAT, writer.shape(vector)))
    drop_unread(graph)
    # Attention weights and the result are found by name.
    names = _rename_selected(graph, selected)
    writer.shapes.update({value: writer.shapes[new] for new, value in names.items()})
    graph.output[0].name = names[vector]
    graph.input.append(helper.make_tensor_value_info(weights, TensorProto.FLOAT, (BATCH_AXIS, LENGTH_AXIS)))
    return TracedGraph(proto, writer.weights, writer.shapes)


class _Selection:
    """Selects one token of values along the axis of the queries."""

    def __init__(self, writer: GraphWriter, weights: str) -> None:
        self._writer = writer
        self._weights = weights
        self._producers = {name: node for node in writer.graph.node for name in node.output}
        self._variable = self._dependents({"input_ids"})
        self._whole = self._inputs_of_keys()
        self.selected: dict[tuple[str, int], str] = {}

    def select(self, value: str, axis: int) -> str:
        """Return the name of a value with only one token along an axis, which keeps the length 1."""
        key = value, axis
        if key not in self.selected:
            is_computed = value in self._whole or value not in self._variable
            self.selected[key] = self._cut(*key) if is_computed else self._recompute(*key)
        return self.selected[key]

    def _dependents(self, roots: set[str]) -> set[str]:
        """Return the values that depend on some values. Lengths, such as of positions, do not count."""
        found = set(roots)
        for node in self._writer.graph.node:
            if node.op_type != "Shape" and not found.isdisjoint(node.input):
                found.update(node.output)
        return found

    def _inputs_of_keys(self) -> set[str]:
        """Return the values from which the keys or values of the last layer are computed."""
        pending, seen = [HIDDEN_OUTPUT], set[str]()
        while pending:
            name = pending.pop(0)
            node = self._producers.get(name)
            if node is None or name in seen:
                continue
            seen.add(name)
            if node.op_type == "MatMul" and node.input[1] in self._variable:
                return self._ancestors(node.input[1])
            pending.extend(each for each in node.input if each in self._variable)
        raise _NotSelectableError

    def _ancestors(self, value: str) -> set[str]:
        pending, found = [value], {value}
        while pending:
            node = self._producers.get(pending.pop())
            for name in node.input if node is not None else ():
                if name not in found:
                    found.add(name)
                    pending.append(name)
        return found

    def _cut(self, value: str, axis: int) -> str:
        """Select the token of a value that all tokens need, or that does not depend on the text."""
        shape = self._writer.shape(value)
        if axis == 0 or axis >= len(shape) or shape[axis] != LENGTH_AXIS:
            raise _NotSelectableError
        others = [index for index in range(1, len(shape)) if index != axis]
        rows: list[int | str] = [1] * len(shape)
        rows[0], rows[axis] = BATCH_AXIS, LENGTH_AXIS
        weights = self._weights
        if others:
            weights = self._writer.add("Unsqueeze", weights, self._writer.constant(others), shape=tuple(rows))
        whole = (BATCH_AXIS, *shape[1:])
        product = self._writer.add("Mul", value, weights, shape=whole)
        return self._writer.sum(product, [axis], keepdims=True)

    def _recompute(self, value: str, axis: int) -> str:
        node = self._producers[value]
        inputs = list(node.input)
        if node.op_type in _ROW_OPERATORS and axis < len(self._writer.shape(value)) - 1:
            inputs[0] = self.select(inputs[0], axis)
        elif node.op_type in _ELEMENTWISE:
            inputs = [self._operand(name, value, axis) for name in inputs]
        elif node.op_type == "ReduceSum":
            self._check_sum(node, axis)
            inputs[0] = self.select(inputs[0], axis)
        elif node.op_type == "MatMul":
            is_query = axis == len(self._writer.shape(value)) - 2
            if inputs[1] in self._variable and not is_query:
                raise _NotSelectableError
            inputs[0] = self.select(inputs[0], axis)
        elif node.op_type in ("Squeeze", "Transpose", "Unsqueeze"):
            inputs[0] = self.select(inputs[0], self._axis_before(node, axis))
        elif node.op_type == "Reshape":
            # All axes up to the one of the tokens stay the same: zeros copy them.
            pairs = zip(self._constant(inputs[1]), self._writer.shape(inputs[0]), strict=False)
            if any(length not in (0, own) for length, own in itertools.islice(pairs, axis + 1)):
                raise _NotSelectableError
            inputs[0] = self.select(inputs[0], axis)
        elif node.op_type in ("Concat", "Gather", "Slice"):
            inputs = self._along_other_axes(node, inputs, axis)
        else:
            raise _NotSelectableError
        shape = list(self._writer.shape(value))
        shape[axis] = 1
        return self._writer.add(node.op_type, *inputs, shape=tuple(shape), **_attributes(node))

    def _axis_before(self, node: onnx.NodeProto, axis: int) -> int:
        if node.op_type == "Transpose":
            return int(_attributes(node)["perm"][axis])
        is_longer = node.op_type == "Unsqueeze"
        rank = len(self._writer.shape(node.output[0] if is_longer else node.input[0]))
        ones = {int(each) % rank for each in self._constant(node.input[1])}
        others = [own for own in range(rank) if own not in ones]
        return others.index(axis) if is_longer else others[axis]

    def _operand(self, name: str, result: str, axis: int) -> str:
        """Return an operand with one token, or unchanged if it is broadcast along the axis."""
        shape = self._writer.shape(name)
        num_missing = len(self._writer.shape(result)) - len(shape)
        own = axis - num_missing
        if own < 0 or shape[own] == 1:
            return name
        if num_missing == 0:
            return self.select(name, own)
        if name in self._variable:
            raise _NotSelectableError
        missing = self._writer.constant(list(range(num_missing)))
        shape = (*(1 for _ in range(num_missing)), *shape)
        return self._cut(self._writer.add("Unsqueeze", name, missing, shape=shape), axis)

    def _check_sum(self, node: onnx.NodeProto, axis: int) -> None:
        rank = len(self._writer.shape(node.input[0]))
        axes = {int(each) % rank for each in self._constant(node.input[1])}
        if axis in axes or not _attributes(node).get("keepdims", 1):
            raise _NotSelectableError

    def _along_other_axes(self, node: onnx.NodeProto, inputs: Sequence[str], axis: int) -> list[str]:
        rank = len(self._writer.shape(node.input[0]))
        if node.op_type == "Concat":
            if _attributes(node)["axis"] % rank == axis:
                raise _NotSelectableError
            return [self.select(name, axis) for name in inputs]
        if node.op_type == "Gather":
            # The columns that an int8 graph multiplies in fp32.
            if inputs[1] in self._variable or _attributes(node)["axis"] != rank - 1 or axis == rank - 1:
                raise _NotSelectableError
        elif axis in {int(each) % rank for each in self._constant(inputs[3])}:
            raise _NotSelectableError
        return [self.select(inputs[0], axis), *inputs[1:]]

    def _constant(self, name: str) -> npt.NDArray[np.generic]:
        if name not in self._writer.weights:
            raise _NotSelectableError
        return self._writer.weights[name]


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
