"""Attention between blocks of tokens: the first and the last, its neighbours, and some drawn at random.

Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences" (https://arxiv.org/abs/2007.14062), the form
"ITC". The cost grows with the length of a text, not with its square.

Letters in shapes: B batch, T tokens, D width, H heads, K head width, b block size, r random blocks, F =
(5 + 2 r) b places up to which a text attends fully, E places of T and of F. C blocks and c places of a block:
as many as T needs, and b; or 2 and 2 where no text of the batch can be long.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnlens.patterns import BlockTable
from attnlens_model.attention.mechanism import (
    ATTENTION_WEIGHTS,
    AttentionConfig,
    AttentionOutput,
    BatchInputs,
    EncoderSizes,
    Outputs,
)
from attnlens_model.attention.parts.block_masks import BlockMasks, BlockParts, smaller
from attnlens_model.attention.parts.heads import HeadProjections
from attnlens_model.attention.parts.random_blocks import draw_random_blocks, first_block_repeated

RandomBlocks = Literal["original", "first_block"]


@dataclass(frozen=True, kw_only=True)
class BigBirdAttentionConfig(AttentionConfig):
    """Attention between blocks.

    Attributes:
        block_size: b.
        num_random_blocks: r. Texts of up to 5 + 2 r blocks attend fully.
        random_blocks: "original": drawn as the published implementation does for training and use alike.
            "first_block": the first block r more times, which is what transformers computes outside of
            training.
        seed: of the drawing; in published models the number of the layer.
        table_tokens: the longest text that blocks are drawn for, on which the drawing depends.
        bias: whether the projections to queries, keys, values and output have biases.
    """

    kind: Literal["big_bird"] = "big_bird"
    block_size: int = 64
    num_random_blocks: int = 3
    random_blocks: RandomBlocks = "original"
    seed: int = 0
    table_tokens: int = 4096
    bias: bool = True

    def _check(self) -> None:
        super()._check()
        for name, least in (("block_size", 2), ("num_random_blocks", 1), ("table_tokens", 1)):
            self.require(name, getattr(self, name) >= least, f"must be at least {least}")
        self.require("seed", 0 <= self.seed < 2**32, "must be from 0 to 2^32 - 1")

    def check_sizes(self, sizes: EncoderSizes) -> None:
        """Check what depends on the encoder: heads divide its width, and the table is long enough."""
        super().check_sizes(sizes)
        limit = f"must be at least {sizes.max_tokens}, the longest input"
        self.require("table_tokens", self.table_tokens >= sizes.max_tokens, limit)
        self.require("kind", not sizes.is_causal, "is_causal must be false: blocks attend in both directions")

    @property
    def edges(self) -> tuple[int, ...]:
        """Lengths at which its computation changes.

        They are a block, the longest text that attends fully, and the shortest block of a text beyond that:
        of a text that is one token longer, another block is the last.
        """
        whole = self.table.max_full_blocks * self.block_size
        return (self.block_size, whole, whole + self.block_size)

    @property
    def operators(self) -> frozenset[str]:
        """The operators of ONNX that the modules need beside those of BERT."""
        return frozenset({"Abs", "Clip", "Concat", "Max", "Min", "ReduceSum", "Squeeze"})

    @property
    def table(self) -> BlockTable:
        """Which blocks attend to which."""
        return _table(
            self.num_heads,
            self.table_tokens,
            self.block_size,
            self.num_random_blocks,
            self.seed if self.random_blocks == "original" else None,
        )

    def outputs(self) -> tuple[AttentionOutput, ...]:
        """Return what a layer returns: the weights of all heads, in the layout of blocks."""
        return (AttentionOutput(ATTENTION_WEIGHTS, "blocks", self.num_heads, "one", self.table),)

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a fresh module of one layer."""
        return BigBirdSelfAttention(
            sizes.hidden_size, self.table, num_heads=self.num_heads, dropout=self.dropout, bias=self.bias
        )

    def make_shared(self, sizes: EncoderSizes) -> nn.Module:
        """Return the module that computes masks and which keys are looked up."""
        return SharedBlocks(self.table, sizes.max_tokens)


