"""The lint: each kind of bad graph is caught and named."""

import copy
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from attnlens.v1.manifest_pb2 import GraphPurpose
from attnlens_export import LintError
from attnlens_export.contents import PRECISIONS
from attnlens_export.graph.lint import check_graph
from attnlens_export.graph.trace import TracedGraph, embeddings_graph
from attnlens_model import EncoderConfig
from attnlens_model.attention.parts.masks import MASKED_SCORE

ATTENTIONS = GraphPurpose.GRAPH_PURPOSE_ATTENTION


@pytest.fixture
def graph(tiny_trace: TracedGraph) -> onnx.ModelProto:
    return tiny_trace.proto_with_weights()


def add_node(operator: str, domain: str = "") -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        model.graph.node.append(helper.make_node(operator, ["add_0"], ["x"], name="bad", domain=domain))

    return change


def rename_axis(model: onnx.ModelProto) -> None:
    model.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "s27"


def fix_axis(model: onnx.ModelProto) -> None:
    model.graph.output[1].type.tensor_type.shape.dim[0].dim_value = 2


def wrong_heads(model: onnx.ModelProto) -> None:
    model.graph.output[2].type.tensor_type.shape.dim[1].dim_value = 3


def float_ids(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT


def newer_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 18


def second_domain(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def newer_ir(model: onnx.ModelProto) -> None:
    model.ir_version = 10


def local_function(model: onnx.ModelProto) -> None:
    model.functions.append(helper.make_function("local", "Fused", ["a"], ["a"], [], []))


def allow_zero(model: onnx.ModelProto) -> None:
    reshape = next(node for node in model.graph.node if node.op_type == "Reshape")
    reshape.attribute.append(helper.make_attribute("allowzero", 1))


def computed_target(model: onnx.ModelProto) -> None:
    next(node for node in model.graph.node if node.op_type == "Reshape").input[1] = "shape_0"


def missing_output(model: onnx.ModelProto) -> None:
    del model.graph.output[-1]


def half_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = onnx.TensorProto.FLOAT16


def masked_with(value: float, dtype: type[np.floating] = np.float32) -> Callable[[onnx.ModelProto], None]:
    """Replace the value that is added to masked scores, and store it as a table."""

    def change(model: onnx.ModelProto) -> None:
        masks = [each for each in model.graph.initializer if each.name.startswith("constant_")]
        [mask] = [each for each in masks if (numpy_helper.to_array(each) == MASKED_SCORE).all()]
        mask.CopyFrom(numpy_helper.from_array(np.full((1, 300), value, dtype), mask.name))

    return change


def constant_node(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Constant", [], ["x"], name="bad", value_float=-1e30))


BAD_GRAPHS: dict[str, tuple[Callable[[onnx.ModelProto], None], str]] = {
    "dropout": (
        add_node("Dropout"),
        "node 'bad': operator Dropout is not allowed (the encoder was traced in training mode)",
    ),
    "random": (add_node("RandomNormalLike"), "operator RandomNormalLike is not allowed (random numbers)"),
    "if": (add_node("If"), "operator If is not allowed (control flow)"),
    "loop": (add_node("Loop"), "operator Loop is not allowed (control flow)"),
    "scan": (add_node("Scan"), "operator Scan is not allowed (control flow)"),
    "clip": (add_node("Clip"), "operator Clip is not allowed"),
    "conv": (add_node("Conv"), "operator Conv is not allowed"),
    "foreign domain": (add_node("Gelu", "com.microsoft"), "Gelu of the foreign domain 'com.microsoft'"),
    "axis name": (rename_axis, "input 'attention_mask' has axes ('batch_size', 's27') instead of"),
    "fixed axis": (fix_axis, "output 'attentions.0' has axes (2, 4, 'sequence_length', 'sequence_length')"),
    "heads": (wrong_heads, "output 'attentions.1' has axes ('batch_size', 3,"),
    "type": (float_ids, "input 'input_ids' is FLOAT instead of INT64"),
    "opset": (newer_opset, "operator sets {'ai.onnx': 18}"),
    "second opset": (second_domain, "'com.microsoft': 1"),
    "IR": (newer_ir, "IR version 10 instead of 8"),
    "function": (local_function, "local functions: Fused"),
    "allowzero": (allow_zero, "Reshape with the attribute allowzero"),
    "computed target": (computed_target, "the target of the Reshape is not a constant"),
    "outputs": (missing_output, "outputs ['last_hidden_state', 'attentions.0'] instead of"),
    "half precision": (half_weight, "is FLOAT16"),
    "mask of fp32": (
        masked_with(-1.7014117e38),
        "has the magnitude 1.7014117e+38, but the fp16 limit is 65504",
    ),
    "just beyond fp16": (masked_with(65505), "has the magnitude 65505, but the fp16 limit is 65504"),
    "infinity": (masked_with(-np.inf), "has the magnitude inf"),
    "NaN": (masked_with(np.nan), "has the magnitude nan"),
    "constant node": (constant_node, "operator Constant is not allowed"),
}


def test_fresh_graph_has_no_findings(graph: onnx.ModelProto, tiny_config: EncoderConfig) -> None:
    check_graph(graph, "model.onnx", tiny_config, ATTENTIONS)


@pytest.mark.parametrize(("change", "finding"), BAD_GRAPHS.values(), ids=BAD_GRAPHS.keys())
def test_bad_graph_is_caught(
    change: Callable[[onnx.ModelProto], None],
    finding: str,
    graph: onnx.ModelProto,
    tiny_config: EncoderConfig,
) -> None:
    change(graph)
    with pytest.raises(LintError) as caught:
        check_graph(graph, "onnx/model_attentions.onnx", tiny_config, ATTENTIONS)
    assert finding in str(caught.value)
    assert "onnx/model_attentions.onnx" in str(caught.value)
    assert len(caught.value.findings) == 1


def test_error_lists_every_finding(graph: onnx.ModelProto, tiny_config: EncoderConfig) -> None:
    for change in (newer_ir, rename_axis, add_node("Dropout"), add_node("If")):
        change(graph)
    with pytest.raises(LintError) as caught:
        check_graph(graph, "model.onnx", tiny_config, ATTENTIONS)
    assert len(caught.value.findings) == 4


def test_graph_of_the_other_kind_is_caught(tiny_trace: TracedGraph, tiny_config: EncoderConfig) -> None:
    embeddings = copy.deepcopy(embeddings_graph(tiny_trace)).proto_with_weights()
    check_graph(embeddings, "model.onnx", tiny_config, GraphPurpose.GRAPH_PURPOSE_EMBEDDINGS)
    with pytest.raises(LintError):
        check_graph(embeddings, "model.onnx", tiny_config, ATTENTIONS)


def test_largest_number_of_fp16_is_allowed(graph: onnx.ModelProto, tiny_config: EncoderConfig) -> None:
    masked_with(-65504)(graph)
    check_graph(graph, "model.onnx", tiny_config, ATTENTIONS)


@pytest.mark.parametrize(
    ("precision", "value", "dtype"), [("fp16", -np.inf, np.float16), ("int8", -1e5, np.float32)]
)
def test_constants_of_graphs_in_lower_precision_are_checked_too(
    precision: str, value: float, dtype: type, graph: onnx.ModelProto, tiny_config: EncoderConfig
) -> None:
    types = PRECISIONS[precision].element_types
    check_graph(graph, "model.onnx", tiny_config, ATTENTIONS, more_types=types)
    masked_with(value, dtype)(graph)
    with pytest.raises(LintError, match="but the fp16 limit is 65504"):
        check_graph(graph, "model.onnx", tiny_config, ATTENTIONS, more_types=types)


def test_parameter_may_be_of_any_size(graph: onnx.ModelProto, tiny_config: EncoderConfig) -> None:
    [norm] = [each for each in graph.graph.initializer if each.name == "layers.0.output_norm.weight"]
    norm.CopyFrom(numpy_helper.from_array(1e5 * numpy_helper.to_array(norm), norm.name))
    check_graph(graph, "model.onnx", tiny_config, ATTENTIONS)
