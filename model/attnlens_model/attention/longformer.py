"""Attention in a sliding window, with some tokens that attend to all and are attended to by all.

Beltagy et al. 2020, "Longformer: The Long-Document Transformer", section 3.1
(https://arxiv.org/abs/2004.05150). With queries q, keys k and values v of all tokens, others q', k' and v' of
projections of their own, the window w, and the set of global tokens:

    global token i:  softmax(q'[i] . k'[j] / sqrt(d_k)) v'[j]  over all j
    other token i:   softmax(q[i] . k[j] / sqrt(d_k)) v[j]     over the j with |i - j| <= w and the global j

The global tokens are the first G that are no padding, wherever they stand, so a text's result does not depend
on the padding before it.

Letters in shapes: B batch, T tokens, D width, H heads, K head width (D = H * K), G global tokens, w window,
C blocks of b queries with S keys each.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnlens.patterns import Band
from attnlens_model.attention.mechanism import (
    ATTENTION_WEIGHTS,
    AttentionConfig,
    AttentionOutput,
    BatchInputs,
    EncoderSizes,
    Outputs,
)
from attnlens_model.attention.parts.heads import HeadProjections
from attnlens_model.attention.parts.masks import AttentionMask, prepare_mask, window_keep_mask
from attnlens_model.attention.parts.sliding_window import (
    GlobalTokens,
    Windows,
    block_size,
    find_global_tokens,
    keys_of_blocks,
    local_tokens,
    make_windows,
    window_context,
    window_rows,
    window_weights,
)
from attnlens_model.attention.parts.weights import attention_weights


@dataclass(frozen=True, kw_only=True)
class LongformerAttentionConfig(AttentionConfig):
    """Attention in a sliding window, and global tokens.

    Attributes:
        window: w, how many places a token sees on each side. The `attention_window` of published files is the
            sum of both sides.
        num_global_tokens: G: the first so many tokens that are no padding attend to all, and all to them.
        form: "blocks", with time and memory that grow with T * w and weights as rows of a band; "dense", with
            weights (B, H, T, T) and time and memory that grow with T^2: the same numbers, for short texts.
    """

    kind: Literal["longformer"] = "longformer"
    window: int
    num_global_tokens: int = 1
    form: Literal["blocks", "dense"] = "blocks"

    def _check(self) -> None:
        super()._check()
        self.require("window", self.window >= 1, "must be at least 1")
        self.require("num_global_tokens", self.num_global_tokens >= 0, "must be at least 0")

    def check_sizes(self, sizes: EncoderSizes) -> None:
        """Check what depends on the encoder: that heads divide its width, and that it is not causal."""
        super().check_sizes(sizes)
        self.require(
            "kind", not sizes.is_causal, "must be another where is_causal=true: it sees what follows"
        )

    @property
    def edges(self) -> tuple[int, ...]:
        """The longest input of one block, and the longest in which every token sees all."""
        whole = self.window + 1 + self.num_global_tokens
        return (block_size(self.window), whole) if self.form == "blocks" else (whole,)

    @property
    def operators(self) -> frozenset[str]:
        """The operators of ONNX that the modules need beside those of BERT."""
        of_form = {"Concat", "Squeeze"} if self.form == "blocks" else {"Abs", "Clip"}
        return frozenset(
            of_form | ({"Abs", "Clip", "CumSum", "ReduceSum"} if self.num_global_tokens else set())
        )

    def outputs(self) -> tuple[AttentionOutput, ...]:
        """Return what a layer returns: the weights of all heads."""
        if self.form == "dense":
            return super().outputs()
        band = Band(self.window, self.num_global_tokens)
        return (AttentionOutput(ATTENTION_WEIGHTS, "band", self.num_heads, "one", band),)

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a fresh module of one layer."""
        return LongformerSelfAttention(self, sizes.hidden_size)

    def make_shared(self, sizes: EncoderSizes) -> nn.Module:
        """Return the module that finds the global tokens and the windows."""
        return SharedWindows(self, sizes.max_tokens)


class Sight(NamedTuple):
    """What the tokens of a batch see."""

    keys: Windows | AttentionMask
    """Of those that are not global: in blocks, or as a mask (B, 1, T, T)."""
    local: Tensor
    """(B, T, 1), floating point: 1 for a token that is neither padding nor global, else 0."""
    tokens: GlobalTokens | None
    """The global ones; None: there are none."""


class SharedWindows(nn.Module):
    """The global tokens and the windows of all layers of one configuration."""

    positions: Tensor

    def __init__(self, config: LongformerAttentionConfig, max_tokens: int) -> None:
        super().__init__()
        self.window, self.num_global_tokens = config.window, config.num_global_tokens
        self.is_dense = config.form == "dense"
        # The device is named so that the values exist even when the rest is built without storage.
        self.register_buffer("positions", torch.arange(max_tokens, device="cpu"), persistent=False)

    def forward(self, inputs: BatchInputs) -> tuple[Sight]:
        """Return what `LongformerSelfAttention` takes beside hidden states."""
        mask, dtype, number = inputs.attention_mask, inputs.keep.dtype, self.num_global_tokens
        tokens = find_global_tokens(mask, number, dtype) if number else None
        local = local_tokens(mask, number, dtype)  # (B, T)
        positions = self.positions[: mask.shape[1]]
        if not self.is_dense:
            return (Sight(make_windows(positions, local, tokens, self.window), local[..., None], tokens),)
        keep = window_keep_mask(positions, self.window).to(dtype) * local[:, None, None, :]  # (B, 1, T, T)
        if tokens is not None:
            keep = keep + (inputs.keep - local[:, None, None, :])
        seen = AttentionMask(keep * local[:, None, :, None], prepare_mask(keep, dtype).bias)
        return (Sight(seen, local[..., None], tokens),)


