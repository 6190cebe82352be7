"""Mutants of an ONNX graph: copies in which one node or one initializer is wrong."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

ORDERED = {"Concat", "Div", "MatMul", "Pow", "Sub"}
"""Operators whose inputs are swapped."""
OTHERS = {
    "Add": "Sub",
    "Div": "Mul",
    "Max": "Min",
    "Min": "Max",
    "Mul": "Div",
    "ReduceSum": "ReduceMean",
    "Sub": "Add",
}
SMALL = 16
"""Maximum size of an initializer that is treated as a constant, not as a table."""

Array = npt.NDArray[Any]


def mutants(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield a description and a mutant. Not every mutant is a valid graph, or differs in its results."""
    for index, node in enumerate(model.graph.node):
        for name, change in _node_changes(model.graph, node):
            mutant = _copy(model)
            change(mutant.graph.node[index])
            yield f"{name} {node.op_type} {node.output[0]}", mutant
    for index, initializer in enumerate(model.graph.initializer):
        array = numpy_helper.to_array(initializer)
        for name, changed in _other_arrays(array):
            mutant = _copy(model)
            tensor = numpy_helper.from_array(changed.astype(array.dtype), initializer.name)
            mutant.graph.initializer[index].CopyFrom(tensor)
            yield f"{name} {initializer.name}", mutant


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    return copied


def _node_changes(
    graph: onnx.GraphProto, node: onnx.NodeProto
) -> Iterator[tuple[str, Callable[[onnx.NodeProto], None]]]:
    constants = {initializer.name for initializer in graph.initializer}
    variables = [name for name in node.input if name and name not in constants]

    def drop(changed: onnx.NodeProto) -> None:
        changed.CopyFrom(onnx.helper.make_node("Identity", variables[:1], [*changed.output]))

    def swap(changed: onnx.NodeProto) -> None:
        changed.input[0], changed.input[1] = node.input[1], node.input[0]

    def replace(changed: onnx.NodeProto) -> None:
        changed.op_type = OTHERS[node.op_type]

    if variables:
        yield "drop", drop
    if node.op_type in ORDERED and len(node.input) > 1:
        yield "swap", swap
    if node.op_type in OTHERS:
        yield OTHERS[node.op_type], replace
    for index, attribute in enumerate(node.attribute):
        yield from _attribute_changes(index, attribute)


def _attribute_changes(
    index: int, attribute: onnx.AttributeProto
) -> Iterator[tuple[str, Callable[[onnx.NodeProto], None]]]:
    def add(difference: int) -> Callable[[onnx.NodeProto], None]:
        def change(changed: onnx.NodeProto) -> None:
            changed.attribute[index].i += difference

        return change

    def scale(changed: onnx.NodeProto) -> None:
        changed.attribute[index].f *= 3

    def swap_last(changed: onnx.NodeProto) -> None:
        axes = changed.attribute[index].ints
        axes[-1], axes[-2] = axes[-2], axes[-1]

    if attribute.name in {"axis", "exclusive", "keepdims", "reverse"}:
        yield f"{attribute.name} + 1", add(1)
        yield f"{attribute.name} - 1", add(-1)
    if attribute.type == onnx.AttributeProto.FLOAT:
        yield f"{attribute.name} * 3", scale
    if attribute.name == "perm":
        yield "perm", swap_last


def _other_arrays(array: Array) -> Iterator[tuple[str, Array]]:
    if array.dtype == np.bool_:
        yield "not", ~array
        return
    if array.size <= SMALL:
        yield "+ 1", array + np.ones_like(array)
        yield "- 1", array - np.ones_like(array)
    else:
        yield "rolled", np.roll(array, 1, axis=0)
        changed = array.copy()
        changed[-1] -= np.ones_like(changed[-1])
        yield "last - 1", changed
    if np.issubdtype(array.dtype, np.floating):
        yield "* 1.1", array * np.asarray(1.1, array.dtype)
