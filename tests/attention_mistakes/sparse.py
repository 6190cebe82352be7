"""Mistakes in attention in windows and between blocks.

Letters in shapes: B batch, T tokens, H heads, G global tokens, C blocks of c places, r random blocks.
"""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attention_mistakes.mistake import Changed, Mistake
from attnlens_model import Encoder
from attnlens_model.attention import longformer
from attnlens_model.attention.longformer import LongformerSelfAttention, SharedWindows
from attnlens_model.attention.parts import sliding_window
from attnlens_model.attention.parts.block_masks import BlockMasks
from attnlens_model.attention.parts.masks import AttentionMask, prepare_mask
from attnlens_model.attention.parts.sliding_window import GlobalTokens


def _window(change: int) -> Any:
    def wrong(right: Any, positions: Tensor, local: Tensor, tokens: Any, window: int) -> Any:
        # The blocks stay as they are: only which keys a query sees is another.
        assert sliding_window.block_size(window + change) == sliding_window.block_size(window)
        return right(positions, local, tokens, window + change)._replace(window=window)

    return wrong


def _global_key_twice(right: Any, positions: Tensor, local: Tensor, tokens: Any, window: int) -> Any:
    return right(positions, local + tokens.selector.sum(dim=1), tokens, window)


def _local_projections(right: Any, self: Any, *args: Any) -> Any:
    local = {"global_query": self.query, "global_key": self.key, "global_value": self.value}
    return right(Changed(self, **local), *args)


def _local_query(right: Any, self: Any, *args: Any) -> Any:
    return right(Changed(self, global_query=self.query), *args)


def _no_scale(right: Any, self: Any, *args: Any) -> Any:
    return right(Changed(self, scale=1.0), *args)


def _places(right: Any, self: Any, inputs: Any) -> Any:
    find, rest = sliding_window.find_global_tokens, sliding_window.local_tokens

    def first_places(mask: Tensor, number: int, dtype: torch.dtype) -> GlobalTokens:
        selector = find(torch.ones_like(mask), number, dtype).selector * mask.to(dtype)[:, None]  # (B, G, T)
        exist, live = selector.sum(dim=-1, keepdim=True), prepare_mask(mask[:, None, None, :], dtype)
        return GlobalTokens(selector, exist, AttentionMask(live.keep * exist[:, None], live.bias))

    def others(mask: Tensor, number: int, dtype: torch.dtype) -> Tensor:
        return mask.to(dtype) * rest(torch.ones_like(mask), number, dtype)

    with (
        mock.patch.object(longformer, "find_global_tokens", first_places),
        mock.patch.object(longformer, "local_tokens", others),
    ):
        return right(self, inputs)


LONGFORMER = (
    Mistake("a window one too small", longformer, "make_windows", _window(-1)),
    Mistake("a window one too large", longformer, "make_windows", _window(1)),
    Mistake("a global key in the window as well", longformer, "make_windows", _global_key_twice),
    Mistake(
        "global tokens projected as others", LongformerSelfAttention, "_attend_globally", _local_projections
    ),
    Mistake("global queries projected as others", LongformerSelfAttention, "_attend_globally", _local_query),
    Mistake("global queries without scale", LongformerSelfAttention, "_attend_globally", _no_scale),
    Mistake("global places instead of tokens", SharedWindows, "forward", _places),
)


def _table_of_layer_0(right: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with mock.patch.object(self, "shared_of_layer", [0] * len(self.shared_of_layer)):
        return right(self, *args, **kwargs)


def _last_of_batch(right: Any, self: Any, live_blocks: Tensor, numbers: Tensor) -> Any:
    select, _, may_be_next = right(self, live_blocks * 0.0 + 1.0, numbers)
    return select, right(self, live_blocks, numbers)[1], may_be_next


def _long_by_batch(right: Any, self: Any, live_blocks: Tensor, numbers: Tensor) -> Any:
    select, _, may_be_next = right(self, live_blocks, numbers)
    return select, right(self, live_blocks * 0.0 + 1.0, numbers)[1], may_be_next


def _long_too_soon(right: Any, self: Any, keep: Tensor) -> Any:
    far = torch.cat([self.reaches[3:, 1:], self.reaches[3:, -1:]], dim=1)
    reaches = torch.cat([self.reaches[:3], far])
    return right(Changed(self, full_tokens=self.full_tokens - self.block_size, reaches=reaches), keep)


def _last_block_twice(right: Any, self: Any, keep: Tensor) -> Any:
    return right(Changed(self, is_next=self.is_next * 0.0), keep)


def _once(right: Any, self: Any, keep: Tensor) -> Any:
    parts = right(self, keep)
    count = parts.select.shape[-1]
    random = self.attended[:, 3:, :count].transpose(1, 2)  # (H, C, r)
    distance = (random - self.numbers[:count, None]).abs().to(keep.dtype)
    near, first = (2.0 - distance).clamp(0.0, 1.0), (1.0 - random.to(keep.dtype)).clamp(0.0, 1.0)
    # Blocks beyond the text are masked anyway.
    last = parts.select[:, 0, 1][:, torch.minimum(random, self.numbers[count - 1])]  # (B, H, C, r)
    only = (1.0 - near) * (1.0 - first) * (1.0 - last)
    slots = torch.unflatten(parts.mask.keep, -1, (5 + random.shape[-1], -1))  # (B, H, C, 1, 5 + r, c)
    kept = torch.cat([slots[..., :5, :], slots[..., 5:, :] * only[:, :, :, None, :, None]], dim=-2)
    return parts._replace(mask=prepare_mask(kept.flatten(-2), kept.dtype))


BIG_BIRD = (
    Mistake("the table of another layer", Encoder, "forward", _table_of_layer_0),
    Mistake("the last block of the batch", BlockMasks, "_select", _last_of_batch),
    Mistake("short texts in block-sparse batches with long texts", BlockMasks, "_select", _long_by_batch),
    Mistake("texts in blocks that are one block too short", BlockMasks, "forward", _long_too_soon),
    Mistake("a last block that counts as the next, too", BlockMasks, "forward", _last_block_twice),
    Mistake("repeated blocks counted once", BlockMasks, "forward", _once),
)
