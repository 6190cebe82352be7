"""Random blocks of BigBird attention, drawn exactly as in the published implementation.

Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences" (https://arxiv.org/abs/2007.14062).

Shape legend: H heads, N inner blocks (all but the first and the last), b block size, r random blocks per
block.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

# The published models draw from the blocks of the first 1,024 tokens, regardless of the input length.
FOCUS_TOKENS = 1024


@lru_cache(maxsize=128)
def draw_random_blocks(
    num_heads: int, num_tokens: int, block_size: int, num_random: int, seed: int
) -> npt.NDArray[np.int32]:
    """Draw the random blocks of one layer.

    For each head and inner block, the blocks are the first r of a random permutation of the candidates. As in
    the published implementation, the candidates are not only the blocks outside the window: the last inner
    blocks may draw blocks of their own window, and every block may draw the last block of a text. Such a
    block is then counted twice. The published weights were trained this way.

    Args:
        num_heads: H.
        num_tokens: Maximum input length, 4,096 in the published models. The random numbers depend on it;
            shorter texts use the first rows of the table.
        block_size: b.
        num_random: r.
        seed: Seed of `numpy.random.RandomState`, which generates the same numbers in every NumPy version. The
            published models use the layer index.

    Returns:
        (H, N, r) int32, read-only, padded with -1 for blocks with fewer than r candidates.
    """
    num_blocks = -(-num_tokens // block_size)
    is_focused = 2 * block_size < FOCUS_TOKENS
    end = (FOCUS_TOKENS // block_size if is_focused else num_blocks) - 1
    inner = np.arange(1, max(num_blocks - 1, 1), dtype=np.int32)
    generator = np.random.RandomState(seed)
    table = np.full((num_heads, max(num_blocks - 2, 0), num_random), -1, dtype=np.int32)
    for head in range(num_heads):
        for block in range(1, num_blocks - 1):
            drawn = generator.permutation(_candidates(inner, block, num_blocks, end))[:num_random]
            table[head, block - 1, : len(drawn)] = drawn
    table.setflags(write=False)
    return table


def _candidates(inner: npt.NDArray[np.int32], block: int, num_blocks: int, end: int) -> npt.NDArray[np.int32]:
    """Return the blocks that `block` draws from: nominally, inner blocks outside its window."""
    if block <= 2:  # noqa: PLR2004 - the window has no inner blocks to its left
        return inner[block + 1 : end]
    if block >= num_blocks - 3 or block - 2 > end:
        return inner[:end]
    if block + 1 == end:
        return inner[: block - 2]
    return np.concatenate((inner[: block - 2], inner[block + 1 : end]))


@lru_cache(maxsize=128)
def repeat_first_block(
    num_heads: int, num_tokens: int, block_size: int, num_random: int
) -> npt.NDArray[np.int32]:
    """Return the table that transformers uses outside of training, in which every random block is the first.

    Returns:
        (H, N, r) int32, read-only.
    """
    num_blocks = -(-num_tokens // block_size)
    table = np.zeros((num_heads, max(num_blocks - 2, 0), num_random), dtype=np.int32)
    table.setflags(write=False)
    return table
