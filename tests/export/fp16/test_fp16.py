"""The fp16 graph: data types, results, rejected encoders, and errors that `check` detects."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from attnlens.bundle import BundleError, read_manifest
from attnlens.v1.manifest_pb2 import GateKind, GraphPurpose, Precision
from attnlens_cli.commands.bundles.check import check
from attnlens_export import ExportOptions, Fp16, GraphError, export_bundle
from attnlens_export.check import check_bundle
from attnlens_export.fp16 import (
    Fp16Weights,
    RoundedGraph,
    count_rounded,
    fp16_values,
    measure_fp16,
    rounded_everywhere,
    to_fp16,
)
from attnlens_export.graph.trace import TracedGraph, embeddings_graph
from attnlens_export.graph.write import write_embedded
from attnlens_export.layouts import write_layout
from attnlens_export.parity.grid import Case, Padding, make_inputs, small_grid
from attnlens_export.parity.measure import Subject
from attnlens_export.parity.reference import run_fp32
from attnlens_export.parity.stored import References
from attnlens_model import Encoder, EncoderConfig, new_encoder
from attnlens_model.attention.parts.masks import MASKED_SCORE
from family_cases import EXPORTED
from small_files import sign

GRID = small_grid(40)
# Mechanisms that are converted differently: a shared bias, a convolution and relative scores, RMSNorm with
# rotations and shared heads, and the tanh form of GELU with no norm behind the embeddings.
FAMILIES = ("mpnet", "deberta_v2", "eurobert", "t5")


def export_tiny(config: EncoderConfig, traced: TracedGraph, output: Path, **options: Any) -> Path:
    chosen = ExportOptions(name="tiny", grid=GRID, precisions=[Fp16()], tracer=lambda *_: traced, **options)
    export_bundle(config, output, chosen)
    return output


@pytest.fixture(scope="module")
def fp16_bundle(
    tiny_config: EncoderConfig, tiny_trace: TracedGraph, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return export_tiny(tiny_config, tiny_trace, tmp_path_factory.mktemp("fp16") / "tiny")


@pytest.fixture
def copied(fp16_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fp16_bundle, tmp_path / "copy"))


def value_types(path: Path) -> dict[str, int]:
    """The type of every value of a graph, as ONNX infers it."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(path), check_type=True, strict_mode=True).graph
    types = {each.name: each.type.tensor_type.elem_type for each in (*graph.value_info, *graph.output)}
    return types | {each.name: each.data_type for each in graph.initializer}


def test_fp16_graph_opens_and_matches_pytorch(
    fp16_bundle: Path, tiny_encoder: Encoder, tiny_config: EncoderConfig
) -> None:
    session = onnxruntime.InferenceSession(fp16_bundle / "onnx" / "model_fp16.onnx")
    assert [each.type for each in session.get_inputs()] == ["tensor(int64)"] * 3
    (output,) = session.get_outputs()
    assert (output.name, output.type) == ("last_hidden_state", "tensor(float)")
    inputs = make_inputs(Case(2, 20, Padding.RIGHT), tiny_config)
    hidden = run_fp32(tiny_encoder, inputs, with_attentions=False)["last_hidden_state"]
    (measured,) = session.run(None, inputs.feed())
    live = inputs.attention_mask == 1
    ours, expected = measured[live], hidden[live]
    norms = np.linalg.norm(ours, axis=-1) * np.linalg.norm(expected, axis=-1)
    assert ((ours * expected).sum(axis=-1) / norms).min() >= 0.9999
    assert np.abs(ours - expected).max() > 1e-5  # it is not the fp32 graph


