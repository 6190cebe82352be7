"""Which keys each block of queries attends to: indices and masks, computed once for a batch.

Zaheer et al. 2020, https://arxiv.org/abs/2007.14062. Blocks are counted by place in the row, with padding.
The last block is the last one with a live token, in each text of its own, so that no text depends on what
stands to its right. What depends on the text in this way is data (masks and selectors), never a shape.

Letters in shapes: B batch, T tokens, H heads, b block size, r random blocks, M the longest input. C blocks
and c places of a block: as many as T needs, and b; or 2 and 2 where no text of the batch can be long.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attnlens.patterns import BlockTable
from attnlens_model.attention.parts.masks import AttentionMask, prepare_mask

# Among previous, itself, next, random.
_NEXT = 2


def smaller(first: int, second: int) -> int:
    """Return the smaller of two lengths, without deciding which that is while it is traced."""
    found: int = torch.sym_min(first, second)  # type: ignore[no-untyped-call]
    return found


def larger(first: int, second: int) -> int:
    """Return the larger of two lengths, likewise."""
    found: int = torch.sym_max(first, second)  # type: ignore[no-untyped-call]
    return found


class BlockParts(NamedTuple):
    """What every layer of one configuration needs. Masks, selectors and factors are floating point."""

    queries: Tensor
    """(C, c) int64: positions of the tokens of each block; the last token stands in beyond the end."""
    near: Tensor
    """(H, 3 + r, C, C): 1 at a block's previous block, at itself, at the next and at each random one."""
    mask: AttentionMask
    """(B, H, C, 1, (5 + r) c): of the keys in the first and the last block, and of those above."""
    all_keys: AttentionMask
    """(B, 1, 1, T)."""
    select: Tensor
    """(B, 1, 2, C): 1 at the first and at the last block."""
    is_inner: Tensor
    """(B, 1, C, 1): 1 at the other blocks, of long texts alone."""
    is_end: Tensor
    """(B, 1, 2 c, 1): 1 at tokens among the places of the first and the last block, of long texts alone."""
    is_long: Tensor
    """(B, 1, 1, 1)."""
    ones: Tensor
    """(C, 1, 1)."""
    from_blocks: Tensor
    """(T,) int64: which of the C * c places is that of each token."""
    from_start: Tensor
    """(T,) int64: which of the first places, up to which a text attends fully, is."""
    live: Tensor
    """(B, 1, T, 1): 1 at tokens."""


