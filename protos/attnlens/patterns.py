"""Attention between some tokens only: how its weights are laid out, and the (T, T) weights behind them.

Both layouts have a row for each token, of a length that does not depend on T. The last columns of a row are
not what the token gives, but what some tokens that attend to everything give to it.

Letters in shapes: T tokens, G global tokens, w window, b block size, C = ceil(T / b) blocks, S slots of a
block, r random blocks, H heads. Dots stand for any axes before.
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

    The first G tokens that are no padding attend to all and all attend to them. Every other token attends to
    those at most w places away. Row i of the weights (..., T, 2G + 2w + 1):

    - G columns: what token i gives to each global token;
    - 2w + 1 columns: what it gives to the tokens i - w to i + w; 0 at global tokens;
    - G columns: what each global token gives to token i.

    In the row of a global token the first G + 2w + 1 columns are 0.

    Attributes:
        window_radius: w.
        num_global_tokens: G.
    """

    window_radius: int
    num_global_tokens: int

    @property
    def width(self) -> int:
        """How many columns a row has."""
        return 2 * self.num_global_tokens + 2 * self.window_radius + 1

    def dense(self, rows: ArrayT, mask: npt.NDArray[Any] | None = None) -> ArrayT:
        """Return the weights (..., T, T), query by key, that rows (..., T, 2G + 2w + 1) stand for.

        Args:
            rows: of one text.
            mask: (T,), 1 for a token and 0 for padding; None: no padding.

        Raises:
            ValueError: the rows have another width.
        """
        num_tokens = _check_width(rows, self.width)
        number, window = self.num_global_tokens, self.window_radius
        dense = np.zeros((*rows.shape[:-1], num_tokens), dtype=rows.dtype)
        places = np.arange(num_tokens)
        for offset in range(-min(window, num_tokens - 1), min(window, num_tokens - 1) + 1):
            queries = places[max(0, -offset) : num_tokens - max(0, offset)]
            dense[..., queries, queries + offset] = rows[..., queries, number + window + offset]
        live = places if mask is None else np.flatnonzero(mask)
        given = rows[..., number + 2 * window + 1 :]
        # Keys first, then queries: the row of a global token is its own.
        for index, token in enumerate(live[:number]):
            dense[..., :, token] += rows[..., :, index]
        for index, token in enumerate(live[:number]):
            dense[..., token, :] = given[..., :, index]
        return dense  # type: ignore[return-value] # the dtype is that of the rows


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of tokens that attend to some blocks (Zaheer et al. 2020, https://arxiv.org/abs/2007.14062).

    Row i of the weights (..., T, S * b + 2b):

    - S slots of b columns: what token i gives to the tokens of the blocks that `key_blocks` names for its own
      block, in that order; what two slots give to the same token adds up;
    - b columns: what each token of the first block gives to token i, where these attend to all blocks;
    - b columns: the same of the last block.

    In the rows of blocks that attend to all, the first S * b columns are 0.

    Attributes:
        block_size: b.
        key_blocks: (H, C, S) int32: for each head and block of queries the blocks that it attends to, -1 for
            a slot that is not used. A block of which all slots are -1 attends to all.
    """

    block_size: int
    key_blocks: IndexArray

    @property
    def width(self) -> int:
        """How many columns a row has."""
        num_slots: int = self.key_blocks.shape[-1]
        return (num_slots + 2) * self.block_size

    def dense(self, rows: ArrayT) -> ArrayT:
        """Return the weights (..., H, T, T), query by key, that rows (..., H, T, S * b + 2b) stand for.

        Raises:
            ValueError: the rows have another width, or other numbers of heads or blocks.
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
            number = min(size, num_tokens - first)
            for head in np.flatnonzero((self.key_blocks[:, block] < 0).all(axis=-1)):
                given = rows[..., head, :, start : start + number]  # (..., T, b)
                dense[..., head, first : first + number, :num_tokens] = np.swapaxes(given, -1, -2)
        return dense[..., :num_tokens]  # type: ignore[return-value] # the dtype is that of the rows


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Which blocks attend to which, for a text of any length.

    Up to `max_full_blocks` blocks, all attend to all. In longer texts the first and the last block attend to
    all. Any other attends to the first, the last, itself, the one on each side, and r blocks of the table.

    Attributes:
        block_size: b.
        max_full_blocks: see above.
        random_blocks: (H, N, r) int32, for each head and block 1 to N. A block that is attended to anyway
            counts once more; -1, and blocks beyond the text, are not attended to.
    """

    block_size: int
    max_full_blocks: int
    random_blocks: IndexArray

    @property
    def num_slots(self) -> int:
        """S: enough for all blocks of a short text, and for the first, last, three and r of a long one."""
        num_random: int = self.random_blocks.shape[-1]
        return max(self.max_full_blocks, 5 + num_random)

    @property
    def width(self) -> int:
        """How many columns a row has."""
        return (self.num_slots + 2) * self.block_size

    def of_heads(self, heads: Sequence[int]) -> "BlockTable":
        """Return the table of some heads, in this order."""
        return BlockTable(self.block_size, self.max_full_blocks, self.random_blocks[list(heads)])

    def at(self, num_tokens: int) -> Blocks:
        """Return the blocks of a text of T = `num_tokens`, at least 1."""
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
"""What the layout of a kind of attention depends on beside the text."""


def _check_width(rows: npt.NDArray[Any], width: int) -> int:
    """Return T of rows (..., T, width)."""
    if rows.ndim < 2 or rows.shape[-1] != width:  # noqa: PLR2004 - tokens, columns
        raise ValueError(f"rows of shape {rows.shape} have not {width} columns")
    return int(rows.shape[-2])