def test_products_are_fp16_and_norms_softmax_and_residual_sums_fp32(fp16_bundle: Path) -> None:
    path = fp16_bundle / "onnx" / "model_fp16.onnx"
    types = value_types(path)
    nodes = onnx.load(path).graph.node
    by_operator: dict[str, set[int]] = {}
    for node in nodes:
        by_operator.setdefault(node.op_type, set()).update(types[name] for name in node.output)
    assert by_operator["MatMul"] == by_operator["Erf"] == {TensorProto.FLOAT16}
    for operator in ("LayerNormalization", "Softmax", "Sub"):
        assert by_operator[operator] == {TensorProto.FLOAT}, operator
    computed = {name for node in nodes for name in node.output}
    sums = [node for node in nodes if node.op_type == "Add" and computed.issuperset(node.input)]
    assert {types[node.output[0]] for node in sums} == {TensorProto.FLOAT}
    # Of three embeddings two; then in each of two layers mask and scores, and two residual sums.
    assert len(sums) == 2 + 2 * 3


def test_weights_take_half_the_space_and_the_masks_number_is_whole(fp16_bundle: Path) -> None:
    sizes = [(fp16_bundle / "onnx" / name).stat().st_size for name in ("model_fp16.onnx", "model.onnx")]
    assert sizes[0] < 0.6 * sizes[1]
    model = onnx.load(fp16_bundle / "onnx" / "model_fp16.onnx", load_external_data=False)
    assert not any(each.external_data for each in model.graph.initializer)
    smallest = min(
        float(numpy_helper.to_array(each).min())
        for each in model.graph.initializer
        if each.data_type == TensorProto.FLOAT
    )
    assert smallest == MASKED_SCORE


def test_manifest_and_the_report_tell_the_figures(fp16_bundle: Path) -> None:
    manifest = read_manifest(fp16_bundle)
    graph = manifest.graphs[3]
    assert (graph.path, graph.purpose) == ("onnx/model_fp16.onnx", GraphPurpose.GRAPH_PURPOSE_EMBEDDINGS)
    assert [graph.precision for graph in manifest.graphs] == [
        Precision.PRECISION_FP32,
        Precision.PRECISION_FP32,
        Precision.PRECISION_FP32,
        Precision.PRECISION_FP16,
    ]
    repeats, cosine, largest = sorted(
        (gate for gate in manifest.parity.gates if gate.graph == graph.id),
        key=lambda gate: gate.kind != GateKind.GATE_KIND_MAX_REPEAT_DIFFERENCE,
    )
    assert (repeats.kind, repeats.limit, repeats.value) == (GateKind.GATE_KIND_MAX_REPEAT_DIFFERENCE, 0, 0)
    assert (cosine.kind, cosine.limit) == (GateKind.GATE_KIND_MIN_COSINE, 0.9999)
    assert (largest.kind, largest.limit) == (GateKind.GATE_KIND_MAX_FP16_VALUE, 65504)
    figure = manifest.parity.figures[-1]
    assert figure.graph == graph.id == "embeddings.fp16"
    assert (cosine.value, largest.value) == (figure.min_cosine, figure.max_fp16_value)
    assert 0.9999 <= figure.min_cosine < 1
    assert 0.1 < figure.max_fp16_value < 65504
    assert all(each.max_fp16_value == 0 for each in manifest.parity.figures[:-1])
    report = json.loads((fp16_bundle / "parity" / "report.json").read_text())
    assert len(report["fp16"]["comparisons"]) == 3 * len(GRID)
    assert report["fp16"]["remarks"][0].endswith("0 were rounded to 0")
    assert "## In fp16" in (fp16_bundle / "parity" / "report.md").read_text()


def test_rounded_copy_follows_the_onnx_definition(fp16_bundle: Path, tiny_config: EncoderConfig) -> None:
    """The oracle computes each fp16 node in numpy's fp16, sums of products included."""
    path = fp16_bundle / "onnx" / "model_fp16.onnx"
    inputs = make_inputs(Case(2, 5, Padding.LEFT), tiny_config)
    hidden, place, largest = RoundedGraph(path).run(inputs)
    evaluator = ReferenceEvaluator(onnx.load(path))
    computed: dict[str, Any] = evaluator.run(None, inputs.feed(), intermediate=True)  # type: ignore[assignment]
    assert np.abs(hidden - computed["last_hidden_state"]).max() < 5e-3
    values = computed[place.partition(" ")[0]]
    assert values.dtype == np.float16
    assert np.abs(values).max() == pytest.approx(largest, rel=1e-2)