@lru_cache(maxsize=128)
def _table(num_heads: int, num_tokens: int, block_size: int, num_random: int, seed: int | None) -> BlockTable:
    """Return the table; the first block in all places where `seed` is None. Equal ones are one."""
    if seed is None:
        blocks = first_block_repeated(num_heads, num_tokens, block_size, num_random)
    else:
        blocks = draw_random_blocks(num_heads, num_tokens, block_size, num_random, seed)
    return BlockTable(block_size, 5 + 2 * num_random, blocks)


class SharedBlocks(nn.Module):
    """What all layers of one configuration need of the mask."""

    def __init__(self, table: BlockTable, max_tokens: int) -> None:
        super().__init__()
        self.masks = BlockMasks(table, max_tokens)

    def forward(self, inputs: BatchInputs) -> tuple[BlockParts]:
        """Return what `BigBirdSelfAttention` takes beside hidden states."""
        return (self.masks(inputs.keep),)


class Attended(NamedTuple):
    """What a part of the tokens attended to."""

    context: Tensor
    weights: Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: nn.Module) -> Attended:
    """Return softmax(query key^T + bias) value, and the softmax (Vaswani et al. 2017, section 3.2).

    Args:
        query: (..., Q, K), scaled.
        key: (..., N, K).
        value: as `key`.
        bias: broadcastable to (..., Q, N).
        dropout: of the weights.
    """
    weights = (query @ key.transpose(-2, -1) + bias).softmax(dim=-1)
    return Attended(dropout(weights) @ value, weights)


