"""Model repositories: the files that a server would open, found by its own rules, and what they compute."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
from google.protobuf import text_format
from tokenizers import Tokenizer
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import triton_to_np_dtype

from attnlens.bundle import BundleError, describe_file, read_manifest, verify_files, write_manifest
from attnlens.v1.manifest_pb2 import Activation, Graph, Manifest, ValueInfo
from attnlens.v1.tensor_pb2 import DataType
from attnlens_export import ExportOptions, OutputError, SourceError, export_bundle
from attnlens_export.graph.trace import TracedGraph
from attnlens_export.layouts import write_layout
from attnlens_export.layouts.ovms import ovms_tree
from attnlens_export.layouts.served_model import ServedModel, model_name
from attnlens_export.layouts.triton import triton_tree
from attnlens_export.parity.grid import small_grid
from attnlens_model import EncoderConfig
from references import TEXTS

# The models of a MiniLM repository and the graph that each must be.
MINILM_GRAPHS = {
    "all-MiniLM-L6-v2": "onnx/model.onnx",
    "all-MiniLM-L6-v2_attentions": "onnx/model_attentions.onnx",
}
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def triton(minilm_bundle: Path) -> Path:
    # Beside the bundle: hard links need one file system.
    return write_layout(
        minilm_bundle, "triton", minilm_bundle.with_name("minilm-triton"), link=True
    ).directory


@pytest.fixture(scope="module")
def ovms(minilm_bundle: Path) -> Path:
    return write_layout(minilm_bundle, "ovms", minilm_bundle.with_name("minilm-ovms"), link=True).directory


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


@pytest.fixture(scope="module")
def tiny_bundle(
    tiny_config: EncoderConfig, tiny_trace: TracedGraph, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return export_tiny(tiny_config, tiny_trace, tmp_path_factory.mktemp("bundles") / "tiny")


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
    # The names of the axes stand behind the dims, in the order of the inputs, then the outputs.
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
def test_a_broken_config_does_not_pass(
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
        compiled = openvino.compile_model(ovms_model_file(ovms, config), "CPU", options)
        assert [each.get_any_name() for each in compiled.outputs] == list(expected)
        assert {str(each.partial_shape) for each in compiled.inputs} == {"[?,?]"}
        outputs = compiled(feed)
        for output, array in expected.items():
            difference = np.abs(outputs[output] - array)
            # What the hidden states of padding are has no meaning.
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
def test_the_repository_says_what_the_server_does_not(
    layout: str, minilm_bundle: Path, request: pytest.FixtureRequest
) -> None:
    repository: Path = request.getfixturevalue(layout)
    for name, original in (("tokenizer.json", "tokenizer.json"), ("bundle.json", "manifest.json")):
        assert (repository / name).samefile(minilm_bundle / original)
    page = (repository / "README.md").read_text(encoding="utf-8")
    for words in ("cuts at 256", "with id 0", "More than 512", "mean pooling", "scaled to length 1"):
        assert words in page


def test_dense_layers_and_prompts_are_said(tiny_bundle: Path, tmp_path: Path) -> None:
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
            "mean pooling over its tokens without those of a prompt, "
            "then tanh(linear.weight x + linear.bias) with the weights of `2_Dense.safetensors`."
        ) in page
        assert "a text, 'query: ' unless another is wanted, is one of `prompts` in `bundle.json`" in page


def test_the_documentation_shows_what_is_written(triton: Path, ovms: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "layouts.md").read_text(encoding="utf-8")
    for path in (triton / "all-MiniLM-L6-v2" / "config.pbtxt", ovms / "config.json"):
        assert path.read_text(encoding="utf-8") in page


def test_weights_in_a_file_of_their_own_stay_there(
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


def test_half_precision_is_a_model_of_its_own() -> None:
    graph = Graph(
        path="onnx/model_fp16.onnx",
        data_type=DataType.DATA_TYPE_FLOAT16,
        inputs=[ValueInfo(name="input_ids", data_type=DataType.DATA_TYPE_INT64, axes=["batch_size"])],
        outputs=[ValueInfo(name="out", data_type=DataType.DATA_TYPE_FLOAT16, axes=["batch_size", "7"])],
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


def test_what_can_not_be_linked_is_copied(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, str(target))

    monkeypatch.setattr(os, "link", refuse)
    summary = write_layout(tiny_bundle, "ovms", tmp_path / "models", link=True)
    assert (summary.num_linked, summary.num_copied) == (0, 3)
    copied = summary.directory / "tiny" / "1" / "model.onnx"
    assert copied.read_bytes() == (tiny_bundle / "onnx" / "model.onnx").read_bytes()
    assert copied.stat().st_nlink == 1


def test_a_layout_leaves_the_bundle_as_it_was_for_pythons_onnx(tiny_bundle: Path, tmp_path: Path) -> None:
    """It refuses weights that have a second hard link, those of the bundle included."""
    copied = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    attentions = copied / "onnx" / "model_attentions.onnx"
    summary = write_layout(copied, "ovms", tmp_path / "models")
    assert (summary.num_linked, summary.num_copied) == (0, 3)
    onnx.checker.check_model(attentions)
    onnx.load(attentions)
    onnx.load(summary.directory / "tiny_attentions" / "1" / "model.onnx")
    assert "hard links" not in (summary.directory / "README.md").read_text("utf-8")
    linked = write_layout(copied, "ovms", tmp_path / "linked", link=True)
    assert (linked.num_linked, linked.num_copied) == (3, 0)
    with pytest.raises(onnx.checker.ValidationError, match="hard link"):
        onnx.load(attentions)
    assert "Files may be hard links to the\nbundle's" in (linked.directory / "README.md").read_text("utf-8")


def test_a_full_disk_is_an_error_of_the_output(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source, None, str(target))

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OutputError, match=r"models can't be written: No space left"):
        write_layout(tiny_bundle, "triton", tmp_path / "models")
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_bundle_is_followed(tiny_bundle: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    shutil.copytree(tiny_bundle, linked)
    graph = linked / "onnx" / "model.onnx"
    graph.rename(tmp_path / "blob")
    graph.symlink_to("../../blob")
    repository = write_layout(linked, "ovms", tmp_path / "models", link=True).directory
    assert not (repository / "tiny" / "1" / "model.onnx").is_symlink()
    assert (repository / "tiny" / "1" / "model.onnx").samefile(tmp_path / "blob")


def test_an_interruption_leaves_nothing(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_source: str, target: Path) -> None:
        assert target.parent.is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_layout(tiny_bundle, "triton", tmp_path / "models", link=True)
    assert list(tmp_path.iterdir()) == []


def test_only_a_model_repository_is_replaced_and_only_with_force(tiny_bundle: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_layout(tiny_bundle, "triton", models)
    with pytest.raises(OutputError, match=r"models exists: .* replace it with --force"):
        write_layout(tiny_bundle, "ovms", models)
    write_layout(tiny_bundle, "ovms", models, force=True)
    assert (models / "config.json").exists()
    assert not list(models.rglob("config.pbtxt"))

    other = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, other)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for path in (other, tmp_path / "mine"):
        with pytest.raises(OutputError, match="exists and is no model repository made by attnlens"):
            write_layout(tiny_bundle, "triton", path, force=True)
    assert read_manifest(other).model_name == "tiny"
    # Nor does an export take a model repository for a bundle.
    with pytest.raises(OutputError, match="exists and is no bundle"):
        export_bundle("nothing", models, ExportOptions(force=True))


@pytest.mark.parametrize("place", [".", "models", ".."])
def test_a_repository_is_no_part_of_the_bundle(place: str, tiny_bundle: Path) -> None:
    before = sorted(tiny_bundle.rglob("*"))
    with pytest.raises(OutputError, match="overlap: choose a directory beside the bundle"):
        write_layout(tiny_bundle, "triton", tiny_bundle / place, force=True)
    assert sorted(tiny_bundle.rglob("*")) == before


@pytest.fixture
def damaged(tiny_bundle: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "damaged"
    shutil.copytree(tiny_bundle, copy)
    return copy


def test_an_altered_bundle_is_refused(damaged: Path, tmp_path: Path) -> None:
    with (damaged / "onnx" / "model.onnx").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        [last] = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with pytest.raises(BundleError, match=r"model\.onnx was altered"):
        write_layout(damaged, "triton", tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_a_bundle_that_failed_parity_is_refused(damaged: Path, tmp_path: Path) -> None:
    manifest = read_manifest(damaged)
    manifest.parity.passed = False
    write_manifest(damaged, manifest)
    with pytest.raises(SourceError, match="failed parity"):
        write_layout(damaged, "triton", tmp_path / "models")


def test_a_bundle_whose_pooling_is_unknown_is_refused(damaged: Path, tmp_path: Path) -> None:
    """As one of a later version is, whose README would tell clients nothing of use."""
    path = damaged / "manifest.json"
    text = path.read_text("utf-8")
    assert "POOLING_MEAN" in text
    path.write_text(text.replace("POOLING_MEAN", "POOLING_OF_LATER"), "utf-8")
    with pytest.raises(SourceError, match="states no pooling that this version knows"):
        write_layout(damaged, "triton", tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_weights_that_the_manifest_does_not_list_are_refused(damaged: Path, tmp_path: Path) -> None:
    """They have no hash; a path that leads out of the bundle is one of them."""
    graph = damaged / "onnx" / "model_attentions.onnx"
    proto = onnx.load(graph, load_external_data=False)
    for tensor in proto.graph.initializer:
        for pair in tensor.external_data:
            if pair.key == "location":
                pair.value = "weights"
    graph.write_bytes(proto.SerializeToString())
    (damaged / "onnx" / "weights").symlink_to("model.onnx")
    manifest = read_manifest(damaged)
    [entry] = [each for each in manifest.files if each.path == "onnx/model_attentions.onnx"]
    entry.CopyFrom(describe_file(damaged, graph))
    write_manifest(damaged, manifest)
    with pytest.raises(SourceError, match=r"not in one file of the manifest.*weights"):
        write_layout(damaged, "triton", tmp_path / "models")


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("all-MiniLM-L6-v2", "all-MiniLM-L6-v2"),
        ("my[/v2]", "my_v2"),
        ("../up", "up"),
        (".hidden", "hidden"),
        ("Größe 2", "Gr_e_2"),
        ('a"b', "a_b"),
    ],
)
def test_a_name_becomes_one_that_servers_take(name: str, served: str) -> None:
    assert model_name(Manifest(model_name=name)) == served


def test_a_name_without_a_letter_is_refused() -> None:
    with pytest.raises(SourceError, match="export it again with another --name"):
        model_name(Manifest(model_name="模型"))