def test_rounded_copy_rounds_between_nodes(fp16_bundle: Path, tiny_config: EncoderConfig) -> None:
    """A bias is added to the rounded value, bit for bit. By default, ONNX Runtime adds it in fp32."""
    model = onnx.load(fp16_bundle / "onnx" / "model_fp16.onnx")
    in_fp16 = set(fp16_values(model))
    biases = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    sums = [
        (*node.input, node.output[0])
        for node in model.graph.node
        if node.op_type == "Add" and node.input[0] in in_fp16 and node.input[1] in biases
    ]
    names = rounded_everywhere(model)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    inputs = make_inputs(Case(2, 9, Padding.LEFT), tiny_config)
    found = dict(zip(names, session.run(names, inputs.feed()), strict=True))
    assert len(sums) == 2 * (6 + 1)  # the 1 of GELU
    for name, bias, result in sums:
        exact = found[name].astype(np.float32) + biases[bias].astype(np.float32)
        assert np.array_equal(found[result], exact.astype(np.float16)), result


@pytest.mark.parametrize("family", FAMILIES)
def test_family_converts_and_passes(family: str, tmp_path: Path) -> None:
    EXPORTED[family].make().save_pretrained(tmp_path / "source")
    options = ExportOptions(pooling="mean", grid=small_grid(33)[-2:], precisions=[Fp16()])
    summary = export_bundle(tmp_path / "source", tmp_path / "bundle", options)
    [errors] = summary.verdict.precisions["fp16"].worst_errors()
    assert errors.min_cosine >= 0.9999
    path = tmp_path / "bundle" / "onnx" / "model_fp16.onnx"
    types = value_types(path)
    nodes = onnx.load(path).graph.node
    computed = {name for node in nodes for name in node.output}
    for node in nodes:
        found = {types[name] for name in node.output}
        if node.op_type == "Add" and computed.issuperset(node.input):
            assert TensorProto.FLOAT16 not in found, node.name
        if node.op_type in {"LayerNormalization", "Softmax", "ReduceSum", "Sqrt", "Reciprocal"}:
            assert found == {TensorProto.FLOAT}, node.name
        if node.op_type in {"MatMul", "Conv"} or "input_ids" in node.input[1:]:
            assert found == {TensorProto.FLOAT16}, node.name
        if node.op_type == "Expand":
            assert found == {types[node.input[0]]}, node.name
        if node.op_type == "Tanh" and family == "t5":
            assert found == {TensorProto.FLOAT}, node.name


def test_weight_beyond_the_range_is_rejected_by_name(tiny_trace: TracedGraph) -> None:
    name = "layers.1.feed_forward.up.weight.T"
    weights = dict(tiny_trace.weights)
    weights[name] = weights[name].copy()
    weights[name][2, 3] = -65520.0
    message = rf"{name} contains a value of magnitude 65520, but the range of fp16 ends at 65504"
    with pytest.raises(GraphError, match=message):
        to_fp16(embeddings_graph(TracedGraph(tiny_trace.proto, weights)))


def test_values_beyond_the_range_fail_by_place(
    tiny_config: EncoderConfig, tiny_trace: TracedGraph, tmp_path: Path
) -> None:
    """All weights fit into fp16, but their product with a vector does not."""
    encoder = new_encoder(tiny_config, seed=0)
    up = encoder.get_parameter("layers.0.feed_forward.up.weight").data
    up.mul_(60_000 / up.abs().max())
    weights = dict(tiny_trace.weights)
    weights["layers.0.feed_forward.up.weight.T"] = up.numpy().T
    graph = embeddings_graph(TracedGraph(tiny_trace.proto, weights))
    (tmp_path / "onnx").mkdir()
    for name, each in (("model", graph), ("model_fp16", to_fp16(graph))):
        write_embedded(tmp_path / "onnx" / f"{name}.onnx", each.proto, each.weights)
    result = measure_fp16(Subject(tmp_path, References(encoder), tiny_config, "test", GRID), lambda *_: None)
    (first, *_) = result.failures()
    assert first.startswith("onnx/model_fp16.onnx: max fp16 value of last_hidden_state on ")
    assert first.endswith("(limit 65504): matmul_6 with layers.0.feed_forward.up.weight.T")
    assert not np.isfinite(result.figures()[0].max_fp16_value)


