"""Bundles of classifiers: graphs compared with `transformers`, manifest, files, and the check."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import onnxruntime
import pytest
import safetensors.numpy
import torch

from attnlens.bundle import describe_file, read_manifest, write_manifest
from attnlens.v1.manifest_pb2 import Activation, GraphPurpose, OutputRole
from attnlens_export import ExportOptions, SourceError, export_bundle
from attnlens_export.check import check_bundle
from attnlens_export.parity.grid import small_grid
from attnlens_export.published.classifier import has_head
from family_cases import EXPORTED
from odd_models import OddModel, padded_masks, random_inputs

KIND = "ForSequenceClassification"
NUM_LABELS = 3
# One for each pooling, and one with a layer normalization in its head.
MODELS: dict[str, dict[str, Any]] = {
    "roberta": {},
    "modernbert": {"classifier_pooling": "mean", "classifier_bias": True},
    "mistral": {"pad_token_id": 0},
}


class Exported:
    """A bundle and the model that it was made from."""

    def __init__(self, odd: OddModel, directory: Path) -> None:
        self.source, self.bundle = directory / "source", directory / "bundle"
        self.model: Any = odd.make(KIND)
        self.model.save_pretrained(self.source)
        self.grid = small_grid(odd.num_tokens)
        self.summary = export_bundle(self.source, self.bundle, ExportOptions(grid=self.grid))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    made: dict[str, Exported] = {}

    def get(family: str) -> Exported:
        if family not in made:
            odd = EXPORTED[family]
            odd = replace(odd, changes=odd.changes | {"num_labels": NUM_LABELS} | MODELS[family])
            made[family] = Exported(odd, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.mark.parametrize("family", MODELS)
def test_logits_equal_those_of_transformers(family: str, exported: Callable[[str], Exported]) -> None:
    made = exported(family)
    session = onnxruntime.InferenceSession(made.bundle / "onnx" / "model.onnx")
    assert [output.name for output in session.get_outputs()] == ["logits"]
    whole, right, left, _ = padded_masks(3, 12)
    for mask in (whole, right):
        inputs = random_inputs(made.model.config, mask)
        with torch.no_grad():
            expected = made.model(**inputs).logits.numpy()
        feed = {name: tensor.numpy() for name, tensor in inputs.items()}
        (found,) = session.run(None, feed)
        assert abs(found - expected).max() < 1e-5 * max(1.0, abs(expected).max())
    # On the left, transformers would pool padding or shift positions: compare with the text alone.
    inputs = random_inputs(made.model.config, left)
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    for row, live in enumerate(left.numpy() == 1):
        feed = {name: tensor.numpy()[row : row + 1, live] for name, tensor in inputs.items()}
        (alone,) = session.run(None, feed)
        assert abs(found[row] - alone[0]).max() < 2e-5 * max(1.0, abs(alone).max())


@pytest.mark.parametrize("family", MODELS)
def test_manifest_describes_the_head(family: str, exported: Callable[[str], Exported]) -> None:
    made = exported(family)
    manifest = read_manifest(made.bundle)
    assert list(manifest.required_features) == ["classifier"]
    assert list(manifest.classifier.labels) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert manifest.classifier.activation == Activation.ACTIVATION_SOFTMAX
    assert manifest.pooling.dense[-1].out_features == NUM_LABELS
    graphs = {graph.id: graph for graph in manifest.graphs}
    assert list(graphs) == ["embeddings", "attention", "logits", "contributions"]
    assert graphs["logits"].purpose == GraphPurpose.GRAPH_PURPOSE_LOGITS
    assert [output.role for output in graphs["logits"].outputs] == [OutputRole.OUTPUT_ROLE_LOGITS]
    assert graphs["embeddings"].path == "onnx/model_encoder.onnx"
    assert {gate.graph for gate in manifest.parity.gates} <= graphs.keys()
    [figure] = [figure for figure in manifest.parity.figures if figure.graph == "logits"]
    assert 0 < figure.max_abs_error < 1e-4
    assert made.summary.verdict.passed


def test_check_compares_the_logits(exported: Callable[[str], Exported]) -> None:
    made = exported("roberta")
    summary = check_bundle(made.bundle, made.source, grid=made.grid)
    assert summary.verdict.passed
    assert summary.verdict.logits is not None
    assert summary.verdict.logits.comparisons


def test_check_finds_a_head_with_other_weights(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    made = exported("roberta")
    bundle = tmp_path / "bundle"
    copytree(made.bundle, bundle)
    path = bundle / "classifier" / "1" / "model.safetensors"
    weights = safetensors.numpy.load_file(path)
    weights["linear.bias"][0] += 0.01
    path.write_bytes(safetensors.numpy.save(weights))
    _restate(bundle, path)
    verdict = check_bundle(bundle, grid=made.grid).verdict
    assert "max abs error of logits on " in verdict.failures()[0]


def _restate(bundle: Path, path: Path) -> None:
    manifest = read_manifest(bundle)
    [entry] = [entry for entry in manifest.files if entry.path == path.relative_to(bundle).as_posix()]
    entry.CopyFrom(describe_file(bundle, path))
    write_manifest(bundle, manifest)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "mean"}, "--pooling does not apply to a classifier"),
        ({"normalize": True}, "--normalize does not apply to a classifier"),
    ],
)
def test_options_of_embeddings_are_refused(
    exported: Callable[[str], Exported], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        export_bundle(exported("roberta").source, tmp_path / "bundle", ExportOptions(**options))


def test_without_head_only_the_encoder_is_exported(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    made = exported("roberta")
    options = ExportOptions(without_head=True, pooling="cls", grid=made.grid)
    manifest = export_bundle(made.source, tmp_path / "bundle", options).manifest
    assert not has_head(tmp_path / "bundle")
    assert not manifest.HasField("classifier")
    assert not manifest.required_features


def test_bundle_of_a_reranker_names_its_activation_for_other_tools(tmp_path: Path) -> None:
    odd = EXPORTED["roberta"]
    made = Exported(replace(odd, changes=odd.changes | {"num_labels": 1}), tmp_path)
    config = json.loads((made.bundle / "config.json").read_text())
    assert config["architectures"] == ["RobertaForSequenceClassification"]
    assert config["sentence_transformers"] == {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
    assert config["id2label"] == {"0": "LABEL_0"}
    assert "scores are the sigmoid of the logits" in " ".join(made.summary.decisions)
