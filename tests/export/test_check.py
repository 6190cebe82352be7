"""Checking a bundle: hashes, graphs, parity without and with the checkpoint."""

import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from attnlens.bundle import BundleError, read_manifest, write_manifest
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export import ExportOptions, GraphError, LintError, SourceError, export_bundle
from attnlens_export.check import check_bundle
from attnlens_export.contents import check_graphs
from attnlens_export.graph.parameters import rebuild_encoder
from attnlens_export.graph.trace import TracedGraph
from attnlens_export.layouts import write_layout
from attnlens_export.parity.grid import Case, Padding, small_grid
from attnlens_model import Checkpoint, Encoder, EncoderConfig, StagedCheckpoint, read_config
from small_files import sign

GRID = small_grid(40)


@pytest.fixture(scope="module")
def tiny_bundle(
    tiny_config: EncoderConfig, tiny_trace: TracedGraph, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    directory = tmp_path_factory.mktemp("check") / "tiny"
    export_bundle(tiny_config, directory, ExportOptions(grid=GRID, tracer=lambda *_: tiny_trace))
    return directory


@pytest.fixture
def copied(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))


def change_graph(path: Path, name: str, amount: float, index: int = 0) -> None:
    """Change one number, in a file that then holds its weights itself."""
    model = onnx.load(path)
    tensor = next(each for each in model.graph.initializer if each.name == name)
    values = np.frombuffer(tensor.raw_data, np.float32).copy()
    values[index] += amount
    tensor.raw_data = values.tobytes()
    path.write_bytes(model.SerializeToString())


def test_fresh_bundle_passes_against_its_own_weights(tiny_bundle: Path) -> None:
    stages = []
    summary = check_bundle(tiny_bundle, grid=GRID, progress=lambda stage, *_: stages.append(stage))
    assert summary.verdict.passed
    assert summary.verdict.parity.reference == "PyTorch (the weights inside the bundle)"
    assert stages[0] == "Comparing the hashes"
    recorded, found = summary.manifest.parity.figures, summary.verdict.to_message().figures
    assert [each.max_abs_error for each in found] == [each.max_abs_error for each in recorded]


def test_bundle_of_which_a_layout_has_hard_links_passes(copied: Path, tmp_path: Path) -> None:
    write_layout(copied, "ovms", tmp_path / "models", link=True)
    assert (copied / "onnx" / "model.onnx").stat().st_nlink > 1
    assert check_bundle(copied, grid=GRID).verdict.passed


def test_bundle_of_links_passes_although_onnx_runtime_rejects_its_files(copied: Path, tmp_path: Path) -> None:
    """ONNX Runtime follows a link of the weights only where the graph is a link to the same place."""
    cache = tmp_path / "cache"
    cache.mkdir()
    graphs = [
        copied / "onnx" / name for name in ("model_attentions.onnx", "model_contributions.onnx", "model.onnx")
    ]
    for graph in graphs:
        graph.rename(cache / graph.stem)
        graph.symlink_to(cache / graph.stem)
    assert check_bundle(copied, grid=GRID).verdict.passed
    graphs[0].unlink()
    shutil.copyfile(cache / graphs[0].stem, graphs[0])
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail, match="escapes model directory"):
        onnxruntime.InferenceSession(graphs[0])
    assert check_bundle(copied, grid=GRID).verdict.passed
    whole = shutil.copytree(copied, tmp_path / "whole")  # follows links, too
    assert check_bundle(whole, grid=GRID).verdict.passed


def test_encoder_is_rebuilt_bit_for_bit(
    tiny_bundle: Path, tiny_encoder: Encoder, tiny_config: EncoderConfig
) -> None:
    rebuilt = rebuild_encoder(tiny_bundle / "onnx" / "model.onnx", tiny_config).state_dict()
    assert rebuilt.keys() == tiny_encoder.state_dict().keys()
    assert all(parameter.equal(rebuilt[name]) for name, parameter in tiny_encoder.state_dict().items())


def test_another_file_is_rejected_by_its_hash(copied: Path) -> None:
    (copied / "config.json").write_bytes((copied / "config.json").read_bytes() + b" ")
    with pytest.raises(BundleError, match=r"config\.json was altered"):
        check_bundle(copied)


def test_altered_weight_is_rejected_by_its_hash(copied: Path) -> None:
    path = copied / "onnx" / "model.onnx"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"model\.onnx was altered: its SHA-256"):
        check_bundle(copied)