def test_graph_too_large_for_one_file_is_rejected(
    tiny_config: EncoderConfig, tiny_trace: TracedGraph, output: Path
) -> None:
    with pytest.raises(
        GraphError, match=r"the weights of model_fp16\.onnx have \d+ bytes, but a single file can contain"
    ):
        export_tiny(tiny_config, tiny_trace, output, max_embedded_bytes=30_000)
    assert not output.exists()


def test_fp16_graph_is_one_file_even_if_weights_are_separate(
    tiny_config: EncoderConfig, tiny_trace: TracedGraph, output: Path
) -> None:
    size_bytes = sum(array.nbytes for array in tiny_trace.weights.values())
    export_tiny(tiny_config, tiny_trace, output, max_embedded_bytes=size_bytes - 1)
    assert (output / "onnx" / "model.onnx_data").is_file()
    assert check_bundle(output, grid=GRID).verdict.passed


def test_lost_weights_are_counted() -> None:
    exact = np.array([1.0, 0.0, 1e-9, -1e-9, 5e-5, 0.5], np.float32)
    assert count_rounded([(exact, exact.astype(np.float16))]) == Fp16Weights(6, 2, 1)


def test_check_measures_it_again(fp16_bundle: Path) -> None:
    verdict = check_bundle(fp16_bundle, grid=GRID).verdict
    assert verdict.passed
    assert verdict.to_message().figures[-1] == read_manifest(fp16_bundle).parity.figures[-1]


def test_check_prints_it(fp16_bundle: Path) -> None:
    result = CliRunner().invoke(check, [str(fp16_bundle), "--parity-tokens", "2"])
    assert result.exit_code == 0, result.output
    assert "model_fp16.onnx" in result.stdout
    assert "max fp16 value of last_hidden_state" in result.stdout


def test_check_detects_a_different_file(copied: Path) -> None:
    path = copied / "onnx" / "model_fp16.onnx"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"model_fp16\.onnx was altered"):
        check_bundle(copied)


def test_check_detects_a_different_weight(copied: Path) -> None:
    path = copied / "onnx" / "model_fp16.onnx"
    model = onnx.load(path)
    tensor = next(each for each in model.graph.initializer if each.name == "layers.1.output_norm.bias")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(1e-3), tensor.name))
    path.write_bytes(model.SerializeToString())
    sign(copied)
    message = r"layers\.1\.output_norm\.bias differs from the weight in onnx/model\.onnx"
    with pytest.raises(GraphError, match=message):
        check_bundle(copied, grid=GRID)


def test_check_detects_a_different_computation(copied: Path) -> None:
    path = copied / "onnx" / "model_fp16.onnx"
    model = onnx.load(path)
    norm = [node for node in model.graph.node if node.op_type == "LayerNormalization"][2]
    norm.attribute.append(onnx.helper.make_attribute("epsilon", 0.5))
    del norm.attribute[0 : len(norm.attribute) - 1]
    norm.attribute.append(onnx.helper.make_attribute("axis", -1))
    path.write_bytes(model.SerializeToString())
    sign(copied)
    verdict = check_bundle(copied, grid=GRID).verdict
    assert not verdict.passed
    line = verdict.failures()[0]
    assert line.startswith("onnx/model_fp16.onnx: min cosine of last_hidden_state on ")
    assert " is 0.9" in line


def test_model_repository_has_it_under_its_own_name(fp16_bundle: Path) -> None:
    repository = write_layout(fp16_bundle, "triton", fp16_bundle.with_name("tiny-triton")).directory
    names = {path.name for path in repository.iterdir() if path.is_dir()}
    assert {"tiny", "tiny_attentions", "tiny_fp16"} <= names
    session = onnxruntime.InferenceSession(repository / "tiny_fp16" / "1" / "model.onnx")
    assert [each.name for each in session.get_outputs()] == ["last_hidden_state"]
