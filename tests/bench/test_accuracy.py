"""Cosines against fp32, accuracy tiers, and the choice of comparable peers."""

import numpy as np
import pytest

from bench.accuracy import (
    BELOW,
    FP32,
    INT8,
    NEAR_LOSSLESS,
    STRICT_INT8,
    Accuracy,
    Tier,
    compare,
    rank,
    tier_of,
)
from bench.show.targets import Rows
from bench_results import make_row


def test_compare_returns_cosine_per_text_for_vectors_of_any_length() -> None:
    expected = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]])
    found = np.array([[5.0, 0.0], [1.0, 1.0], [3.0, 4.0]])
    accuracy = compare(found, expected)
    assert accuracy.min_cosine == pytest.approx(np.sqrt(0.5))
    assert accuracy.mean_cosine == pytest.approx((2 + np.sqrt(0.5)) / 3)
    assert accuracy.texts == 3


@pytest.mark.parametrize("vectors", [[[1.0, 0.0]], [[0.0, 0.0], [1.0, 1.0]], [[np.nan, 1.0], [1.0, 1.0]]])
def test_compare_rejects_invalid_vectors(vectors: list[list[float]]) -> None:
    with np.errstate(invalid="ignore"), pytest.raises(ValueError, match=r"shape|not finite"):
        compare(vectors, [[1.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("mean", "minimum", "tier"),
    [
        (1.0, 0.9999999, FP32),
        (0.99998, 0.99997, NEAR_LOSSLESS),
        (0.99995, 0.9997, STRICT_INT8),  # the minimum is too low for near-lossless
        (0.99924, 0.99805, INT8),
        (0.9992, 0.994, BELOW),
        (0.9967, 0.74, BELOW),
    ],
)
def test_tier_depends_on_mean_and_minimum_cosine(mean: float, minimum: float, tier: Tier) -> None:
    assert tier_of(Accuracy(mean, minimum, texts=200)) is tier


def test_best_peer_excludes_less_accurate_tiers() -> None:
    near = make_row("attnlens engine, OpenVINO", [8.0], "bf16", cosines=(0.99998, 0.99997))
    peer = make_row("peer", [7.0], "bf16", cosines=(0.99998, 0.99997))
    slow = make_row("peer", [4.0])
    rough = make_row("peer", [9.0], "int8", cosines=(0.9967, 0.99))
    rows = Rows([near, slow, rough, peer])
    assert rows.best_peer(near) == peer
    assert rows.best_peer(make_row("attnlens engine", [5.0])) == slow
    assert [rank(row) for row in (slow, near, rough)] == [0, 1, 4]
