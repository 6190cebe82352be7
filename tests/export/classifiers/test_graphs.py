"""Logits graphs of every family, compared with `transformers`."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

from attnlens import pooling
from attnlens.v1.manifest_pb2 import Pooling
from attnlens_export.classification import HeadReference, logits_graph
from attnlens_export.contributions import one_token
from attnlens_export.contributions.graph import contributions_graph
from attnlens_export.contributions.measure import make_feed
from attnlens_export.contributions.tail import DenseWeights
from attnlens_export.contributions.write import read_layer
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_export.parity.grid import Case, Padding, make_inputs
from attnlens_export.published.classifier import LAYOUTS, find_classifier, read_head, write_head
from attnlens_model import Checkpoint, load_checkpoint
from family_cases import EXPORTED
from odd_models import OddModel, padded_masks, random_inputs

KIND = "ForSequenceClassification"
# Their attention has no rule for one query.
COMPUTED_IN_FULL = {"deberta", "deberta_v2", "mpnet"}
MODELS = {
    name: replace(
        odd,
        changes=odd.changes
        | {"num_labels": 3, "classifier_pooling": "bos" if odd.name == "EuroBert" else "cls"},
    )
    for name, odd in EXPORTED.items()
    if odd.source.__name__ == "transformers"
    and odd.name in LAYOUTS
    and hasattr(transformers, odd.name + KIND)
}


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the last layer of each graph computes one token only."""
    found: list[bool] = []
    select = one_token.last_hidden_state_of_one_token

    def spy(*arguments: Any) -> str | None:
        result = select(*arguments)
        found.append(result is not None)
        return result

    monkeypatch.setattr("attnlens_export.classification.last_hidden_state_of_one_token", spy)
    return found


class Traced(NamedTuple):
    """A model of transformers, and the parts of its graphs."""

    model: Any
    checkpoint: Checkpoint
    embeddings: TracedGraph
    pooling: Pooling.ValueType
    layers: list[DenseWeights]


def traced(odd: OddModel, directory: Path) -> Traced:
    model = odd.make(KIND)
    model.save_pretrained(directory / "source")
    checkpoint = load_checkpoint(directory / "source")
    layout = find_classifier(directory / "source")
    assert layout is not None
    head = read_head(directory / "source", layout, checkpoint.config.vector_size)
    write_head(directory, head)
    layers = [read_layer(directory, layer) for layer in head.pooling.dense]
    embeddings = embeddings_graph(trace(checkpoint.encoder, checkpoint.config))
    return Traced(model, checkpoint, embeddings, head.pooling.pooling, layers)


@pytest.mark.parametrize("family", MODELS)
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path, selections: list[bool]) -> None:
    model, checkpoint, embeddings, head_pooling, layers = traced(MODELS[family], tmp_path)
    graph = logits_graph(embeddings, head_pooling, layers)
    write_embedded(tmp_path / "model.onnx", graph.proto, graph.weights)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    whole, right, left, _ = padded_masks(3, min(MODELS[family].num_tokens, 20))
    error = 0.0
    for mask in (whole, right, left):
        inputs = random_inputs(model.config, mask)
        with torch.no_grad():
            if mask is left:  # transformers pools padding, so compare with the head on our token vectors
                hidden = checkpoint.encoder(**inputs).last_hidden_state.numpy()
                reference = HeadReference(tmp_path, checkpoint.config.vector_size)
                expected = reference.logits(hidden, mask.numpy(), torch.float32)
            else:
                expected = model(**inputs).logits.numpy()
        (found,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        error = max(error, abs(found - expected).max() / max(1.0, abs(expected).max()))
    print(f"{family}: {error:.2e}{'' if selections == [True] else ', last layer of all tokens'}")  # noqa: T201
    assert error < 1e-5
    assert (selections == [True]) == (family not in COMPUTED_IN_FULL)


@pytest.mark.parametrize("family", MODELS)
def test_contributions_equal_those_of_a_graph_with_all_tokens_in_the_last_layer(
    family: str, tmp_path: Path
) -> None:
    made = traced(MODELS[family], tmp_path)
    config = made.checkpoint.config
    whole, single = (
        contributions_graph(made.embeddings, config, made.layers, pools_one_token=choice)
        for choice in (False, True)
    )
    if family in COMPUTED_IN_FULL:
        assert single.proto.SerializeToString() == whole.proto.SerializeToString()
        return
    assert list(single.proto.graph.input) == list(whole.proto.graph.input)
    assert list(single.proto.graph.output) == list(whole.proto.graph.output)
    # All tokens are needed for their maximum, one is not.
    assert "ReduceMax" in {node.op_type for node in whole.proto.graph.node}
    assert "ReduceMax" not in {node.op_type for node in single.proto.graph.node}
    sessions = [
        onnxruntime.InferenceSession(graph.proto_with_weights().SerializeToString())
        for graph in (whole, single)
    ]
    for padding in (Padding.MIDDLE, Padding.EMPTY_ROW):
        feed = make_feed(make_inputs(Case(3, 12, padding), config), config, 3, pooling.Pooling(made.pooling))
        gates = np.random.default_rng(0).integers(0, 2, (2, *feed["head_gates"].shape[1:]))
        feed["head_gates"][1:] = gates
        for expected, found in zip(*(session.run(None, feed) for session in sessions), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5 * max(1, np.abs(expected).max()))
