"""Head importance, with a handcrafted model instead of the graph."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import spearmanr

from attnlens.explanations import pooling_weights, spearman
from attnlens_analysis.heads.importance import (
    GatedOutputs,
    ScoredPair,
    cosines,
    measure_importance,
    measure_task,
    spread,
)
from attnlens_analysis.heads.maps import MapSource
from attnlens_server.bundle import open_bundle


@pytest.fixture(scope="module")
def source(minilm_bundle: Path) -> MapSource:
    return MapSource(open_bundle(minilm_bundle), threads=1)


def parts_of(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return np.asarray(np.cos(np.arange(72) * int(ids.sum())) / 4, dtype=np.float64)


def made_run(ids: npt.NDArray[np.int64], gates: npt.NDArray[np.float32]) -> GatedOutputs:
    """A model whose embedding has a constant component and one component per enabled head."""
    assert gates.shape[1:] == (6, 12)
    sizes = parts_of(ids).reshape(6, 12)
    parts = (gates * sizes).reshape(len(gates), -1).astype(np.float32)
    embedding = np.concatenate([np.ones((len(gates), 1), np.float32), parts], axis=1)
    return GatedOutputs(embedding, (gates * -sizes).astype(np.float32))


def test_disabling_a_head_removes_its_contribution(source: MapSource) -> None:
    texts = [text for text in source.encode(["It rained, so it was wet."]) if text is not None]
    found = measure_importance(made_run, source, texts, lambda *_: None)
    parts = parts_of(texts[0].input_ids)
    whole = 1 + (parts**2).sum()
    expected = 1 - (whole - parts**2) / np.sqrt(whole * (whole - parts**2))
    np.testing.assert_allclose(found.ablation, expected, atol=1e-6)
    np.testing.assert_allclose(found.contribution, np.abs(parts), atol=1e-6)
    assert found.agreement == pytest.approx(1)


def test_task_effect_is_the_change_of_the_rank_correlation(source: MapSource) -> None:
    texts = ["It rained.", "So it was wet.", "A man plays a guitar.", "No.", "What is it that he did there?"]
    pairs = [
        ScoredPair(texts[n], texts[(n + 2) % 5], score) for n, score in enumerate((3.0, 1.0, 5.0, 2.0, 2.0))
    ]
    found = measure_task(made_run, source, pairs, lambda *_: None)
    assert found is not None
    gates = np.ones((73, 6, 12), np.float32)
    gates.reshape(73, 72)[np.arange(1, 73), np.arange(72)] = 0
    columns = []
    for pair in pairs:
        encoded = source.encode([pair.first, pair.second])
        left, right = (made_run(text.input_ids, gates).embedding.astype(float) for text in encoded if text)
        columns.append(
            (left * right).sum(axis=1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
        )
    scores = [pair.score for pair in pairs]
    expected = np.array([spearmanr(column, scores).statistic for column in np.transpose(columns)])
    assert found.spearman == pytest.approx(expected[0])
    np.testing.assert_allclose(found.change, expected[1:] - expected[0], atol=1e-6)
    assert np.abs(found.change).max() > 0


def test_rank_correlation_matches_scipy() -> None:
    generator = np.random.default_rng(1)
    first, second = generator.integers(0, 5, 40).astype(float), generator.normal(size=40)
    assert spearman(first, second) == pytest.approx(spearmanr(first, second).statistic)


def test_spread_selects_evenly_spaced_items() -> None:
    assert spread(list(range(10)), 5) == [0, 2, 4, 6, 8]
    assert spread([1, 2], 5) == [1, 2]


def test_cosine_similarities_of_rows() -> None:
    rows = np.array([[3.0, 4.0], [0.0, 2.0]])
    assert cosines(rows, np.array([[6.0, 8.0]])).tolist() == pytest.approx([1, 0.8])


def test_mean_pooling_weights_all_tokens_equally(source: MapSource) -> None:
    assert pooling_weights(source.bundle.model.pooling, 4).tolist() == [0.25] * 4
