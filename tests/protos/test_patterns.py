"""Attention patterns: dense weights converted to bands and blocks, and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens.patterns import Band, Blocks, BlockTable

HEADS = 2


def dense_weights(mask: np.ndarray, window: int, num_global_tokens: int, num_heads: int = 2) -> np.ndarray:
    """Random weights (H, T, T) within a band. Each row sums to 1."""
    positions = np.arange(len(mask))
    is_global = np.zeros(len(mask), dtype=bool)
    is_global[np.flatnonzero(mask)[:num_global_tokens]] = True
    is_kept = np.abs(positions[:, None] - positions) <= window
    is_kept |= is_global[:, None] | is_global
    is_kept &= (mask[:, None] & mask) == 1
    weights = np.random.default_rng(3).random((num_heads, len(mask), len(mask))) * is_kept
    sums = weights.sum(axis=-1, keepdims=True)
    shares: np.ndarray = np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0)
    return shares


def band_rows(dense: np.ndarray, mask: np.ndarray, window: int, num_global_tokens: int) -> np.ndarray:
    """Convert dense weights to the rows of a band, element by element, as `attnlens.v1.Band` defines them."""
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
def test_band_converts_back_to_the_original_weights(
    mask: list[bool], window: int, num_global_tokens: int
) -> None:
    token_mask = np.array(mask, dtype=np.int64)
    dense = dense_weights(token_mask, window, num_global_tokens)
    band = Band(window, num_global_tokens)
    rows = band_rows(dense, token_mask, window, num_global_tokens)
    assert rows.shape[-1] == band.width
    np.testing.assert_array_equal(band.dense(rows, token_mask), dense)
    if all(mask):
        np.testing.assert_array_equal(band.dense(rows), dense)


def test_mean_over_heads_of_a_band_is_the_band_of_the_mean() -> None:
    token_mask = np.ones(9, dtype=np.int64)
    dense = dense_weights(token_mask, 2, 1, num_heads=3)
    rows = band_rows(dense, token_mask, 2, 1)
    band = Band(2, 1)
    np.testing.assert_allclose(band.dense(rows.mean(axis=0)), dense.mean(axis=0), atol=1e-15)


def test_band_rows_of_a_different_width_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"rows of shape \(2, 5, 6\) do not have 7 columns"):
        Band(2, 1).dense(np.zeros((2, 5, 6)))


def random_table(size: int, max_full_blocks: int, num_rows: int, num_random: int) -> BlockTable:
    blocks = np.random.default_rng(num_rows).integers(-1, num_rows + 4, (HEADS, num_rows, num_random))
    return BlockTable(size, max_full_blocks, blocks.astype(np.int32))


def random_block_rows(blocks: Blocks, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Random rows and their dense weights, element by element, as `attnlens.v1.BlockPattern` defines them."""
    generator, size = np.random.default_rng(num_tokens), blocks.block_size
    num_heads, _, num_slots = blocks.key_blocks.shape
    rows = np.zeros((num_heads, num_tokens, blocks.width))
    dense = np.zeros((num_heads, num_tokens, num_tokens))
    for head, query in np.ndindex(num_heads, num_tokens):
        key_blocks = blocks.key_blocks[head, query // size]
        if (key_blocks < 0).all():
            # Weights of a query in the first or last block are in the rows of its keys.
            start = num_slots if query < size else num_slots + 1
            dense[head, query] = generator.random(num_tokens)
            rows[head, :, start * size + query % size] = dense[head, query]
            continue
        for slot, block in enumerate(key_blocks):
            for offset in range(size):
                key = block * size + offset
                if block >= 0 and key < num_tokens:
                    weight = generator.random()
                    rows[head, query, slot * size + offset] = weight
                    dense[head, query, key] += weight
    return rows, dense


@given(
    num_tokens=st.integers(1, 40),
    size=st.integers(1, 4),
    num_random=st.integers(0, 3),
    max_full_blocks=st.integers(3, 9),
)
def test_blocks_convert_back_to_the_original_weights(
    num_tokens: int, size: int, num_random: int, max_full_blocks: int
) -> None:
    table = random_table(size, max_full_blocks, 40, num_random)
    blocks = table.at(num_tokens)
    rows, dense = random_block_rows(blocks, num_tokens)
    assert rows.shape[-1] == table.width == blocks.width
    np.testing.assert_allclose(blocks.dense(rows), dense, rtol=0, atol=1e-15)
    stacked = np.stack([rows, 2 * rows])
    np.testing.assert_allclose(blocks.dense(stacked)[1], 2 * dense, rtol=0, atol=1e-15)


def test_all_blocks_attend_to_all_in_a_short_text() -> None:
    table = random_table(4, 7, 9, 1)
    for num_tokens, count in ((1, 1), (4, 1), (5, 2), (28, 7)):
        blocks = table.at(num_tokens).key_blocks
        assert blocks.shape == (HEADS, count, 7)
        assert (blocks[:, :, :count] == np.arange(count)).all()
        assert (blocks[:, :, count:] == -1).all()


def test_blocks_attend_to_their_slots_in_a_longer_text() -> None:
    random = np.array([[[4], [1], [9], [8], [2], [-1], [3]]], dtype=np.int32)
    blocks = BlockTable(4, 7, random).at(33).key_blocks[0]  # 9 blocks
    assert blocks[:, 6:].max() == -1
    assert blocks[:, :6].tolist() == [
        [-1, -1, -1, -1, -1, -1],
        [0, 8, -1, 1, 2, 4],
        [0, 8, 1, 2, 3, 1],
        [0, 8, 2, 3, 4, -1],  # 9 is beyond the text
        [0, 8, 3, 4, 5, 8],
        [0, 8, 4, 5, 6, 2],
        [0, 8, 5, 6, 7, -1],
        [0, 8, 6, 7, -1, 3],  # the next block is the last one
        [-1, -1, -1, -1, -1, -1],
    ]


def test_block_rows_of_a_different_shape_are_rejected() -> None:
    table = random_table(4, 7, 9, 1)
    blocks = table.at(33)
    rows = np.zeros((HEADS, 33, table.width))
    with pytest.raises(ValueError, match=r"do not have 36 columns"):
        blocks.dense(rows[..., 1:])
    for invalid in (rows[:1], rows[:, :32]):
        with pytest.raises(
            ValueError, match=r"do not fit the key blocks of 2 heads and 9 blocks of 4 tokens"
        ):
            blocks.dense(invalid)
