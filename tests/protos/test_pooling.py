"""Pooling, compared with float64, and the steps from pooled vectors to embeddings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens.pooling import Pooling, finish, normalize, pool
from attnlens.v1 import manifest_pb2


@pytest.mark.parametrize("num_tokens", [1, 2, 511])
def test_pooling_agrees_with_float64(num_tokens: int) -> None:
    hidden = np.random.default_rng(0).standard_normal((num_tokens, 24)).astype(np.float32)
    exact = hidden.astype(np.float64)
    np.testing.assert_allclose(pool(hidden, Pooling.MEAN), exact.mean(axis=0), atol=1e-6)
    np.testing.assert_array_equal(pool(hidden, Pooling.CLS), hidden[0])
    np.testing.assert_array_equal(pool(hidden, Pooling.MAX), hidden.max(axis=0))
    np.testing.assert_array_equal(pool(hidden, Pooling.LAST_TOKEN), hidden[-1])
    weighted = np.average(exact, axis=0, weights=np.arange(1, num_tokens + 1))
    np.testing.assert_allclose(pool(hidden, Pooling.WEIGHTED_MEAN), weighted, atol=1e-6)
    by_root = exact.sum(axis=0) / num_tokens**0.5
    np.testing.assert_allclose(pool(hidden, Pooling.MEAN_SQRT_LENGTH), by_root, rtol=1e-5, atol=1e-5)


@given(st.sampled_from(list(Pooling)), st.integers(2, 9), st.data())
def test_excluded_tokens_do_not_affect_the_result(
    pooling: Pooling, num_tokens: int, data: st.DataObject
) -> None:
    num_excluded = data.draw(st.integers(1, num_tokens - 1))
    hidden = np.random.default_rng(num_tokens).standard_normal((num_tokens, 5)).astype(np.float32)
    before = pool(hidden, pooling, num_excluded)
    hidden[:num_excluded] = 100
    np.testing.assert_array_equal(pool(hidden, pooling, num_excluded), before)


def test_included_tokens_keep_their_positions() -> None:
    hidden = np.array([[9], [1], [2], [4]], np.float32)
    actual = pool(hidden, Pooling.WEIGHTED_MEAN, 1)
    np.testing.assert_allclose(actual, (2 * 1 + 3 * 2 + 4 * 4) / (2 + 3 + 4), rtol=1e-6)


def test_normalize_first_and_normalize_last_differ_with_fewer_dimensions() -> None:
    pooled = np.array([[3, 4, 12]], np.float32)
    published = finish(pooled, (), dimensions=2, normalize_first=True)
    np.testing.assert_allclose(published, [[3 / 13, 4 / 13]], rtol=1e-6)
    requested = finish(pooled, (), dimensions=2, normalize_last=True)
    np.testing.assert_allclose(requested, [[3 / 5, 4 / 5]], rtol=1e-6)


def test_values_equal_the_protocol_and_unknown_values_are_rejected() -> None:
    values = {f"POOLING_{pooling.name}": pooling.value for pooling in Pooling}
    assert values == dict(manifest_pb2.Pooling.items()[1:])
    with pytest.raises(ValueError, match="0 is not a valid Pooling"):
        Pooling(0)


@given(st.integers(1, 5), st.floats(-1e3, 1e3, width=32))
def test_normalized_rows_have_length_one_or_stay_zero(count: int, scale: float) -> None:
    rows = np.full((count, 8), scale, dtype=np.float32)
    rows[0] = 0
    result = normalize(rows)
    assert not np.isnan(result).any()
    np.testing.assert_array_equal(result[0], 0)
    if abs(scale) > 1e-6:
        np.testing.assert_allclose(np.linalg.norm(result[1:], axis=1), 1, atol=1e-6)
