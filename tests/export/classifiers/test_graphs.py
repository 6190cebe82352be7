"""Logits graphs of every family, compared with `transformers`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import transformers

from attnlens_export import one_token
from attnlens_export.classification import HeadReference, logits_graph
from attnlens_export.contributions.write import read_layer
from attnlens_export.graph.trace import embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
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


def write_logits_graph(odd: OddModel, directory: Path) -> tuple[Any, Checkpoint]:
    model = odd.make(KIND)
    model.save_pretrained(directory / "source")
    checkpoint = load_checkpoint(directory / "source")
    layout = find_classifier(directory / "source")
    assert layout is not None
    head = read_head(directory / "source", layout, checkpoint.config.vector_size)
    write_head(directory, head)
    layers = [read_layer(directory, layer) for layer in head.pooling.dense]
    embeddings = embeddings_graph(trace(checkpoint.encoder, checkpoint.config))
    graph = logits_graph(embeddings, head.pooling.pooling, layers)
    write_embedded(directory / "model.onnx", graph.proto, graph.weights)
    return model, checkpoint


@pytest.mark.parametrize("family", MODELS)
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path, selections: list[bool]) -> None:
    model, checkpoint = write_logits_graph(MODELS[family], tmp_path)
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
