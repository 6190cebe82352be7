"""Model repositories: files located by the rules of each server, and their results."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf import text_format
from tokenizers import Tokenizer
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import triton_to_np_dtype

from attnlens.bundle import describe_file, read_manifest, verify_files, write_manifest
from attnlens.v1.manifest_pb2 import Activation, Graph, GraphOutput, Precision, ValueInfo
from attnlens.v1.tensor_pb2 import DataType
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.graph.trace import TracedGraph
from attnlens_export.layouts import write_layout
from attnlens_export.layouts.ovms import ovms_tree
from attnlens_export.layouts.served_model import ServedModel
from attnlens_export.layouts.triton import triton_tree
from attnlens_export.parity.grid import small_grid
from attnlens_model import EncoderConfig
from openvino_process import run_openvino
from references import TEXTS

# The models of a MiniLM repository and the graph that each must be.
MINILM_GRAPHS = {
    "all-MiniLM-L6-v2": "onnx/model.onnx",
    "all-MiniLM-L6-v2_attentions": "onnx/model_attentions.onnx",
}
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def feed(minilm_bundle: Path) -> Arrays:
    """Texts of many lengths, one of them empty, as one padded batch."""
    tokenizer = Tokenizer.from_file(str(minilm_bundle / "tokenizer.json"))
    tokenizer.enable_padding()
    batch = tokenizer.encode_batch(TEXTS)
    return {
        "input_ids": np.array([each.ids for each in batch]),
        "attention_mask": np.array([each.attention_mask for each in batch]),
        "token_type_ids": np.array([each.type_ids for each in batch]),
    }


def export_tiny(config: EncoderConfig, traced: TracedGraph, output: Path, **options: Any) -> Path:
    chosen = ExportOptions(name="tiny", grid=small_grid(40), tracer=lambda *_: traced, **options)
    export_bundle(config, output, chosen)
    return output


def run(path: Path, feed: Arrays) -> Arrays:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def model_names(repository: Path) -> set[str]:
    return {each.name for each in repository.iterdir() if each.is_dir()}


def read_config(path: Path) -> Any:
    return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())


def triton_model_file(repository: Path, name: str) -> Path:
    """The file that Triton opens, by its documentation: the latest version, then the default file name."""
    directory = repository / name
    versions = [each.name for each in directory.iterdir() if each.is_dir()]
    latest = max(int(each) for each in versions if each.isdecimal() and not each.startswith("0"))
    config = read_config(directory / "config.pbtxt")
    path = directory / str(latest) / str(config.default_model_filename or "model.onnx")
    return path / "model.onnx" if path.is_dir() else path


def ovms_model_file(repository: Path, config: dict[str, Any]) -> Path:
    """The file that OpenVINO Model Server opens: the first that ends in .onnx, in any order."""
    versions: list[Path] = list((repository / config["base_path"]).iterdir())
    [version] = [each for each in versions if each.name.isdecimal()]
    [path] = [each for each in version.iterdir() if each.name.endswith(".onnx")]
    assert not any(each.suffix in {".xml", ".bin", ".pb", ".tflite"} for each in version.iterdir())
    return path


def described_by_triton(values: Any) -> list[tuple[str, type, list[int]]]:
    return [
        (
            each.name,
            triton_to_np_dtype(model_config_pb2.DataType.Name(each.data_type).removeprefix("TYPE_")),
            list(each.dims),
        )
        for each in values
    ]


def described_by_onnx(values: Any) -> list[tuple[str, type, list[int]]]:
    return [
        (
            each.name,
            np.dtype(onnx.helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type)).type,
            [axis.dim_value or -1 for axis in each.type.tensor_type.shape.dim],
        )
        for each in values
    ]


def check_config(directory: Path, graph: onnx.GraphProto) -> None:
    config = read_config(directory / "config.pbtxt")
    assert (config.name, config.backend, config.max_batch_size) == (directory.name, "onnxruntime", 0)
    assert described_by_triton(config.input) == described_by_onnx(graph.input)
    assert described_by_triton(config.output) == described_by_onnx(graph.output)


@pytest.mark.parametrize("name", MINILM_GRAPHS)
def test_tritons_own_proto_reads_the_graph_out_of_the_config(
    name: str, triton: Path, minilm_bundle: Path
) -> None:
    graph = onnx.load(minilm_bundle / MINILM_GRAPHS[name], load_external_data=False).graph
    check_config(triton / name, graph)
    # Comments after the dims name the axes, in the order of the inputs, then the outputs.
    lines = (triton / name / "config.pbtxt").read_text(encoding="utf-8").splitlines()
    named = [line.partition("# ")[2] for line in lines if line.startswith("  dims")]
    assert named == [
        ", ".join(axis.dim_param or str(axis.dim_value) for axis in each.type.tensor_type.shape.dim)
        for each in [*graph.input, *graph.output]
    ]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("max_batch_size: 0", "max_batch_size: 8"),
        ("TYPE_INT64", "TYPE_INT32"),
        ("[ -1, -1, 384 ]", "[ -1, 384 ]"),
        ("[ -1, -1, 384 ]", "[ -1, -1, 383 ]"),
        ('"attention_mask"', '"mask"'),
        ("output {", "outputs {"),
        ("dims: [", "dims: ["[:-1]),
        ('name: "all-MiniLM-L6-v2"', 'name: "minilm"'),
    ],
)
def test_broken_config_does_not_pass(
    right: str, wrong: str, triton: Path, minilm_bundle: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "all-MiniLM-L6-v2"
    directory.mkdir()
    text = (triton / directory.name / "config.pbtxt").read_text(encoding="utf-8")
    assert right in text
    (directory / "config.pbtxt").write_text(text.replace(right, wrong, 1), encoding="utf-8")
    graph = onnx.load(minilm_bundle / "onnx" / "model.onnx", load_external_data=False).graph
    with pytest.raises((AssertionError, text_format.ParseError)):
        check_config(directory, graph)


def test_triton_finds_each_graph_and_gets_the_bundles_numbers(
    triton: Path, minilm_bundle: Path, feed: Arrays
) -> None:
    assert model_names(triton) == set(MINILM_GRAPHS)
    for name, graph in MINILM_GRAPHS.items():
        expected = run(minilm_bundle / graph, feed)
        outputs = run(triton_model_file(triton, name), feed)
        assert list(outputs) == list(expected)
        for output, array in outputs.items():
            np.testing.assert_array_equal(array, expected[output])


def test_openvino_finds_each_graph_and_gets_the_bundles_numbers(
    ovms: Path, minilm_bundle: Path, feed: Arrays
) -> None:
    configs = [
        each["config"] for each in json.loads((ovms / "config.json").read_bytes())["model_config_list"]
    ]
    assert {each["name"] for each in configs} == set(MINILM_GRAPHS)
    live = feed["attention_mask"].astype(bool)
    for config in configs:
        assert set(config) == {"name", "base_path", "plugin_config"}
        expected = run(minilm_bundle / MINILM_GRAPHS[config["name"]], feed)
        # The server adds the hint of latency to the plugin_config.
        options = config["plugin_config"] | {"PERFORMANCE_HINT": "LATENCY"}
        shapes, outputs = run_openvino(ovms_model_file(ovms, config), options, feed)
        assert list(outputs) == list(expected)
        assert set(shapes) == {"[?,?]"}
        for output, array in expected.items():
            difference = np.abs(outputs[output] - array)
            # Hidden states of padding are undefined.
            assert difference[live if output == "last_hidden_state" else ...].max() <= 1e-5


@pytest.mark.parametrize("layout", ["triton", "ovms"])
def test_linked_weights_are_stored_once(
    layout: str, minilm_bundle: Path, request: pytest.FixtureRequest
) -> None:
    repository: Path = request.getfixturevalue(layout)
    weights = (minilm_bundle / "onnx" / "model.onnx").stat().st_ino
    large = [each for each in repository.rglob("*") if each.is_file() and each.stat().st_size > 1_000_000]
    assert {each.name for each in large} == {"model.onnx", "model.onnx_data"}
    assert {each.stat().st_ino for each in large} == {weights}
    verify_files(minilm_bundle, read_manifest(minilm_bundle))


@pytest.mark.parametrize("layout", ["triton", "ovms"])
def test_repository_documents_steps_that_the_server_omits(
    layout: str, minilm_bundle: Path, request: pytest.FixtureRequest
) -> None:
    repository: Path = request.getfixturevalue(layout)
    for name, original in (("tokenizer.json", "tokenizer.json"), ("bundle.json", "manifest.json")):
        assert (repository / name).samefile(minilm_bundle / original)
    page = (repository / "README.md").read_text(encoding="utf-8")
    for words in (
        "truncates to 256",
        "with id 0",
        "more than 512",
        "mean pooling",
        "normalized to unit length",
    ):
        assert words in page


def test_dense_layers_and_prompts_are_reported(tiny_bundle: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    manifest = read_manifest(copied)
    (copied / "2_Dense").mkdir()
    weights = copied / "2_Dense" / "model.safetensors"
    weights.write_bytes(b"weights")
    manifest.files.append(describe_file(copied, weights))
    manifest.pooling.dense.add(path="2_Dense", activation=Activation.ACTIVATION_TANH, bias=True)
    manifest.pooling.exclude_prompt = True
    manifest.prompts["query"] = "query: "
    manifest.default_prompt_name = "query"
    write_manifest(copied, manifest)
    for layout in ("triton", "ovms"):
        repository = write_layout(copied, layout, tmp_path / layout, link=True).directory
        assert (repository / "2_Dense.safetensors").samefile(weights)
        assert model_names(repository) == {"tiny", "tiny_attentions"}
        page = (repository / "README.md").read_text(encoding="utf-8")
        assert (
            "mean pooling over its tokens except those of the prompt, "
            "then tanh(linear.weight x + linear.bias) with the weights of `2_Dense.safetensors`."
        ) in page
        assert (
            "Prepend one of `prompts` in `bundle.json` to each text. The default prompt is 'query: '." in page
        )


def test_documentation_shows_the_written_files(triton: Path, ovms: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "layouts.md").read_text(encoding="utf-8")
    for path in (triton / "all-MiniLM-L6-v2" / "config.pbtxt", ovms / "config.json"):
        assert path.read_text(encoding="utf-8") in page


def test_weights_in_a_separate_file_stay_there(
    tiny_config: EncoderConfig, tiny_trace: TracedGraph, tmp_path: Path
) -> None:
    large = export_tiny(tiny_config, tiny_trace, tmp_path / "large", max_embedded_bytes=0)
    summary = write_layout(large, "triton", tmp_path / "models", link=True)
    # Both graphs and their weights, and the manifest; both configurations and the page.
    assert (summary.num_linked, summary.num_copied, summary.num_written) == (5, 0, 3)
    ids = np.arange(10).reshape(2, 5)
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    for name, graph in {"tiny": "model.onnx", "tiny_attentions": "model_attentions.onnx"}.items():
        path = triton_model_file(summary.directory, name)
        assert path == summary.directory / name / "1" / "model.onnx" / "model.onnx"
        assert path.samefile(large / "onnx" / graph)
        for output, array in run(path, feed).items():
            np.testing.assert_array_equal(array, run(large / "onnx" / graph, feed)[output])
    assert "The bundle has no tokenizer." in (summary.directory / "README.md").read_text(encoding="utf-8")


def test_half_precision_is_a_separate_model() -> None:
    graph = Graph(
        path="onnx/model_fp16.onnx",
        precision=Precision.PRECISION_FP16,
        inputs=[ValueInfo(name="input_ids", data_type=DataType.DATA_TYPE_INT64, axes=["batch_size"])],
        outputs=[
            GraphOutput(
                value=ValueInfo(name="out", data_type=DataType.DATA_TYPE_FLOAT16, axes=["batch_size", "7"])
            )
        ],
    )
    model = ServedModel("m_fp16", graph, {"model.onnx": b""})
    content = triton_tree([model])["m_fp16/config.pbtxt"]
    assert isinstance(content, bytes)
    config = text_format.Parse(content.decode(), model_config_pb2.ModelConfig())
    assert config.output[0].data_type == model_config_pb2.TYPE_FP16
    assert list(config.output[0].dims) == [-1, 7]
    # KIND_GPU would keep a server without a GPU from starting, with every other model in it.
    assert not config.instance_group
    config_json = ovms_tree([model])["config.json"]
    assert isinstance(config_json, bytes)
    assert json.loads(config_json) == {
        "model_config_list": [{"config": {"name": "m_fp16", "base_path": "m_fp16"}}]
    }