def test_graphs_with_different_weights_are_rejected_by_name(copied: Path) -> None:
    """The attention graph gets a weight of its own."""
    path = copied / "onnx" / "model_attentions.onnx"
    change_graph(path, "layers.1.output_norm.bias", 1.0)
    sign(copied)
    message = r"model_attentions\.onnx: layers\.1\.output_norm\.bias\[0\] is 1, 0 in the weights inside"
    with pytest.raises(GraphError, match=message):
        check_bundle(copied, grid=GRID)


def test_graph_that_computes_something_else_fails_parity(copied: Path) -> None:
    path = copied / "onnx" / "model_attentions.onnx"
    model = onnx.load(path, load_external_data=False)
    norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    next(each for each in norms[-1].attribute if each.name == "epsilon").f = 0.1
    path.write_bytes(model.SerializeToString())
    sign(copied)
    verdict = check_bundle(copied, grid=GRID).verdict
    assert not verdict.passed
    failed = {each.graph for each in verdict.parity.comparisons if not each.passed}
    assert failed == {"onnx/model_attentions.onnx"}


def rename_weight(path: Path, old: str, new: str) -> None:
    model = onnx.load(path)
    next(each for each in model.graph.initializer if each.name == old).name = new
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
    path.write_bytes(model.SerializeToString())


def test_missing_parameter_is_named(copied: Path) -> None:
    rename_weight(copied / "onnx" / "model.onnx", "layers.1.output_norm.bias", "renamed")
    sign(copied)
    message = r"contains no weight for the parameter layers\.1\.output_norm\.bias"
    with pytest.raises(GraphError, match=message):
        check_bundle(copied)


def test_parameter_of_another_shape_is_named(copied: Path) -> None:
    path = copied / "onnx" / "model.onnx"
    rename_weight(path, "layers.1.output_norm.bias", "aside")
    rename_weight(path, "layers.1.feed_forward.up.bias", "layers.1.output_norm.bias")
    rename_weight(path, "aside", "layers.1.feed_forward.up.bias")
    sign(copied)
    message = r"layers\.1\.feed_forward\.up\.bias has the shape \(48,\) instead of \(56,\)"
    with pytest.raises(GraphError, match=message):
        check_bundle(copied)


def test_non_finite_weight_is_named(copied: Path) -> None:
    change_graph(copied / "onnx" / "model.onnx", "layers.1.output_norm.bias", np.nan)
    sign(copied)
    with pytest.raises(GraphError, match=r"layers\.1\.output_norm\.bias contains NaN"):
        check_bundle(copied)


def change_manifest(directory: Path, change: Callable[[Manifest], object]) -> None:
    manifest = read_manifest(directory)
    change(manifest)
    write_manifest(directory, manifest)


FALSE_CLAIMS: dict[str, tuple[Callable[[Manifest], object], str]] = {
    "heads": (
        lambda manifest: setattr(manifest.architecture, "num_heads", 7),
        "architecture.num_heads is 7, but 4 according to the files",
    ),
    "pooling": (
        lambda manifest: setattr(manifest.pooling, "normalize", True),
        "pooling.normalize is True, but False according to the files",
    ),
    "limit": (
        lambda manifest: setattr(manifest, "max_tokens", 41),
        "max_tokens is 41, but 40 according to the files",
    ),
    "output": (
        lambda manifest: setattr(manifest.graphs[1].outputs[2].value, "name", "attentions.7"),
        "graphs.1.outputs.2.value.name is 'attentions.7', but 'attentions.1' according to the files",
    ),
    "graph": (lambda manifest: manifest.graphs.pop(), "graphs has 2 entries, but 3 according to the files"),
    "file": (lambda manifest: manifest.files.pop(), "sentence_bert_config.json is not in the manifest"),
}


@pytest.mark.parametrize(("change", "message"), FALSE_CLAIMS.values(), ids=FALSE_CLAIMS.keys())
def test_manifest_that_contradicts_the_files_is_rejected(
    change: Callable[[Manifest], object], message: str, copied: Path
) -> None:
    change_manifest(copied, change)
    with pytest.raises(BundleError, match=re.escape(message)):
        check_bundle(copied, grid=GRID)


def test_unlisted_file_is_rejected(copied: Path) -> None:
    (copied / "onnx" / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BundleError, match=r"onnx/manifest\.json is not in the manifest"):
        check_bundle(copied, grid=GRID)