class LongformerSelfAttention(HeadProjections):
    """Self-attention in a sliding window with global tokens.

    The projections of global tokens are drawn like the others. The paper, which makes its model of one for
    short texts, begins with copies of the others.
    """

    def __init__(self, config: LongformerAttentionConfig, hidden_size: int) -> None:
        super().__init__(hidden_size, config.num_heads, config.dropout)
        if config.num_global_tokens == 0:
            return
        self.global_query = nn.Linear(hidden_size, hidden_size)
        self.global_key = nn.Linear(hidden_size, hidden_size)
        self.global_value = nn.Linear(hidden_size, hidden_size)
        for projection in (self.global_query, self.global_key, self.global_value):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(self, hidden_states: Tensor, sight: Sight) -> tuple[Tensor, Outputs]:
        """Attend.

        Args:
            hidden_states: (B, T, D), floating point.
            sight: what each token sees.

        Returns:
            The context (B, T, D), and the weights as they are before dropout: rows of a band
            (B, H, T, 2G + 2w + 1), see `attnlens.patterns.Band`, or (B, H, T, T). The rows and columns of
            padding are exactly 0.
        """
        context, weights = self._local(hidden_states, sight)  # (B, T, D)
        if sight.tokens is None:
            return self.output(context), {ATTENTION_WEIGHTS: weights}
        given, global_context = self._global(hidden_states, sight.tokens)  # (B, H, G, T), (B, G, D)
        back = sight.tokens.selector.transpose(-2, -1)  # (B, T, G)
        context = context + back @ global_context
        if isinstance(sight.keys, Windows):
            weights = torch.cat([weights, given.transpose(-2, -1)], dim=-1)
        else:
            weights = weights + back[:, None] @ given
        return self.output(context), {ATTENTION_WEIGHTS: weights}

    def _local(self, hidden_states: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
        """Return context (B, T, D) and weights of tokens that are not global; both are 0 for the others."""
        query, key, value = self.project(hidden_states)  # (B, H, T, K) each
        num_tokens, seen = hidden_states.shape[1], sight.keys
        if isinstance(seen, AttentionMask):
            weights = attention_weights(query, key, seen, self.scale)  # (B, H, T, T)
            heads = self.dropout(weights) @ value  # (B, H, T, K)
            return heads.transpose(1, 2).flatten(-2) * sight.local, weights
        selector = None if sight.tokens is None else sight.tokens.selector[:, None]  # (B, 1, G, T)
        keys, values = (
            keys_of_blocks(tokens, None if selector is None else selector @ tokens, seen)
            for tokens in (key, value)
        )  # (B, H, C, S, K)
        blocks = window_weights(query, keys, seen, self.scale)  # (B, H, C, b, S)
        context = window_context(self.dropout(blocks), values, num_tokens)
        rows = window_rows(blocks, seen, num_tokens)  # (B, H, T, G + 2w + 1)
        # In this order the exporter calls the axis of tokens what it calls that of the inputs.
        return sight.local * context, sight.local[:, None] * rows

    def _global(self, hidden_states: Tensor, tokens: GlobalTokens) -> tuple[Tensor, Tensor]:
        """Return weights (B, H, G, T) and context (B, G, D) of the global tokens.

        A global query is brought into the space of hidden states, q . (W x + b) = (q W) . x + q . b, and
        values are projected after they are averaged. This takes 2 * H * G products with each hidden state;
        keys and values of all T tokens would take 2 * D.
        """
        chosen = tokens.selector @ hidden_states  # (B, G, D)
        query = self.split_heads(self.global_query(chosen), self.num_heads) * self.scale  # (B, H, G, K)
        per_head = (self.num_heads, self.head_dim)
        key_weight, key_bias = self.global_key.weight, self.global_key.bias
        folded = query @ torch.unflatten(key_weight, 0, per_head)  # (B, H, G, D)
        scores = folded.flatten(1, 2) @ hidden_states.transpose(-2, -1)  # (B, H * G, T)
        offset = query @ torch.unflatten(key_bias, 0, per_head)[..., None]  # (B, H, G, 1)
        scores = torch.unflatten(scores, 1, (self.num_heads, chosen.shape[1])) + offset
        weights = (scores + tokens.mask.bias).softmax(dim=-1) * tokens.mask.keep  # (B, H, G, T)

        dropped = self.dropout(weights)
        mixed = dropped.flatten(1, 2) @ hidden_states  # (B, H * G, D)
        mixed = torch.unflatten(mixed, 1, (self.num_heads, chosen.shape[1]))
        value_weight, value_bias = self.global_value.weight, self.global_value.bias
        heads = mixed @ torch.unflatten(value_weight, 0, per_head).transpose(-2, -1)  # (B, H, G, K)
        heads = heads + dropped.sum(dim=-1, keepdim=True) * torch.unflatten(value_bias, 0, per_head)[:, None]
        return weights, heads.transpose(1, 2).flatten(-2)  # (B, G, D)
