"""The weights of a sliding window with global tokens, laid out as a band and put together again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens.patterns import Band


def dense_weights(mask: np.ndarray, window: int, num_global_tokens: int, num_heads: int = 2) -> np.ndarray:
    """Random weights (H, T, T) where a band has some, rows of tokens summing to 1."""
    places = np.arange(len(mask))
    is_global = np.zeros(len(mask), dtype=bool)
    is_global[np.flatnonzero(mask)[:num_global_tokens]] = True
    keep = np.abs(places[:, None] - places) <= window
    keep |= is_global[:, None] | is_global
    keep &= (mask[:, None] & mask) == 1
    weights = np.random.default_rng(3).random((num_heads, len(mask), len(mask))) * keep
    sums = weights.sum(axis=-1, keepdims=True)
    shares: np.ndarray = np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0)
    return shares


def laid_out(dense: np.ndarray, mask: np.ndarray, window: int, num_global_tokens: int) -> np.ndarray:
    """The rows of a band, one number at a time, as the .proto file describes them."""
    num_heads, num_tokens, _ = dense.shape
    width = 2 * num_global_tokens + 2 * window + 1
    rows = np.zeros((num_heads, num_tokens, width))
    tokens = list(np.flatnonzero(mask)[:num_global_tokens])
    for query in range(num_tokens):
        for index, token in enumerate(tokens):
            rows[:, query, num_global_tokens + 2 * window + 1 + index] = dense[:, token, query]
        if query in tokens:
            continue
        for index, token in enumerate(tokens):
            rows[:, query, index] = dense[:, query, token]
        for offset in range(-window, window + 1):
            key = query + offset
            if 0 <= key < num_tokens and key not in tokens:
                rows[:, query, num_global_tokens + window + offset] = dense[:, query, key]
    return rows


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=14),
    window=st.integers(0, 6),
    num_global_tokens=st.integers(0, 4),
)
def test_a_band_is_put_together_as_the_weights_that_it_was_made_of(
    mask: list[bool], window: int, num_global_tokens: int
) -> None:
    live = np.array(mask, dtype=np.int64)
    dense = dense_weights(live, window, num_global_tokens)
    band = Band(window, num_global_tokens)
    rows = laid_out(dense, live, window, num_global_tokens)
    assert rows.shape[-1] == band.width
    np.testing.assert_array_equal(band.dense(rows, live), dense)
    if all(mask):
        np.testing.assert_array_equal(band.dense(rows), dense)


def test_the_mean_over_heads_of_a_band_is_the_band_of_the_mean() -> None:
    live = np.ones(9, dtype=np.int64)
    dense = dense_weights(live, 2, 1, num_heads=3)
    rows = laid_out(dense, live, 2, 1)
    band = Band(2, 1)
    np.testing.assert_allclose(band.dense(rows.mean(axis=0)), dense.mean(axis=0), atol=1e-15)


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of shape \(2, 5, 6\) do not have 7 columns"):
        Band(2, 1).dense(np.zeros((2, 5, 6)))
