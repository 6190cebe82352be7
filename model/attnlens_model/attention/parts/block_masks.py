"""Indices and masks of BigBird attention, computed once per batch.

Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences" (https://arxiv.org/abs/2007.14062). Blocks
are counted by position, including padding. The "last block" of a text is the last one that contains a
non-padding token, so a result never depends on padding to the right. Because it differs between the texts of
a batch, it is represented by masks and selectors rather than by shapes.

Shape legend: B batch, T tokens, H heads, b block size, r random blocks, M maximum input length. C blocks of c
tokens are computed: ceil(T / b) blocks of b tokens if T exceeds the number of tokens that full attention
covers, otherwise 2 blocks of 2 tokens.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attnlens.patterns import BlockTable
from attnlens_model.attention.parts.masks import AttentionMask, prepare_mask

# Index in (previous, own, next, random, ...).
_NEXT = 2


def smaller(first: int, second: int) -> int:
    """Return the smaller of two lengths without specializing a traced graph to one of them."""
    result: int = torch.sym_min(first, second)  # type: ignore[no-untyped-call]
    return result


def larger(first: int, second: int) -> int:
    """Return the larger of two lengths without specializing a traced graph to one of them."""
    result: int = torch.sym_max(first, second)  # type: ignore[no-untyped-call]
    return result


class BlockInputs(NamedTuple):
    """Inputs shared by all layers with the same configuration. All except `queries` are floating point."""

    queries: Tensor
    """(C, c) int64: token positions of each block. Positions past the end are clamped to the last one."""
    near: Tensor
    """(H, 3 + r, C, C): one-hot selectors of the previous, own, next and random blocks of each block."""
    mask: AttentionMask
    """(B, H, C, 1, (5 + r) c): mask of the keys in the first, last, previous, own, next and random blocks."""
    all_keys: AttentionMask
    """(B, 1, 1, T): padding mask."""
    select: Tensor
    """(B, 1, 2, C): one-hot selectors of the first and the last block."""
    is_inner: Tensor
    """(B, 1, C, 1): 1 for blocks of long texts other than the first and the last."""
    is_end: Tensor
    """(B, 1, 2 c, 1): 1 for the tokens in the first and the last block of long texts."""
    is_long: Tensor
    """(B, 1, 1, 1): 1 for texts with more blocks than full attention covers."""
    ones: Tensor
    """(C, 1, 1)."""
    from_blocks: Tensor
    """(T,) int64: index of each token among the C * c tokens of all blocks."""
    from_start: Tensor
    """(T,) int64: index of each token among the tokens that full attention covers."""
    live: Tensor
    """(B, 1, T, 1): 1 for tokens, 0 for padding."""


class BlockMasks(nn.Module):
    """Computes `BlockInputs` for a batch."""

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
        numbers = np.arange(count)
        # Masks of block pairs (i, j): i >= j; i > j; i > j + 1; and block i only exists in long texts.
        distance = numbers[:, None] - numbers
        is_far = np.broadcast_to(numbers[:, None] >= table.max_full_blocks, distance.shape)
        constants = {
            "places": np.arange(max_tokens),
            "numbers": numbers,
            "offsets": np.arange(size),
            "last_of_start": np.array([self.full_tokens - 1]),
            "attended": np.maximum(blocks, 0).swapaxes(1, 2),
            "is_used": blocks >= 0,
            "reaches": np.stack([*(distance >= steps for steps in range(3)), is_far]),
            "is_next": np.arange(blocks.shape[-1]) == _NEXT,
            "ones": np.ones((count, 1, 1), dtype=bool),
        }
        for name, array in constants.items():
            dtype = torch.get_default_dtype() if array.dtype == bool else torch.int64
            # Allocate on CPU explicitly so the buffers have values when the model is built on the meta
            # device.
            tensor = torch.tensor(array, device="cpu").to(dtype)
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, keep: Tensor) -> BlockInputs:
        """Return the layer inputs for a keep-mask (B, 1, 1, T), 1 for tokens and 0 for padding."""
        live = keep[:, 0, 0]  # (B, T)
        num_tokens = keep.shape[-1]
        positions = self.places[:num_tokens]
        blocks, offsets = self._blocks(num_tokens)
        queries, end = blocks[:, None] * self.block_size + offsets, positions[-1:]  # (C, c), (1,)
        live_blocks = live[:, torch.minimum(queries, end)] * _exist(queries, end, live)  # (B, C, c)
        select, is_long, next_is_inner = self._select(live_blocks, blocks)
        attended = self.attended[:, :, blocks][..., None]  # (H, 3 + r, C, 1)
        keys = (attended * self.block_size + offsets).transpose(1, 2)  # (H, C, 3 + r, c)
        exist = _exist(keys, end, live) * self.is_used[:, blocks][..., None]
        # The last block has its own keys, so it is not also counted as the next block.
        near = 1.0 - self.is_next * (1.0 - next_is_inner)  # (B, 1, C, 3 + r)
        keys = torch.minimum(keys, end)
        near = (live[:, keys] * exist * near[..., None]).flatten(-2)  # (B, H, C, (3 + r) c)
        live_ends = select @ live_blocks[:, None]  # (B, 1, 2, c)
        visible = torch.cat([near[..., :1] * 0.0 + live_ends.flatten(-2)[:, :, None], near], dim=-1)
        return BlockInputs(
            queries=torch.minimum(queries, end),
            near=(1.0 - (attended - blocks).to(keep.dtype).abs()).clamp(0.0, 1.0),
            mask=prepare_mask(visible[:, :, :, None], keep.dtype),
            all_keys=prepare_mask(keep, keep.dtype),
            select=select,
            is_inner=(1.0 - select.sum(dim=2, keepdim=True)).transpose(-1, -2) * is_long,
            is_end=live_ends.flatten(-2)[..., None] * is_long,
            is_long=is_long,
            ones=self.ones[blocks],
            from_blocks=torch.minimum(positions, (blocks[-1:] + 1) * (offsets[-1:] + 1) - 1),
            from_start=torch.minimum(positions, self.last_of_start),
            live=keep.transpose(-1, -2),
        )

    def _blocks(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the indices of the C blocks and the c token offsets within a block.

        If no text can be long, there are 2 blocks of 2 tokens, which cost almost nothing. Empty tensors would
        cost nothing, but some runtimes reject them, and the tracer treats an axis of length 1 as constant.
        """
        count = (num_tokens + self.block_size - 1) // self.block_size
        # 0 if no text can be long. tract cannot infer an axis whose size is a product with a sum.
        times = num_tokens // (self.full_tokens + 1)
        blocks = self.numbers[: larger(2, smaller(count, times * self.max_tokens))]
        return blocks, self.offsets[: larger(2, smaller(self.block_size, times * self.block_size))]

    def _select(self, live_blocks: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `select` and `is_long` of `BlockInputs`, and a mask of blocks before the last two.

        The third result is (B, 1, C, 1): 1 if the next block is not the last.
        """
        counts = live_blocks.sum(dim=-1)[:, None, None]  # (B, 1, 1, C)
        reaches = self.reaches[:, numbers][:, :, numbers]  # (4, C, C)
        # Repeated, because ONNX Runtime 1.31 on CUDA multiplies (4, 1, 1, C) and (4, C, C) incorrectly.
        repeated = counts * (self.reaches[:, :1, :1] * 0.0 + 1.0)  # (B, 4, 1, C)
        after = (repeated @ reaches).clamp(0.0, 1.0)  # (B, 4, 1, C)
        last = after[:, :1] - after[:, 1:2]  # (B, 1, 1, C)
        first = (1.0 - numbers.to(last.dtype)).clamp(0.0, 1.0)  # (C,)
        is_long = after[:, 3:, :, :1]
        select = torch.cat([first * (is_long * 0.0 + 1.0), last], dim=2)
        return select, is_long, after[:, 2:3].transpose(-1, -2)


def _exist(positions: Tensor, end: Tensor, like: Tensor) -> Tensor:
    """Return 1 for positions up to `end` and 0 for later ones, in the dtype of `like`."""
    # Computed in fp32, because fp16 cannot represent all positions.
    return ((end - positions).to(torch.float32) + 1.0).clamp(0.0, 1.0).to(like.dtype)


def _attended_blocks(random_blocks: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.int64]:
    """Return the previous, own, next and random blocks of each block: (H, C, 3 + r), padded with -1."""
    num_heads, num_rows, num_random = random_blocks.shape
    blocks = np.full((num_heads, count, 3 + num_random), -1, dtype=np.int64)
    inner = np.arange(1, count)
    # Block 1 has no separate previous block, since every block attends to the first one.
    blocks[:, 2:, 0] = inner[1:] - 1
    blocks[:, 1:, 1] = inner
    blocks[:, 1:, 2] = inner + 1
    num_drawn = min(num_rows, count - 1)
    blocks[:, 1 : num_drawn + 1, 3:] = random_blocks[:, :num_drawn]
    return blocks
