"""Third-party tools open bundles unchanged and return the vectors of the PyTorch checkpoint."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ecosystem.tools import ATTENTION_TEXTS, MINILM, RERANKER, SAMPLES_OF, TOOLS, Answers, Reranker

if TYPE_CHECKING:
    from ecosystem.samples import Sample

pytestmark = pytest.mark.ecosystem

TOLERANCE = 1e-5
MIN_COSINE = 0.999
NAMES = [MINILM, "roberta", "xlm-roberta", "distilbert"]

Samples = dict[str, "Sample"]
Ask = Callable[[str], Answers]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tool", TOOLS)
def test_vectors_match_the_checkpoint(
    tool: str, name: str, samples: Samples, ask: Ask, differences: dict[tuple[str, str], float]
) -> None:
    sample = samples[name]
    assert sample.is_cut.any()
    assert not sample.is_cut.all()
    vectors = np.array(ask(tool)[name]["embed"])
    assert vectors.shape == sample.vectors.shape
    differences[tool, name] = float(np.abs(vectors - sample.vectors).max())
    assert differences[tool, name] <= TOLERANCE


@pytest.mark.parametrize("name", SAMPLES_OF["embed with attentions"])
@pytest.mark.parametrize("tool", ["sentence-transformers", "optimum-intel", "optimum-onnx"])
def test_attention_graph_gives_the_same_vectors(tool: str, name: str, samples: Samples, ask: Ask) -> None:
    vectors = np.array(ask(tool)[name]["embed with attentions"])
    np.testing.assert_allclose(vectors, samples[name].vectors, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", SAMPLES_OF["embed by default"])
@pytest.mark.parametrize("call", ["embed by default", "embed with attentions by default"])
def test_openvino_keeps_the_vectors_with_its_defaults(
    call: str, name: str, samples: Samples, ask: Ask
) -> None:
    """OpenVINO defaults to bf16 if supported. With another mask, MiniLM's smallest cosine was 0.19."""
    vectors, expected = np.array(ask("optimum-intel")[name][call]), samples[name].vectors
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((vectors * expected).sum(axis=1) / norms).min() >= MIN_COSINE


@pytest.mark.parametrize("name", SAMPLES_OF["attend"])
@pytest.mark.parametrize("tool", ["optimum-onnx", "@huggingface/transformers"])
def test_attention_weights_match_the_checkpoint(tool: str, name: str, samples: Samples, ask: Ask) -> None:
    layers: list[Any] = ask(tool)[name]["attend"]
    expected = samples[name].attentions(ATTENTION_TEXTS)
    assert len(layers) == len(expected)
    for layer, expected_layer in zip(layers, expected, strict=True):
        # Attention of padding queries is implementation-defined and unused.
        is_token = expected_layer.sum(axis=1).sum(axis=1) > 0  # (texts, tokens)
        for text, (weights, expected_weights) in enumerate(zip(np.array(layer), expected_layer, strict=True)):
            rows = is_token[text]
            np.testing.assert_allclose(weights[:, rows], expected_weights[:, rows], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_js_differs_only_for_truncated_texts(name: str, samples: Samples, ask: Ask) -> None:
    """docs/ecosystem.md works around this limitation. The test fails once a new version removes it."""
    sample = samples[name]
    vectors = np.array(ask("@huggingface/transformers")[name]["embed cut"])
    differences = np.abs(vectors - sample.vectors).max(axis=1)
    assert (differences[~sample.is_cut] <= TOLERANCE).all()
    assert (differences[sample.is_cut] > 1e-4).all()


@pytest.mark.parametrize("tool", TOOLS)
def test_reranker_has_the_logits_of_the_checkpoint(
    tool: str, reranker: Reranker, ask: Ask, differences: dict[tuple[str, str], float]
) -> None:
    logits = np.array(ask(tool)[RERANKER]["score"])
    differences[tool, RERANKER] = float(np.abs(logits - reranker.logits).max())
    assert np.ptp(reranker.logits) > 1
    assert differences[tool, RERANKER] <= TOLERANCE
