"""Checking a bundle: hashes, graphs, parity without and with the checkpoint."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from attnlens.bundle import BundleError, describe_file, read_manifest, write_manifest
from attnlens_export import ExportOptions, GraphError, LintError, SourceError, bundle, export_bundle
from attnlens_export.check import check_bundle, rebuild_encoder
from attnlens_export.graph import TracedGraph
from attnlens_export.grid import small_grid
from attnlens_model import Encoder, EncoderConfig, load_checkpoint

GRID = small_grid(40)


@pytest.fixture(scope="module")
def tiny_bundle(
    tiny_config: EncoderConfig, tiny_trace: TracedGraph, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    directory = tmp_path_factory.mktemp("check") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "trace", lambda _encoder, _config: tiny_trace)
        export_bundle(tiny_config, directory, ExportOptions(grid=GRID))
    return directory


@pytest.fixture
def copied(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))


def sign(directory: Path) -> None:
    """Write the hashes anew, as somebody would who alters a bundle on purpose."""
    manifest = read_manifest(directory)
    paths = [directory / file.path for file in manifest.files]
    del manifest.files[:]
    manifest.files.extend(describe_file(directory, path) for path in paths)
    write_manifest(directory, manifest)


def change_graph(path: Path, index: int, amount: float) -> None:
    model = onnx.load(path)
    tensor = model.graph.initializer[index]
    values = np.frombuffer(tensor.raw_data, np.float32).copy()
    values[0] += amount
    tensor.raw_data = values.tobytes()
    path.write_bytes(model.SerializeToString())


def test_a_fresh_bundle_passes_against_its_own_weights(tiny_bundle: Path) -> None:
    stages = []
    summary = check_bundle(tiny_bundle, grid=GRID, progress=lambda stage, _done, _total: stages.append(stage))
    assert summary.parity.passed
    assert summary.parity.reference_name == "the weights inside the bundle"
    assert stages[0] == "Comparing the hashes"
    recorded, found = summary.manifest.parity.figures, summary.parity.to_message().figures
    assert [each.max_abs_error for each in found] == [each.max_abs_error for each in recorded]


def test_the_encoder_is_rebuilt_bit_for_bit(
    tiny_bundle: Path, tiny_encoder: Encoder, tiny_config: EncoderConfig
) -> None:
    rebuilt = rebuild_encoder(tiny_bundle / "onnx" / "model.onnx", tiny_config).state_dict()
    assert rebuilt.keys() == tiny_encoder.state_dict().keys()
    assert all(parameter.equal(rebuilt[name]) for name, parameter in tiny_encoder.state_dict().items())


def test_another_file_is_refused_by_its_hash(copied: Path) -> None:
    (copied / "config.json").write_bytes((copied / "config.json").read_bytes() + b" ")
    with pytest.raises(BundleError, match=r"config\.json was altered"):
        check_bundle(copied)


def test_an_altered_weight_is_refused_by_its_hash(copied: Path) -> None:
    path = copied / "onnx" / "model.onnx"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"model\.onnx was altered: its SHA-256"):
        check_bundle(copied)


def test_graphs_that_disagree_fail_parity(copied: Path) -> None:
    """The attention graph gets a weight of its own; the reference has that of the other graph."""
    path = copied / "onnx" / "model_attentions.onnx"
    change_graph(path, 0, 1.0)
    sign(copied)
    parity = check_bundle(copied, grid=GRID).parity
    assert not parity.passed
    assert {each.graph for each in parity.measurements if not each.passed} == {"onnx/model_attentions.onnx"}


def test_a_missing_parameter_is_named(copied: Path) -> None:
    path = copied / "onnx" / "model.onnx"
    model = onnx.load(path)
    tensor = next(each for each in model.graph.initializer if each.name == "layers.1.output_norm.bias")
    tensor.name = "renamed"
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == "layers.1.output_norm.bias":
                node.input[index] = "renamed"
    path.write_bytes(model.SerializeToString())
    sign(copied)
    with pytest.raises(GraphError, match=r"layers\.1\.output_norm\.bias|not valid ONNX"):
        check_bundle(copied)


def test_a_graph_that_is_not_portable_is_refused(copied: Path) -> None:
    path = copied / "onnx" / "model.onnx"
    model = onnx.load(path)
    model.ir_version = 9
    path.write_bytes(model.SerializeToString())
    sign(copied)
    with pytest.raises(LintError, match=r"onnx/model\.onnx .*IR version 9"):
        check_bundle(copied)


def test_an_invalid_graph_is_refused(copied: Path) -> None:
    (copied / "onnx" / "model_attentions.onnx").write_bytes(b"not ONNX")
    sign(copied)
    with pytest.raises(GraphError, match=r"model_attentions\.onnx is not valid ONNX"):
        check_bundle(copied)


def test_minilm_passes_against_its_checkpoint(minilm_bundle: Path, minilm_dir: Path) -> None:
    parity = check_bundle(minilm_bundle, minilm_dir, grid=small_grid(512)).parity
    assert parity.passed
    assert parity.reference_name == "the checkpoint model"


def test_a_checkpoint_with_other_weights_fails(
    minilm_bundle: Path, minilm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = load_checkpoint(minilm_dir)
    parameters = dict(checkpoint.encoder.named_parameters())
    parameters["layers.5.feed_forward.down.bias"].data[7] += 1e-3
    monkeypatch.setattr("attnlens_export.check.load_checkpoint", lambda _source, _revision: checkpoint)
    parity = check_bundle(minilm_bundle, minilm_dir, grid=small_grid(512)).parity
    assert not parity.passed
    assert "last_hidden_state" in parity.failures()[0]


def test_a_checkpoint_of_another_size_is_refused(tiny_bundle: Path, minilm_dir: Path) -> None:
    with pytest.raises(SourceError, match="is another encoder"):
        check_bundle(tiny_bundle, minilm_dir)