class BlockMasks(nn.Module):
    """Computes `BlockParts`."""

    places: Tensor
    numbers: Tensor
    offsets: Tensor
    last_of_start: Tensor
    attended: Tensor
    is_used: Tensor
    reaches: Tensor
    is_next: Tensor
    ones: Tensor

    def __init__(self, table: BlockTable, max_tokens: int) -> None:
        super().__init__()
        size, count = table.block_size, max(2, -(-max_tokens // table.block_size))
        self.block_size, self.full_tokens = size, table.max_full_blocks * size
        self.max_tokens = max_tokens
        blocks = _attended_blocks(table.random_blocks, count)  # (H, M / b, 3 + r)
        # Of block j seen from i: not before it, after it, two or more after it; too far for a short text.
        numbers = np.arange(count)
        later = numbers[:, None] - numbers
        far = np.broadcast_to(numbers[:, None] >= table.max_full_blocks, later.shape)
        constants = {
            "places": np.arange(max_tokens),
            "numbers": numbers,
            "offsets": np.arange(size),
            "last_of_start": np.array([self.full_tokens - 1]),
            "attended": np.maximum(blocks, 0).swapaxes(1, 2),
            "is_used": blocks >= 0,
            "reaches": np.stack([*(later >= steps for steps in range(3)), far]),
            "is_next": np.arange(blocks.shape[-1]) == _NEXT,
            "ones": np.ones((count, 1, 1), dtype=bool),
        }
        for name, array in constants.items():
            dtype = torch.get_default_dtype() if array.dtype == bool else torch.int64
            # The device is named so that the values exist even when the rest is built without storage.
            tensor = torch.tensor(array, device="cpu").to(dtype)
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, keep: Tensor) -> BlockParts:
        """Return what a layer takes beside hidden states, for (B, 1, 1, T): 1 at tokens, 0 at padding."""
        live = keep[:, 0, 0]  # (B, T)
        num_tokens = keep.shape[-1]
        places = self.places[:num_tokens]
        numbers, offsets = self._blocks(num_tokens)
        queries, end = numbers[:, None] * self.block_size + offsets, places[-1:]  # (C, c), (1,)
        live_blocks = live[:, torch.minimum(queries, end)] * _exist(queries, end, live)  # (B, C, c)
        select, is_long, may_be_next = self._select(live_blocks, numbers)
        attended = self.attended[:, :, numbers][..., None]  # (H, 3 + r, C, 1)
        keys = (attended * self.block_size + offsets).transpose(1, 2)  # (H, C, 3 + r, c)
        exist = _exist(keys, end, live) * self.is_used[:, numbers][..., None]
        # The next block is not attended to as such where it is the last.
        near = 1.0 - self.is_next * (1.0 - may_be_next)  # (B, 1, C, 3 + r)
        keys = torch.minimum(keys, end)
        near = (live[:, keys] * exist * near[..., None]).flatten(-2)  # (B, H, C, (3 + r) c)
        live_ends = select @ live_blocks[:, None]  # (B, 1, 2, c)
        seen = torch.cat([near[..., :1] * 0.0 + live_ends.flatten(-2)[:, :, None], near], dim=-1)
        return BlockParts(
            queries=torch.minimum(queries, end),
            near=(1.0 - (attended - numbers).to(keep.dtype).abs()).clamp(0.0, 1.0),
            mask=prepare_mask(seen[:, :, :, None], keep.dtype),
            all_keys=prepare_mask(keep, keep.dtype),
            select=select,
            is_inner=(1.0 - select.sum(dim=2, keepdim=True)).transpose(-1, -2) * is_long,
            is_end=live_ends.flatten(-2)[..., None] * is_long,
            is_long=is_long,
            ones=self.ones[numbers],
            from_blocks=torch.minimum(places, (numbers[-1:] + 1) * (offsets[-1:] + 1) - 1),
            from_start=torch.minimum(places, self.last_of_start),
            live=keep.transpose(-1, -2),
        )

    def _blocks(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the numbers of the C blocks, and the c places within each.

        Where no text can be long these are 2 blocks of 2 places, which cost next to nothing. Tensors without
        elements would cost nothing, but some runtimes take none; an axis of length 1 is taken for a constant
        by the tracer.
        """
        count = (num_tokens + self.block_size - 1) // self.block_size
        # 0 where no text can be long. A product of a sum is an axis that tract does not recognise.
        times = num_tokens // (self.full_tokens + 1)
        numbers = self.numbers[: larger(2, smaller(count, times * self.max_tokens))]
        return numbers, self.offsets[: larger(2, smaller(self.block_size, times * self.block_size))]

    def _select(self, live_blocks: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `select` and `is_long` of `BlockParts`, and (B, 1, C, 1): 1 two or more before the last."""
        counts = live_blocks.sum(dim=-1)[:, None, None]  # (B, 1, 1, C)
        reaches = self.reaches[:, numbers][:, :, numbers]  # (4, C, C)
        after = (counts @ reaches).clamp(0.0, 1.0)  # (B, 4, 1, C)
        last = after[:, :1] - after[:, 1:2]  # (B, 1, 1, C)
        first = (1.0 - numbers.to(last.dtype)).clamp(0.0, 1.0)  # (C,)
        is_long = after[:, 3:, :, :1]
        select = torch.cat([first * (is_long * 0.0 + 1.0), last], dim=2)
        return select, is_long, after[:, 2:3].transpose(-1, -2)


def _exist(places: Tensor, end: Tensor, like: Tensor) -> Tensor:
    """Return 1 where a place is not beyond `end`, else 0, in the dtype of `like`."""
    # fp32 counts exactly where fp16 does not.
    return ((end - places).to(torch.float32) + 1.0).clamp(0.0, 1.0).to(like.dtype)


def _attended_blocks(random_blocks: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.int64]:
    """Return (H, C, 3 + r): of each block the previous, itself, the next and the random ones; -1 for none."""
    num_heads, num_rows, num_random = random_blocks.shape
    blocks = np.full((num_heads, count, 3 + num_random), -1, dtype=np.int64)
    inner = np.arange(1, count)
    # The first block is attended to anyway.
    blocks[:, 2:, 0] = inner[1:] - 1
    blocks[:, 1:, 1] = inner
    blocks[:, 1:, 2] = inner + 1
    num_drawn = min(num_rows, count - 1)
    blocks[:, 1 : num_drawn + 1, 3:] = random_blocks[:, :num_drawn]
    return blocks
