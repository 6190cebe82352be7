"""The weights of blocks: which blocks attend to which, laid out in rows and put together again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens.patterns import Blocks, BlockTable

HEADS = 2


def random_table(size: int, max_full_blocks: int, num_rows: int, num_random: int) -> BlockTable:
    blocks = np.random.default_rng(num_rows).integers(-1, num_rows + 4, (HEADS, num_rows, num_random))
    return BlockTable(size, max_full_blocks, blocks.astype(np.int32))


def laid_out(blocks: Blocks, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Random rows and the weights that they stand for, one number at a time, as the .proto file has them."""
    generator, size = np.random.default_rng(num_tokens), blocks.block_size
    num_heads, _, num_slots = blocks.key_blocks.shape
    rows = np.zeros((num_heads, num_tokens, blocks.width))
    dense = np.zeros((num_heads, num_tokens, num_tokens))
    for head, query in np.ndindex(num_heads, num_tokens):
        used = blocks.key_blocks[head, query // size]
        if (used < 0).all():
            # A query of the first or last block: its weights are in the rows of its keys.
            start = num_slots if query < size else num_slots + 1
            dense[head, query] = generator.random(num_tokens)
            rows[head, :, start * size + query % size] = dense[head, query]
            continue
        for slot, block in enumerate(used):
            for place in range(size):
                key = block * size + place
                if block >= 0 and key < num_tokens:
                    weight = generator.random()
                    rows[head, query, slot * size + place] = weight
                    dense[head, query, key] += weight
    return rows, dense


@given(
    num_tokens=st.integers(1, 40),
    size=st.integers(1, 4),
    num_random=st.integers(0, 3),
    max_full_blocks=st.integers(3, 9),
)
def test_blocks_are_put_together_as_the_weights_that_they_were_made_of(
    num_tokens: int, size: int, num_random: int, max_full_blocks: int
) -> None:
    table = random_table(size, max_full_blocks, 40, num_random)
    blocks = table.at(num_tokens)
    rows, dense = laid_out(blocks, num_tokens)
    assert rows.shape[-1] == table.width == blocks.width
    np.testing.assert_allclose(blocks.dense(rows), dense, rtol=0, atol=1e-15)
    several = np.stack([rows, 2 * rows])
    np.testing.assert_allclose(blocks.dense(several)[1], 2 * dense, rtol=0, atol=1e-15)


def test_up_to_so_many_blocks_all_attend_to_all() -> None:
    table = random_table(4, 7, 9, 1)
    for num_tokens, count in ((1, 1), (4, 1), (5, 2), (28, 7)):
        blocks = table.at(num_tokens).key_blocks
        assert blocks.shape == (HEADS, count, 7)
        assert (blocks[:, :, :count] == np.arange(count)).all()
        assert (blocks[:, :, count:] == -1).all()


def test_in_a_longer_text_a_block_attends_to_those_of_its_slots() -> None:
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
        [0, 8, 6, 7, -1, 3],  # the next is the last
        [-1, -1, -1, -1, -1, -1],
    ]


def test_rows_that_do_not_fit_are_refused() -> None:
    table = random_table(4, 7, 9, 1)
    blocks = table.at(33)
    rows = np.zeros((HEADS, 33, table.width))
    with pytest.raises(ValueError, match=r"do not have 36 columns"):
        blocks.dense(rows[..., 1:])
    for wrong in (rows[:1], rows[:, :32]):
        with pytest.raises(
            ValueError, match=r"do not fit the key blocks of 2 heads and 9 blocks of 4 tokens"
        ):
            blocks.dense(wrong)