def test_files_of_file_managers_and_hubs_are_ignored(copied: Path) -> None:
    """As a server doesn't mind them."""
    for name in (
        *(".DS_Store", "onnx/.DS_Store", "onnx/._model.onnx", ".gitattributes", ".git/HEAD", "README.md"),
        *(".git/lfs/objects/model.onnx", ".cache/huggingface/download/onnx/model.onnx.metadata"),
    ):
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        (copied / name).write_text("left by others", encoding="utf-8")
    assert check_bundle(copied, grid=GRID).verdict.passed


@pytest.mark.parametrize(
    "name",
    [
        *("tokenizer.json", "onnx/model_int4.onnx", "onnx/model.onnx_data", "model.safetensors"),
        *("pytorch_model.bin", "2_Dense/config.json", "onnx/README.md", "modeling.py", ".env"),
    ],
)
def test_files_that_tools_would_load_must_be_listed(name: str, copied: Path) -> None:
    (copied / name).parent.mkdir(exist_ok=True)
    (copied / name).write_text("{}", encoding="utf-8")
    with pytest.raises(BundleError, match=re.escape(f"{name} is not in the manifest: remove it")):
        check_bundle(copied, grid=GRID)


def test_weights_in_a_file_without_a_hash_are_rejected(copied: Path) -> None:
    """Under a name that is not minded otherwise."""
    path = copied / "onnx" / "model_attentions.onnx"
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location=".DS_Store", size_threshold=1024)
    sign(copied)
    manifest = read_manifest(copied)
    [unlisted] = [file for file in manifest.files if file.path == "onnx/.DS_Store"]
    manifest.files.remove(unlisted)
    write_manifest(copied, manifest)
    check_graphs(copied, read_config(copied / "config.json"))  # nothing else is wrong with it
    message = r"model_attentions\.onnx has weights in .*\.DS_Store, but the manifest has no hash of this file"
    with pytest.raises(BundleError, match=message):
        check_bundle(copied, grid=GRID)


def test_graph_that_is_not_portable_is_rejected(copied: Path) -> None:
    path = copied / "onnx" / "model.onnx"
    model = onnx.load(path)
    model.ir_version = 9
    path.write_bytes(model.SerializeToString())
    sign(copied)
    with pytest.raises(LintError, match=r"onnx/model\.onnx .*IR version 9"):
        check_bundle(copied)


def test_invalid_graph_is_rejected(copied: Path) -> None:
    (copied / "onnx" / "model_attentions.onnx").write_bytes(b"not ONNX")
    sign(copied)
    with pytest.raises(GraphError, match=r"model_attentions\.onnx is not valid ONNX"):
        check_bundle(copied)


def test_minilm_passes_against_its_checkpoint(minilm_bundle: Path, minilm_dir: Path) -> None:
    verdict = check_bundle(minilm_bundle, minilm_dir, grid=small_grid(512)).verdict
    assert verdict.passed
    assert verdict.parity.reference == "PyTorch (the checkpoint model)"


@pytest.mark.parametrize("graph", ["model.onnx", "model_attentions.onnx"])
def test_unused_weight_must_match_the_checkpoint(
    graph: str,
    copied: Path,
    tiny_encoder: Encoder,
    tiny_config: EncoderConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last row of the token table, on a grid that holds no such token; in either graph."""
    change_graph(copied / "onnx" / graph, "embeddings.token.weight", 0.5, index=-1)
    sign(copied)
    checkpoint = Checkpoint(tiny_encoder, tiny_config, copied, "tiny", ())
    staged = StagedCheckpoint(copied, copied, "tiny", "", ())
    monkeypatch.setattr("attnlens_export.check.open_checkpoint", lambda *_: nullcontext(staged))
    monkeypatch.setattr("attnlens_export.check.load_checkpoint", lambda *_args, **_options: checkpoint)
    message = rf"{re.escape(graph)}: embeddings\.token\.weight\[100, 47\] is .* in the checkpoint tiny"
    with pytest.raises(GraphError, match=message):
        check_bundle(copied, "tiny", grid=[Case(1, 1, Padding.NONE)])


def test_checkpoint_of_another_size_is_rejected(tiny_bundle: Path, minilm_dir: Path) -> None:
    with pytest.raises(SourceError, match="but that of the bundle is"):
        check_bundle(tiny_bundle, minilm_dir)