class BigBirdSelfAttention(HeadProjections):
    """Self-attention between blocks.

    Of a text of more than 5 + 2 r blocks, a token of block i from the second to the last but one attends to

        {0, last} + {i - 1, i, i + 1} + random(i)

    where the sets hold blocks; a block of the first set is not in the second, but one of the third counts
    once more if it is in the others: softmax(q k^T / sqrt(K) + log(number of times)). Tokens of the first and
    the last block attend to all (Zaheer et al. 2020, section 2 and appendix D).
    """

    zeros: Tensor

    def __init__(
        self, hidden_size: int, table: BlockTable, *, num_heads: int, dropout: float, bias: bool
    ) -> None:
        super().__init__(hidden_size, num_heads, dropout, bias=bias)
        self.full_tokens = table.max_full_blocks * table.block_size
        self.num_ends = 2 * table.block_size
        # The device is named so that the values exist even when the rest is built without storage.
        zeros = torch.zeros(table.num_slots * table.block_size, device="cpu")
        self.register_buffer("zeros", zeros, persistent=False)

    def forward(self, hidden_states: Tensor, parts: BlockParts) -> tuple[Tensor, Outputs]:
        """Attend.

        Args:
            hidden_states: (B, T, D), floating point.
            parts: what `SharedBlocks` returns for the batch.

        Returns:
            The context (B, T, D), and the weights (B, H, T, S * b + 2b) of `BlockTable`, as they are before
            dropout.
        """
        query, key, value = (
            self.query(hidden_states) * self.scale,
            self.key(hidden_states),
            self.value(hidden_states),
        )  # (B, T, D) each
        start = self._start(query, key, value, parts)
        inner, ends = self._blocks(query, key, value, parts)
        context = self._joined(start.context, inner.context, ends.context, parts)  # (B, H, T, K)
        output: Tensor = self.output(context.transpose(1, 2).flatten(-2))
        return output, {ATTENTION_WEIGHTS: self._rows(start.weights, inner.weights, ends.weights, parts)}

    def _start(self, query: Tensor, key: Tensor, value: Tensor, parts: BlockParts) -> Attended:
        """Attend from the first E places to them: all there is to do for texts that are not long.

        Returns:
            (B, H, E, K) and (B, H, E, E), E = min(T, F).
        """
        # Computed, since tract refuses a slice that ends beyond its axis.
        end = smaller(query.shape[1], self.full_tokens)
        first = [self.split_heads(tokens[:, :end], self.num_heads) for tokens in (query, key, value)]
        return attend(first[0], first[1], first[2], parts.all_keys.bias[..., :end], self.dropout)

    def _blocks(
        self, query: Tensor, key: Tensor, value: Tensor, parts: BlockParts
    ) -> tuple[Attended, Attended]:
        """Attend from all blocks to some, and from the first and the last to all.

        Returns:
            (B, H, C, c, K) and (B, H, C, c, (5 + r) c); (B, H, 2c, K) and (B, H, 2c, T).
        """
        heads = [self.split_heads(tokens, self.num_heads) for tokens in (query, key, value)]
        blocks = [tokens[:, :, parts.queries] for tokens in heads]  # (B, H, C, c, K)
        ends = [parts.select @ vectors.flatten(-2) for vectors in blocks]  # (B, H, 2, c K)
        keys, values = (
            self._attended(vectors.flatten(-2), end, parts)
            for vectors, end in zip(blocks[1:], ends[1:], strict=True)
        )  # (B, H, C, (5 + r) c, K)
        inner = attend(blocks[0], keys, values, parts.mask.bias, self.dropout)
        end_queries = torch.unflatten(ends[0], -1, (-1, self.head_dim)).flatten(2, 3)  # (B, H, 2c, K)
        return inner, attend(end_queries, heads[1], heads[2], parts.all_keys.bias, self.dropout)

    def _attended(self, blocks: Tensor, ends: Tensor, parts: BlockParts) -> Tensor:
        """Return the keys, or the values, of each block of queries.

        Args:
            blocks: (B, H, C, c K).
            ends: (B, H, 2, c K), the first and the last block of each text.
            parts: see `forward`.

        Returns:
            (B, H, C, (5 + r) c, K): the ends, then the previous block, itself, the next and the random ones.
        """
        near = (parts.near @ blocks[:, :, None]).transpose(2, 3)  # (B, H, C, 3 + r, c K)
        attended = torch.cat([ends[:, :, None] * parts.ones, near], dim=3)  # (B, H, C, 5 + r, c K)
        return torch.unflatten(attended, -1, (-1, self.head_dim)).flatten(3, 4)

    def _joined(self, start: Tensor, inner: Tensor, ends: Tensor, parts: BlockParts) -> Tensor:
        """Return the context (B, H, T, K): by blocks in long texts, of the start in others."""
        chosen = torch.unflatten(ends, 2, (2, -1)).flatten(-2)  # (B, H, 2, c K)
        spread = parts.select.transpose(-1, -2) * parts.is_long  # (B, 1, C, 2)
        blocks = inner.flatten(-2) * parts.is_inner + spread @ chosen  # (B, H, C, c K)
        tokens = torch.unflatten(blocks, -1, (-1, self.head_dim)).flatten(2, 3)  # (B, H, C c, K)
        short = start * (1.0 - parts.is_long)  # (B, H, E, K)
        num_tokens = parts.live.shape[2]
        # C c or E is at least T. The shorter of the two is 0 where it ends.
        long = torch.cat([tokens, short * 0.0], dim=2).narrow(2, 0, num_tokens)
        return long + torch.cat([short, tokens * 0.0], dim=2).narrow(2, 0, num_tokens)

    def _rows(self, start: Tensor, inner: Tensor, ends: Tensor, parts: BlockParts) -> Tensor:
        """Return the weights in the layout of `BlockTable`."""
        kept = start * parts.all_keys.keep[..., : start.shape[-1]] * (1.0 - parts.is_long)
        short = _widened(kept, self.zeros)[:, :, parts.from_start]
        kept = inner * parts.mask.keep * parts.is_inner[..., None]
        long = _widened(kept, self.zeros).flatten(2, 3)[:, :, parts.from_blocks]
        given = (ends * parts.all_keys.keep * parts.is_end).transpose(-1, -2)  # (B, H, T, 2c)
        return torch.cat([short + long, _widened(given, self.zeros[: self.num_ends])], dim=-1) * parts.live


def _widened(weights: Tensor, zeros: Tensor) -> Tensor:
    """Return weights (..., n) with zeros on the right, as many columns as there are zeros."""
    # Every runtime has Concat and Slice; few have Pad with a length that is computed.
    more = weights[..., :1] * zeros
    return torch.cat([weights, more], dim=-1)[..., : len(zeros)]
