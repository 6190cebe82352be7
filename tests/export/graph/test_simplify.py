"""Rewriting of traced graphs keeps every number."""

from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from attnlens_export.graph.simplify import fold, reorder_gelu, replace_split


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


GELU = """<ir_version: 8, opset_import: ["": 17]>
gelu (float[2, 4] x, float[2, 4] gate) => (float[2, 4] result)
<float root = {1.41421356}, float one = {1.0}, float half = {0.5}> {
    divided = Div(x, root)
    erf = Erf(divided)
    sum = Add(erf, one)
    halved = Mul(half, sum)
    product = Mul(x, halved)
    result = LAST
}"""


@pytest.mark.parametrize(("last", "is_reordered"), [("Sqrt(product)", True), ("Mul(product, gate)", False)])
def test_gelu_is_fused_unless_it_is_a_factor(last: str, is_reordered: bool) -> None:
    """torch.onnx writes it in an order that ONNX Runtime does not fuse."""
    model = ir.from_proto(onnx.parser.parse_model(GELU.replace("LAST", last)))
    feed = {name: np.linspace(0.1, 3, 8, dtype=np.float32).reshape(2, 4) for name in ("x", "gate")}
    expected: Any = ReferenceEvaluator(ir.to_proto(model)).run(None, feed)
    nodes = {node.outputs[0].name: node for node in model.graph}
    reorder_gelu(nodes["erf"])
    assert (model.graph.inputs[0] in nodes["halved"].inputs) == is_reordered
    found: Any = ReferenceEvaluator(ir.to_proto(model)).run(None, feed)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
