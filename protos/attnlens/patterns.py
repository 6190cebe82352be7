"""Compact layouts of sparse attention weights, and their conversion to dense (T, T) weights.

Both layouts have one row per token, whose length does not depend on T. The last columns of a row contain
weights in the opposite direction: from each token that attends to all tokens, to the token of the row.

Dimension names: T tokens, G global tokens, w window radius, b block size, C = ceil(T / b) blocks, S slots per
block, r random blocks, H heads. "..." stands for any leading axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

ArrayT = TypeVar("ArrayT", bound=npt.NDArray[np.floating])
IndexArray: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Band:
    """A sliding window and global tokens (Beltagy et al. 2020, https://arxiv.org/abs/2004.05150).

    The first G non-padding tokens attend to, and are attended to by, every token. All other tokens attend to
    tokens
    within a distance of w. Row i of the weights (..., T, 2G + 2w + 1) consists of:

    - G weights from token i to each global token
    - 2w + 1 weights from token i to tokens i - w to i + w, 0 for global tokens
    - G weights from each global token to token i

    In the row of a global token, the first G + 2w + 1 weights are 0.

    Attributes:
        window_radius: w.
        num_global_tokens: G.
    """

    window_radius: int
    num_global_tokens: int

    @property
    def width(self) -> int:
        """Number of columns of a row."""
        return 2 * self.num_global_tokens + 2 * self.window_radius + 1

    def dense(self, rows: ArrayT, mask: npt.NDArray[Any] | None = None) -> ArrayT:
        """Convert rows (..., T, 2G + 2w + 1) to dense weights (..., T, T), query by key.

        Args:
            rows: Rows of one text.
            mask: (T,): 1 for tokens and 0 for padding. If None, there is no padding.

        Raises:
            ValueError: The rows have a different width.
        """
        num_tokens = _check_width(rows, self.width)
        num_global, window = self.num_global_tokens, self.window_radius
        dense = np.zeros((*rows.shape[:-1], num_tokens), dtype=rows.dtype)
        positions = np.arange(num_tokens)
        for offset in range(-min(window, num_tokens - 1), min(window, num_tokens - 1) + 1):
            queries = positions[max(0, -offset) : num_tokens - max(0, offset)]
            dense[..., queries, queries + offset] = rows[..., queries, num_global + window + offset]
        global_tokens = (positions if mask is None else np.flatnonzero(mask))[:num_global]
        from_global = rows[..., num_global + 2 * window + 1 :]
        # Keys first, then queries, which overwrite the rows of global tokens.
        for index, token in enumerate(global_tokens):
            dense[..., :, token] += rows[..., :, index]
        for index, token in enumerate(global_tokens):
            dense[..., token, :] = from_global[..., :, index]
        return dense  # type: ignore[return-value] # same dtype as the rows


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Attention between blocks of tokens of one text (Zaheer et al. 2020, https://arxiv.org/abs/2007.14062).

    Row i of the weights (..., T, S * b + 2b) consists of:

    - S slots of b weights from token i to the tokens of the key blocks of its block, in the order of
      `key_blocks`. If two slots contain the same token, its weight is their sum.
    - b weights from each token of the first block to token i, if that block attends to all blocks
    - b weights from each token of the last block to token i, if that block attends to all blocks

    In the rows of blocks that attend to all blocks, the first S * b weights are 0.

    Attributes:
        block_size: b.
        key_blocks: (H, C, S) int32: Key blocks of each head and query block, or -1 for an unused slot. If all
            slots of a block are -1, it attends to all blocks.
    """

    block_size: int
    key_blocks: IndexArray

    @property
    def width(self) -> int:
        """Number of columns of a row."""
        num_slots: int = self.key_blocks.shape[-1]
        return (num_slots + 2) * self.block_size

    def dense(self, rows: ArrayT) -> ArrayT:
        """Convert rows (..., H, T, S * b + 2b) to dense weights (..., H, T, T), query by key.

        Raises:
            ValueError: The rows have a different width, number of heads or number of blocks.
        """
        num_tokens = _check_width(rows, self.width)
        size = self.block_size
        num_heads, num_blocks, num_slots = self.key_blocks.shape
        if rows.shape[-3] != num_heads or -(-num_tokens // size) != num_blocks:
            raise ValueError(
                f"rows of shape {rows.shape} do not fit the key blocks of {num_heads} heads and {num_blocks} "
                f"blocks of {size} tokens"
            )
        dense = np.zeros((*rows.shape[:-1], num_blocks * size), dtype=rows.dtype)
        for head, block, slot in np.argwhere(self.key_blocks >= 0):
            keys = int(self.key_blocks[head, block, slot]) * size
            queries = slice(block * size, min((block + 1) * size, num_tokens))
            dense[..., head, queries, keys : keys + size] += rows[
                ..., head, queries, slot * size : (slot + 1) * size
            ]
        for block, start in ((0, num_slots * size), (num_blocks - 1, (num_slots + 1) * size)):
            first = block * size
            length = min(size, num_tokens - first)
            for head in np.flatnonzero((self.key_blocks[:, block] < 0).all(axis=-1)):
                from_block = rows[..., head, :, start : start + length]  # (..., T, b)
                dense[..., head, first : first + length, :num_tokens] = np.swapaxes(from_block, -1, -2)
        return dense[..., :num_tokens]  # type: ignore[return-value] # same dtype as the rows


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Attention between blocks for texts of any length.

    In a text of up to `max_full_blocks` blocks, all blocks attend to all. In longer texts, the first and last
    block attend to all. Any other block attends to the first, the last, itself, its neighbors, and r blocks
    of the table.

    Attributes:
        block_size: b.
        max_full_blocks: Maximum number of blocks with full attention.
        random_blocks: (H, N, r) int32: Random key blocks of each head and of blocks 1 to N. If a random block
            is already attended to, its weights are added. Entries that are -1 or beyond the text are unused.
    """

    block_size: int
    max_full_blocks: int
    random_blocks: IndexArray

    @property
    def num_slots(self) -> int:
        """S, which suffices for all blocks of a short text and for the 5 + r key blocks in a longer text."""
        num_random: int = self.random_blocks.shape[-1]
        return max(self.max_full_blocks, 5 + num_random)

    @property
    def width(self) -> int:
        """Number of columns of a row."""
        return (self.num_slots + 2) * self.block_size

    def of_heads(self, heads: Sequence[int]) -> "BlockTable":
        """Return the table of the given heads, in this order."""
        return BlockTable(self.block_size, self.max_full_blocks, self.random_blocks[list(heads)])

    def at(self, num_tokens: int) -> Blocks:
        """Return the blocks for a text of `num_tokens` tokens (at least 1)."""
        count, num_heads = -(-num_tokens // self.block_size), len(self.random_blocks)
        blocks = np.full((num_heads, count, self.num_slots), -1, dtype=np.int32)
        if count <= self.max_full_blocks:
            blocks[:, :, :count] = np.arange(count)
            return Blocks(self.block_size, blocks)
        for block in range(1, count - 1):
            blocks[:, block, :2] = 0, count - 1
            blocks[:, block, 2] = -1 if block == 1 else block - 1
            blocks[:, block, 3] = block
            blocks[:, block, 4] = -1 if block == count - 2 else block + 1
            random = self.random_blocks[:, block - 1]
            blocks[:, block, 5 : 5 + random.shape[-1]] = np.where(random < count, random, -1)
        return Blocks(self.block_size, blocks)


Pattern: TypeAlias = Band | BlockTable
"""Pattern of an attention mechanism, independent of the text."""


def _check_width(rows: npt.NDArray[Any], width: int) -> int:
    """Return T of rows (..., T, width)."""
    if rows.ndim < 2 or rows.shape[-1] != width:  # noqa: PLR2004 - tokens, columns
        raise ValueError(f"rows of shape {rows.shape} do not have {width} columns")
    return int(rows.shape[-2])
