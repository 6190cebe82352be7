"""Which blocks each block attends to at random, drawn once and the same ever after.

Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", as the published implementation draws them.

Letters in shapes: H heads, N blocks between the first and the last, r random blocks of each.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

# The published models draw from the blocks of the first 1,024 tokens, however long the text.
FOCUS_TOKENS = 1024


@lru_cache(maxsize=128)
def draw_random_blocks(
    num_heads: int, num_tokens: int, block_size: int, num_random: int, seed: int
) -> npt.NDArray[np.int32]:
    """Draw the random blocks of a layer, as the published implementation does for texts of its lengths.

    For each head, and for each block in order, it takes the first r of a random permutation of the blocks
    that it means to allow. Its list is not quite what it means: the last blocks of a table may draw from
    their own window, and any block may draw the last block of a text. Such a block then counts twice. The
    published weights were trained with that, so it is kept.

    Args:
        num_heads: H.
        num_tokens: the longest text; all random numbers of a head depend on it. The published models have
            4,096, and take the first rows for shorter texts.
        block_size: b.
        num_random: r.
        seed: of `numpy.random.RandomState`, whose numbers are the same in every version of numpy. In the
            published models the number of the layer.

    Returns:
        (H, N, r) int32, not to be written to; -1 where fewer than r blocks are allowed.
    """
    count = -(-num_tokens // block_size)
    is_focused = 2 * block_size < FOCUS_TOKENS
    end = (FOCUS_TOKENS // block_size if is_focused else count) - 1
    inner = np.arange(1, max(count - 1, 1), dtype=np.int32)
    generator = np.random.RandomState(seed)
    table = np.full((num_heads, max(count - 2, 0), num_random), -1, dtype=np.int32)
    for head in range(num_heads):
        for block in range(1, count - 1):
            drawn = generator.permutation(_allowed(inner, block, count, end))[:num_random]
            table[head, block - 1, : len(drawn)] = drawn
    table.setflags(write=False)
    return table


def _allowed(inner: npt.NDArray[np.int32], block: int, count: int, end: int) -> npt.NDArray[np.int32]:
    """Return the blocks that `block` draws from: by intention those outside of its window, and not global."""
    if block <= 2:  # noqa: PLR2004 - nothing is on the left of the window
        return inner[block + 1 : end]
    if block >= count - 3 or block - 2 > end:
        return inner[:end]
    if block + 1 == end:
        return inner[: block - 2]
    return np.concatenate((inner[: block - 2], inner[block + 1 : end]))


@lru_cache(maxsize=128)
def first_block_repeated(
    num_heads: int, num_tokens: int, block_size: int, num_random: int
) -> npt.NDArray[np.int32]:
    """Return the table that transformers has outside of training: the first block in every place.

    Returns:
        (H, N, r) int32, not to be written to.
    """
    count = -(-num_tokens // block_size)
    table = np.zeros((num_heads, max(count - 2, 0), num_random), dtype=np.int32)
    table.setflags(write=False)
    return table
