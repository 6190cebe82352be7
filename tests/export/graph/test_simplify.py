"""Rewriting of traced graphs keeps every number."""

import numpy as np
import onnx_ir as ir
import pytest

from attnlens_export.graph.simplify import fold, replace_split


@pytest.mark.parametrize(
    ("operation", "number", "is_kept"),
    [
        *(("Add", 1e-8, True), ("Sub", 1e-12, True), ("Mul", 1.000001, True), ("Div", 0.999999, True)),
        *(("Add", 0.0, False), ("Sub", 0.0, False), ("Mul", 1.0, False), ("Div", 1.0, False)),
    ],
)
def test_number_that_is_nearly_neutral_is_kept(operation: str, number: float, is_kept: bool) -> None:
    values = ir.Value(name="values", shape=ir.Shape(["rows", 4]), type=ir.TensorType(ir.DataType.FLOAT))
    constant = ir.node("Constant", [], {"value": ir.tensor(np.float32(number))})
    node = ir.node(operation, [values, constant.outputs[0]])
    result = ir.node("Sqrt", [node.outputs[0]])
    graph = ir.Graph([values], result.outputs, nodes=[constant, node, result], opset_imports={"": 17})
    model = ir.Model(graph, ir_version=8)
    fold(model, keep=())
    assert (operation in {each.op_type for each in model.graph}) == is_kept


@pytest.mark.parametrize(("lengths", "start"), [([1, 2, 3], 3), (None, 4)])
def test_part_that_nothing_reads_needs_no_shape(lengths: list[int] | None, start: int) -> None:
    values = ir.Value(name="values", shape=ir.Shape(["rows", 6]), type=ir.TensorType(ir.DataType.FLOAT))
    stated = ir.Value(name="lengths", const_value=ir.tensor(lengths or [], dtype=ir.DataType.INT64))
    inputs = [values] if lengths is None else [values, stated]
    split = ir.node("Split", inputs, {"axis": 1}, num_outputs=3)
    for part in split.outputs[::2]:
        part.shape = ir.Shape(["rows", 2])
    result = ir.node("Add", [split.outputs[0], split.outputs[2]])
    graph = ir.Graph([values], result.outputs, nodes=[split, result], opset_imports={"": 17})
    replace_split(graph, split)
    last = result.inputs[1]
    assert last is not None
    node = last.producer()
    assert node is not None
    assert node.op_type == "Slice"
    assert node.inputs[1] is graph.initializers[f"target_{start}"]
