"""Pooling against float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens.v1.manifest_pb2 import Pooling
from attnlens_server.pooling import normalize, pool


@pytest.mark.parametrize("num_tokens", [1, 2, 511])
def test_pooling_agrees_with_float64(num_tokens: int) -> None:
    hidden = np.random.default_rng(0).standard_normal((num_tokens, 24)).astype(np.float32)
    exact = hidden.astype(np.float64)
    np.testing.assert_allclose(pool(hidden, Pooling.POOLING_MEAN), exact.mean(axis=0), atol=1e-6)
    np.testing.assert_array_equal(pool(hidden, Pooling.POOLING_CLS), hidden[0])
    np.testing.assert_array_equal(pool(hidden, Pooling.POOLING_MAX), hidden.max(axis=0))


@given(st.integers(1, 5), st.floats(-1e3, 1e3, width=32))
def test_normalized_rows_have_length_one_or_stay_zero(count: int, scale: float) -> None:
    rows = np.full((count, 8), scale, dtype=np.float32)
    rows[0] = 0
    result = normalize(rows)
    assert not np.isnan(result).any()
    np.testing.assert_array_equal(result[0], 0)
    if abs(scale) > 1e-6:
        np.testing.assert_allclose(np.linalg.norm(result[1:], axis=1), 1, atol=1e-6)
