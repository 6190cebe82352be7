"""BigBird: block-sparse attention to global, neighboring and random blocks of tokens.

Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences" (https://arxiv.org/abs/2007.14062), section
2 and appendix D, in the variant ITC. In a text of more than 5 + 2 r blocks, the tokens of an inner block i
attend to three lists of blocks:

    (first, last), (i - 1, i, i + 1), random(i)

    softmax(q k^T / sqrt(K) + log(n)) v,  where n is how often the key's block is in the lists

A neighbor that is the first or the last block is listed once; a random block counts in addition to any other
occurrence. Tokens of the first and the last block attend to all tokens. Shorter texts use full attention. The
cost is linear in the input length.

Shape legend: B batch, T tokens, D hidden size, H heads, K head size, b block size, r random blocks. F = (5 +
2 r) b is the maximum length of full attention and E = min(T, F). Long texts are computed in C blocks of c
tokens: see `parts.block_masks`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnlens.patterns import BlockTable
from attnlens_model.attention.heads import HeadProjections
from attnlens_model.attention.mechanism import (
    ATTENTION_WEIGHTS,
    AttentionConfig,
    AttentionOutput,
    BatchInputs,
    EncoderSizes,
    Outputs,
)
from attnlens_model.attention.parts.block_masks import BlockInputs, BlockMasks, smaller
from attnlens_model.attention.parts.random_blocks import draw_random_blocks, repeat_first_block

RandomBlocks = Literal["original", "first_block"]


@dataclass(frozen=True, kw_only=True)
class BigBirdAttentionConfig(AttentionConfig):
    """Configuration of BigBird attention.

    Attributes:
        block_size: Block size b, in tokens.
        num_random_blocks: Number of random blocks r per block. Texts of up to 5 + 2 r blocks use full
            attention.
        random_blocks: "original" draws random blocks as the published implementation does, in training and
            inference. "first_block" repeats the first block, which is how transformers runs inference.
        seed: Random seed, the layer index in published models.
        table_tokens: Maximum input length for which random blocks are drawn. The drawn blocks depend on it.
        bias: Whether the query, key, value and output projections have biases.
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
        for name, minimum in (("block_size", 2), ("num_random_blocks", 1), ("table_tokens", 1)):
            self.require(name, getattr(self, name) >= minimum, f"must be at least {minimum}")
        self.require("seed", 0 <= self.seed < 2**32, "must be from 0 to 2^32 - 1")

    def check_sizes(self, sizes: EncoderSizes) -> None:
        """Validate the number of heads, the table length and the attention direction."""
        super().check_sizes(sizes)
        limit = f"must be at least {sizes.max_tokens}, the maximum input length"
        self.require("table_tokens", self.table_tokens >= sizes.max_tokens, limit)
        self.require("kind", not sizes.is_causal, "is_causal must be false: blocks attend in both directions")

    @property
    def edges(self) -> tuple[int, ...]:
        """One block, the maximum length of full attention, and that length plus one block.

        Beyond each of the last two lengths, another block becomes the last one.
        """
        full_tokens = self.table.max_full_blocks * self.block_size
        return (self.block_size, full_tokens, full_tokens + self.block_size)

    @property
    def operators(self) -> frozenset[str]:
        """ONNX operators that the modules use in addition to those of BERT."""
        return frozenset({"Abs", "Clip", "Concat", "Max", "Min", "ReduceSum", "Squeeze"})

    @property
    def table(self) -> BlockTable:
        """Blocks that each block attends to."""
        return _make_table(
            self.num_heads,
            self.table_tokens,
            self.block_size,
            self.num_random_blocks,
            self.seed if self.random_blocks == "original" else None,
        )

    def outputs(self) -> tuple[AttentionOutput, ...]:
        """Return the outputs of a layer: the weights of all heads, in block layout."""
        return (AttentionOutput(ATTENTION_WEIGHTS, "blocks", self.num_heads, "one", self.table),)

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a randomly initialized layer module."""
        return BigBirdSelfAttention(self, sizes)

    def make_shared(self, sizes: EncoderSizes) -> nn.Module:
        """Return the module that computes masks and block indices."""
        return SharedBlocks(self, sizes)


@lru_cache(maxsize=128)
def _make_table(
    num_heads: int, num_tokens: int, block_size: int, num_random: int, seed: int | None
) -> BlockTable:
    """Return the block table. If `seed` is None, all random blocks are the first block."""
    if seed is None:
        blocks = repeat_first_block(num_heads, num_tokens, block_size, num_random)
    else:
        blocks = draw_random_blocks(num_heads, num_tokens, block_size, num_random, seed)
    return BlockTable(block_size, 5 + 2 * num_random, blocks)


class SharedBlocks(nn.Module):
    """Computes the masks and block indices for all layers with the same configuration."""

    def __init__(self, config: BigBirdAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__()
        self.masks = BlockMasks(config.table, sizes.max_tokens)

    def forward(self, inputs: BatchInputs) -> tuple[BlockInputs]:
        """Return the inputs of `BigBirdSelfAttention` in addition to hidden states."""
        return (self.masks(inputs.keep),)


class Attended(NamedTuple):
    """Context and attention weights for a subset of the queries."""

    context: Tensor
    weights: Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: nn.Module) -> Attended:
    """Return softmax(query key^T + bias) value, and the softmax.

    Args:
        query: (..., Q, K), scaled.
        key: (..., N, K).
        value: (..., N, K).
        bias: Mask bias, broadcastable to (..., Q, N).
        dropout: Dropout applied to the weights before the product with the values.
    """
    weights = (query @ key.transpose(-2, -1) + bias).softmax(dim=-1)
    return Attended(dropout(weights) @ value, weights)


class BigBirdSelfAttention(HeadProjections):
    """BigBird self-attention."""

    zeros: Tensor

    def __init__(self, config: BigBirdAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__(config, sizes, bias=config.bias)
        table = config.table
        self.full_tokens = table.max_full_blocks * table.block_size
        self.num_ends = 2 * table.block_size
        # Allocate on CPU explicitly so the buffer has values when the model is built on the meta device.
        zeros = torch.zeros(table.num_slots * table.block_size, device="cpu")
        self.register_buffer("zeros", zeros, persistent=False)

    def forward(self, hidden_states: Tensor, inputs: BlockInputs) -> tuple[Tensor, Outputs]:
        """Compute the attention of one layer.

        Args:
            hidden_states: (B, T, D), floating point.
            inputs: Result of `SharedBlocks`.

        Returns:
            The context (B, T, D), and the weights before dropout in the layout of `BlockTable`,
            (B, H, T, S * b + 2b).
        """
        query, key, value = (
            self.query(hidden_states) * self.scale,
            self.key(hidden_states),
            self.value(hidden_states),
        )  # (B, T, D) each
        start = self._attend_fully(query, key, value, inputs)
        inner, ends = self._attend_in_blocks(query, key, value, inputs)
        context = self._join_contexts(start.context, inner.context, ends.context, inputs)  # (B, H, T, K)
        output: Tensor = self.output(context.transpose(1, 2).flatten(-2))
        weights = self._join_weights(start.weights, inner.weights, ends.weights, inputs)
        return output, {ATTENTION_WEIGHTS: weights}

    def _attend_fully(self, query: Tensor, key: Tensor, value: Tensor, inputs: BlockInputs) -> Attended:
        """Attend from the first E tokens to each other, which is the complete result for short texts.

        Returns:
            (B, H, E, K) and (B, H, E, E).
        """
        # Computed explicitly, because tract rejects a slice beyond the end of an axis.
        end = smaller(query.shape[1], self.full_tokens)
        first = [self.split_heads(tokens[:, :end], self.num_heads) for tokens in (query, key, value)]
        return attend(first[0], first[1], first[2], inputs.all_keys.bias[..., :end], self.dropout)

    def _attend_in_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, inputs: BlockInputs
    ) -> tuple[Attended, Attended]:
        """Attend from all blocks to their listed blocks, and from the first and the last block to all tokens.

        Returns:
            (B, H, C, c, K) and (B, H, C, c, (5 + r) c) for all blocks; (B, H, 2c, K) and (B, H, 2c, T) for
            the first and the last block.
        """
        heads = [self.split_heads(tokens, self.num_heads) for tokens in (query, key, value)]
        blocks = [tokens[:, :, inputs.queries] for tokens in heads]  # (B, H, C, c, K)
        ends = [inputs.select @ vectors.flatten(-2) for vectors in blocks]  # (B, H, 2, c K)
        keys, values = (
            self._gather_keys(vectors.flatten(-2), end, inputs)
            for vectors, end in zip(blocks[1:], ends[1:], strict=True)
        )  # (B, H, C, (5 + r) c, K)
        inner = attend(blocks[0], keys, values, inputs.mask.bias, self.dropout)
        end_queries = torch.unflatten(ends[0], -1, (-1, self.head_dim)).flatten(2, 3)  # (B, H, 2c, K)
        return inner, attend(end_queries, heads[1], heads[2], inputs.all_keys.bias, self.dropout)

    def _gather_keys(self, blocks: Tensor, ends: Tensor, inputs: BlockInputs) -> Tensor:
        """Return the keys (or values) that each block attends to.

        Args:
            blocks: (B, H, C, c K).
            ends: (B, H, 2, c K), the first and the last block of each text.
            inputs: Result of `SharedBlocks`.

        Returns:
            (B, H, C, (5 + r) c, K): first, last, previous, own, next and random blocks.
        """
        near = (inputs.near @ blocks[:, :, None]).transpose(2, 3)  # (B, H, C, 3 + r, c K)
        attended = torch.cat([ends[:, :, None] * inputs.ones, near], dim=3)  # (B, H, C, 5 + r, c K)
        return torch.unflatten(attended, -1, (-1, self.head_dim)).flatten(3, 4)

    def _join_contexts(self, start: Tensor, inner: Tensor, ends: Tensor, inputs: BlockInputs) -> Tensor:
        """Return the context (B, H, T, K): block attention for long texts, full attention for others."""
        end_blocks = torch.unflatten(ends, 2, (2, -1)).flatten(-2)  # (B, H, 2, c K)
        scatter = inputs.select.transpose(-1, -2) * inputs.is_long  # (B, 1, C, 2)
        blocks = inner.flatten(-2) * inputs.is_inner + scatter @ end_blocks  # (B, H, C, c K)
        tokens = torch.unflatten(blocks, -1, (-1, self.head_dim)).flatten(2, 3)  # (B, H, C c, K)
        short = start * (1.0 - inputs.is_long)  # (B, H, E, K)
        num_tokens = inputs.live.shape[2]
        # C c or E is at least T. Pad the shorter one with zeros.
        long = torch.cat([tokens, short * 0.0], dim=2).narrow(2, 0, num_tokens)
        return long + torch.cat([short, tokens * 0.0], dim=2).narrow(2, 0, num_tokens)

    def _join_weights(self, start: Tensor, inner: Tensor, ends: Tensor, inputs: BlockInputs) -> Tensor:
        """Return the weights in the layout of `BlockTable`."""
        kept = start * inputs.all_keys.keep[..., : start.shape[-1]] * (1.0 - inputs.is_long)
        short = _pad_columns(kept, self.zeros)[:, :, inputs.from_start]
        kept = inner * inputs.mask.keep * inputs.is_inner[..., None]
        long = _pad_columns(kept, self.zeros).flatten(2, 3)[:, :, inputs.from_blocks]
        columns = (ends * inputs.all_keys.keep * inputs.is_end).transpose(-1, -2)  # (B, H, T, 2c)
        rows = [short + long, _pad_columns(columns, self.zeros[: self.num_ends])]
        return torch.cat(rows, dim=-1) * inputs.live


def _pad_columns(weights: Tensor, zeros: Tensor) -> Tensor:
    """Pad weights (..., n) with zeros on the right to the length of `zeros`."""
    # Every runtime supports Concat and Slice; few support Pad with a dynamic length.
    padding = weights[..., :1] * zeros
    return torch.cat([weights, padding], dim=-1)[..., : len(zeros)]
