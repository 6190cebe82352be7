"""Longformer: sliding-window attention with global tokens.

Beltagy et al. 2020, "Longformer: The Long-Document Transformer", section 3.1
(https://arxiv.org/abs/2004.05150). With projections q, k, v, separate projections q', k', v' for global
tokens, and a window of w tokens on each side:

    global token i:  softmax(q'[i] . k'[j] / sqrt(K)) v'[j]  over all tokens j
    local token i:   softmax(q[i] . k[j] / sqrt(K)) v[j]     over |i - j| <= w and all global tokens j

The first G non-padding tokens are global, at any position, so padding before a text does not change its
result.

Shape legend: B batch, T tokens, D hidden size, H heads, K head size (D = H * K), G global tokens, w window,
C blocks of b queries with S keys each (see `parts.sliding_window`).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnlens.patterns import Band
from attnlens_model.attention.heads import HeadProjections
from attnlens_model.attention.mechanism import (
    ATTENTION_WEIGHTS,
    AttentionConfig,
    AttentionOutput,
    BatchInputs,
    EncoderSizes,
    Outputs,
)
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
    """Configuration of Longformer attention.

    Attributes:
        window: Window size w on each side, in tokens. `attention_window` in published files counts both
            sides.
        num_global_tokens: Number of global tokens G. The first G non-padding tokens attend to, and are
            attended to by, every token.
        form: "blocks" takes time and memory proportional to T * w and returns weights as rows of a band.
            "dense" is for short texts: it takes time and memory proportional to T^2 and returns weights
            (B, H, T, T). The results are equal.
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
        """Validate the number of heads and that the encoder is not causal."""
        super().check_sizes(sizes)
        limit = "is not supported if is_causal=true: the window includes later tokens"
        self.require("kind", not sizes.is_causal, limit)

    @property
    def edges(self) -> tuple[int, ...]:
        """The maximum length of a single block and of full attention."""
        full_tokens = self.window + 1 + self.num_global_tokens
        return (block_size(self.window), full_tokens) if self.form == "blocks" else (full_tokens,)

    @property
    def operators(self) -> frozenset[str]:
        """ONNX operators that the modules use in addition to those of BERT."""
        local = {"Concat", "Squeeze"} if self.form == "blocks" else {"Abs", "Clip"}
        return frozenset(
            local | ({"Abs", "Clip", "CumSum", "ReduceSum"} if self.num_global_tokens else set())
        )

    def outputs(self) -> tuple[AttentionOutput, ...]:
        """Return the outputs of a layer: the weights of all heads, in the layout of `form`."""
        if self.form == "dense":
            return super().outputs()
        band = Band(self.window, self.num_global_tokens)
        return (AttentionOutput(ATTENTION_WEIGHTS, "band", self.num_heads, "one", band),)

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a randomly initialized layer module."""
        return LongformerSelfAttention(self, sizes)

    def make_shared(self, sizes: EncoderSizes) -> nn.Module:
        """Return the module that finds global tokens and computes windows."""
        return SharedWindows(self, sizes)


class LongformerInputs(NamedTuple):
    """Inputs of all layers with the same configuration."""

    local_mask: Windows | AttentionMask
    """Keys of local tokens, in blocks or as a mask (B, 1, T, T)."""
    is_local: Tensor
    """(B, T, 1), floating point: 1 for local tokens, 0 for global tokens and padding."""
    global_tokens: GlobalTokens | None


class SharedWindows(nn.Module):
    """Finds global tokens and computes the windows for all layers with the same configuration."""

    positions: Tensor

    def __init__(self, config: LongformerAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__()
        self.window, self.num_global_tokens = config.window, config.num_global_tokens
        self.is_dense = config.form == "dense"
        # Allocate on CPU explicitly so the buffer has values when the model is built on the meta device.
        self.register_buffer("positions", torch.arange(sizes.max_tokens, device="cpu"), persistent=False)

    def forward(self, inputs: BatchInputs) -> tuple[LongformerInputs]:
        """Return the inputs of `LongformerSelfAttention` in addition to hidden states."""
        mask, dtype, num_global = inputs.attention_mask, inputs.keep.dtype, self.num_global_tokens
        global_tokens = find_global_tokens(mask, num_global, dtype) if num_global else None
        local = local_tokens(mask, num_global, dtype)  # (B, T)
        positions = self.positions[: mask.shape[1]]
        if not self.is_dense:
            windows = make_windows(positions, local, global_tokens, self.window)
            return (LongformerInputs(windows, local[..., None], global_tokens),)
        keep = window_keep_mask(positions, self.window).to(dtype) * local[:, None, None, :]  # (B, 1, T, T)
        if global_tokens is not None:
            keep = keep + (inputs.keep - local[:, None, None, :])
        local_mask = AttentionMask(keep * local[:, None, :, None], prepare_mask(keep, dtype).bias)
        return (LongformerInputs(local_mask, local[..., None], global_tokens),)


class LongformerSelfAttention(HeadProjections):
    """Sliding-window self-attention with global tokens.

    The projections of global tokens are initialized randomly, like the others. The paper initializes them
    with copies of the others, because it starts from the weights of a model for short texts.
    """

    def __init__(self, config: LongformerAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__(config, sizes)
        if config.num_global_tokens == 0:
            return
        self.global_query = nn.Linear(sizes.hidden_size, sizes.hidden_size)
        self.global_key = nn.Linear(sizes.hidden_size, sizes.hidden_size)
        self.global_value = nn.Linear(sizes.hidden_size, sizes.hidden_size)
        for projection in (self.global_query, self.global_key, self.global_value):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(self, hidden_states: Tensor, inputs: LongformerInputs) -> tuple[Tensor, Outputs]:
        """Compute the attention of one layer.

        Args:
            hidden_states: (B, T, D), floating point.
            inputs: Result of `SharedWindows`.

        Returns:
            The context (B, T, D) and the weights before dropout: rows of `attnlens.patterns.Band`,
            (B, H, T, 2G + 2w + 1), or (B, H, T, T). Weights of padding queries and keys are exactly 0.
        """
        context, weights = self._attend_locally(hidden_states, inputs)  # (B, T, D)
        if inputs.global_tokens is None:
            return self.output(context), {ATTENTION_WEIGHTS: weights}
        global_weights, global_context = self._attend_globally(
            hidden_states, inputs.global_tokens
        )  # (B, H, G, T), (B, G, D)
        scatter = inputs.global_tokens.selector.transpose(-2, -1)  # (B, T, G)
        context = context + scatter @ global_context
        if isinstance(inputs.local_mask, Windows):
            weights = torch.cat([weights, global_weights.transpose(-2, -1)], dim=-1)
        else:
            weights = weights + scatter[:, None] @ global_weights
        return self.output(context), {ATTENTION_WEIGHTS: weights}

    def _attend_locally(self, hidden_states: Tensor, inputs: LongformerInputs) -> tuple[Tensor, Tensor]:
        """Return the concatenated heads (B, T, D) and the weights of local tokens, 0 for all other tokens."""
        query, key, value = self.project(hidden_states)  # (B, H, T, K) each
        num_tokens, mask = hidden_states.shape[1], inputs.local_mask
        if isinstance(mask, AttentionMask):
            weights = attention_weights(query, key, mask, self.scale)  # (B, H, T, T)
            heads = self.dropout(weights) @ value  # (B, H, T, K)
            return heads.transpose(1, 2).flatten(-2) * inputs.is_local, weights
        tokens = inputs.global_tokens
        selector = None if tokens is None else tokens.selector[:, None]  # (B, 1, G, T)
        keys, values = (
            keys_of_blocks(heads, None if selector is None else selector @ heads, mask)
            for heads in (key, value)
        )  # (B, H, C, S, K)
        blocks = window_weights(query, keys, mask, self.scale)  # (B, H, C, b, S)
        context = window_context(self.dropout(blocks), values, num_tokens)
        rows = window_rows(blocks, mask, num_tokens)  # (B, H, T, G + 2w + 1)
        # With this operand order, the exporter gives the token axis the same name as in the inputs.
        return inputs.is_local * context, inputs.is_local[:, None] * rows

    def _attend_globally(self, hidden_states: Tensor, tokens: GlobalTokens) -> tuple[Tensor, Tensor]:
        """Return the weights (B, H, G, T) and the concatenated heads (B, G, D) of global tokens.

        Keys and values are not computed for all T tokens. Instead, the key projection is folded into the
        query, q . (W x + b) = (q W) . x + q . b, and the value projection is applied to the weighted average
        of hidden states. This takes 2 * H * G instead of 2 * D dot products per hidden state.
        """
        selected = tokens.selector @ hidden_states  # (B, G, D)
        query = self.split_heads(self.global_query(selected), self.num_heads) * self.scale  # (B, H, G, K)
        per_head = (self.num_heads, self.head_dim)
        key_weight, key_bias = self.global_key.weight, self.global_key.bias
        folded = query @ torch.unflatten(key_weight, 0, per_head)  # (B, H, G, D)
        scores = folded.flatten(1, 2) @ hidden_states.transpose(-2, -1)  # (B, H * G, T)
        offset = query @ torch.unflatten(key_bias, 0, per_head)[..., None]  # (B, H, G, 1)
        scores = torch.unflatten(scores, 1, (self.num_heads, selected.shape[1])) + offset
        weights = (scores + tokens.mask.bias).softmax(dim=-1) * tokens.mask.keep  # (B, H, G, T)

        dropped = self.dropout(weights)
        averaged = dropped.flatten(1, 2) @ hidden_states  # (B, H * G, D)
        averaged = torch.unflatten(averaged, 1, (self.num_heads, selected.shape[1]))
        value_weight, value_bias = self.global_value.weight, self.global_value.bias
        heads = averaged @ torch.unflatten(value_weight, 0, per_head).transpose(-2, -1)  # (B, H, G, K)
        heads = heads + dropped.sum(dim=-1, keepdim=True) * torch.unflatten(value_bias, 0, per_head)[:, None]
        return weights, heads.transpose(1, 2).flatten(-2)  # (B, G, D)
