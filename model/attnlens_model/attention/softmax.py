"""Multi-head self-attention: scaled dot products, perhaps with rotation, biases by distance, or a window.

Letters in shapes: B batch, T tokens, D width, H heads, K head width (D = H * K in most families), G heads of
keys and values (G = H unless heads share them).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from attnlens_model.attention.mechanism import (
    ATTENTION_WEIGHTS,
    AttentionConfig,
    BatchInputs,
    EncoderSizes,
    Outputs,
)
from attnlens_model.attention.parts.alibi import AlibiBias
from attnlens_model.attention.parts.heads import HeadProjections
from attnlens_model.attention.parts.masks import AttentionMask, prepare_mask, window_keep_mask
from attnlens_model.attention.parts.relative_bias import (
    RelativeBiasConfig,
    RelativePositionBias,
    RelativePositionBuckets,
    bias_table,
    biases_of,
)
from attnlens_model.attention.parts.rotary import RotaryConfig, RotaryTables, Rotation, rotate
from attnlens_model.attention.parts.weights import attention_weights
from attnlens_model.config_part import is_positive


@dataclass(frozen=True, kw_only=True)
class SoftmaxAttentionConfig(AttentionConfig):
    """Scaled dot-product attention, by itself or with rotation, a bias by distance, or a window.

    Attributes:
        head_size: K, the width of one head; None means hidden_size / num_heads.
        num_key_value_heads: how many heads keys and values have, each shared by equally many consecutive
            heads of queries; None means `num_heads`.
        scale: what the dot products of queries and keys are multiplied by; None means 1 / sqrt(K).
        bias: whether the projections to queries, keys, values and output have biases.
        key_bias: whether that to keys has one where the others do.
        output_bias: whether that to the output has one; None means as `bias` says.
        head_norm: whether the query and the key of each head go through an RMSNorm, before rotation; its eps
            is `norm.eps`.
        value_norm: whether the value of each head goes through an RMSNorm without a weight; its eps is
            `norm.eps`.
        window: a token sees the keys at most so many places away; None means all.
        rotary: how queries and keys are turned by their positions; None means that they are not.
        relative_bias: the biases by distance that are added to scores; None means none.
        alibi: whether the distance of two tokens is taken off their score, times a slope of each head.
        projection_norm: whether projected queries and keys go through a LayerNorm each, over all heads.
    """

    kind: Literal["softmax"] = "softmax"
    head_size: int | None = None
    num_key_value_heads: int | None = None
    scale: float | None = None
    bias: bool = True
    key_bias: bool = True
    output_bias: bool | None = None
    head_norm: bool = False
    value_norm: bool = False
    window: int | None = None
    rotary: RotaryConfig | None = None
    relative_bias: RelativeBiasConfig | None = None
    alibi: bool = False
    projection_norm: bool = False

    def _check(self) -> None:
        super()._check()
        for name in ("head_size", "window"):
            value = getattr(self, name)
            self.require(name, value is None or value >= 1, "must be at least 1, or null")
        shared = self.num_key_value_heads
        divides = shared is None or (shared >= 1 and self.num_heads % shared == 0)
        self.require("num_key_value_heads", divides, f"must divide num_heads={self.num_heads}, or be null")
        is_usable = self.scale is None or is_positive(self.scale)
        self.require("scale", is_usable, "must be greater than 0, or null")
        has_one = not (self.alibi and self.relative_bias)
        self.require(
            "alibi", has_one, "must be false where there is a relative_bias: scores get one of the two"
        )

    def check_sizes(self, sizes: EncoderSizes) -> None:
        """Check what depends on the encoder: that heads divide its width, and that they can be rotated."""
        if self.head_size is None:
            super().check_sizes(sizes)
        width = self.head_dim(sizes.hidden_size)
        limit = f"must be null for heads of the odd width {width}: rotation pairs the components"
        self.require("rotary", self.rotary is None or width % 2 == 0, limit)

    def head_dim(self, hidden_size: int) -> int:
        """Return K, the width of one head."""
        return self.head_size or hidden_size // self.num_heads

    @property
    def num_shared_heads(self) -> int:
        """How many heads keys and values have."""
        return self.num_key_value_heads or self.num_heads

    @property
    def reach(self) -> int | None:
        """How many places away a token sees a key at most; None: as far as there are keys."""
        return self.window

    @property
    def _has_biases_per_layer(self) -> bool:
        return self.relative_bias is not None and self.relative_bias.per_layer

    @property
    def operators(self) -> frozenset[str]:
        """The operators of ONNX that the modules need beside those of BERT."""
        # Concat swaps the halves of queries and keys, and repeats heads that are shared.
        joining = {"Concat"} if self.rotary or self.num_key_value_heads else set()
        # The distance of two tokens, cut at the window.
        window = {"Abs", "Clip"} if self.window else set()
        alibi = {"Abs"} if self.alibi else set()
        norms = {"ReduceSum", "Sqrt"} if self.head_norm or self.value_norm else set()
        return frozenset(joining | window | alibi | norms)

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a fresh module of one layer."""
        return MultiHeadSelfAttention(
            sizes.hidden_size,
            self.num_heads,
            self.dropout,
            head_dim=self.head_size,
            num_key_value_heads=self.num_key_value_heads,
            scale=self.scale,
            bias=self.bias,
            projection_norm_eps=sizes.layer_norm_eps if self.projection_norm else None,
            key_bias=self.key_bias,
            relative_bias=self.relative_bias if self._has_biases_per_layer else None,
            output_bias=self.output_bias,
            head_norm_eps=sizes.layer_norm_eps if self.head_norm else None,
            value_norm_eps=sizes.layer_norm_eps if self.value_norm else None,
        )

    def make_shared(self, sizes: EncoderSizes) -> nn.Module:
        """Return the module that computes mask, bias and rotation."""
        return SharedSoftmaxParts(self, sizes)


class SharedSoftmaxParts(nn.Module):
    """The mask, the bias by distance and the rotation of all layers of one configuration."""

    positions: Tensor

    def __init__(self, config: SoftmaxAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__()
        limit, bias, rotary = sizes.max_tokens, config.relative_bias, config.rotary
        self.relative_bias = self.buckets = None
        if bias is not None and bias.per_layer:
            self.buckets = RelativePositionBuckets(bias, limit)
        elif bias is not None:
            self.relative_bias = RelativePositionBias(bias, config.num_heads, limit)
        self.alibi = AlibiBias(config.num_heads, limit) if config.alibi else None
        head_dim = config.head_dim(sizes.hidden_size)
        self.rotary = None if rotary is None else RotaryTables(rotary, head_dim, limit)
        self.window = config.window
        if self.window is not None:
            # The device is named so that the values exist even when the rest is built without storage.
            self.register_buffer("positions", torch.arange(limit, device="cpu"), persistent=False)

    def forward(
        self, inputs: BatchInputs
    ) -> tuple[AttentionMask, Tensor | None, Rotation | None, Tensor | None]:
        """Return what `MultiHeadSelfAttention` takes beside hidden states."""
        num_tokens, keep = inputs.attention_mask.shape[1], inputs.keep
        if self.window is not None:
            keep = keep * window_keep_mask(self.positions[:num_tokens], self.window).to(keep.dtype)
        rotation = None if self.rotary is None else self.rotary(num_tokens)
        mask = prepare_mask(keep, keep.dtype)
        bias = self.alibi if self.relative_bias is None else self.relative_bias
        position_bias = None if bias is None else bias(num_tokens)
        buckets = None if self.buckets is None else self.buckets(num_tokens)
        return mask, position_bias, rotation, buckets


class MultiHeadSelfAttention(HeadProjections):
    """Self-attention with H heads; `num_heads=1` is plain attention."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        head_dim: int | None = None,
        num_key_value_heads: int | None = None,
        scale: float | None = None,
        bias: bool = True,
        key_bias: bool = True,
        output_bias: bool | None = None,
        head_norm_eps: float | None = None,
        value_norm_eps: float | None = None,
        projection_norm_eps: float | None = None,
        relative_bias: RelativeBiasConfig | None = None,
    ) -> None:
        """Make the projections, as `HeadProjections`, and a table for biases of the layer's own, if any."""
        super().__init__(
            hidden_size,
            num_heads,
            dropout,
            head_dim=head_dim,
            num_key_value_heads=num_key_value_heads,
            scale=scale,
            bias=bias,
            key_bias=key_bias,
            output_bias=output_bias,
            head_norm_eps=head_norm_eps,
            value_norm_eps=value_norm_eps,
            projection_norm_eps=projection_norm_eps,
        )
        self.relative_bias = None if relative_bias is None else bias_table(relative_bias, num_heads)

    def forward(
        self,
        hidden_states: Tensor,
        keep_mask: Tensor | AttentionMask | None = None,
        position_bias: Tensor | None = None,
        rotation: Rotation | None = None,
        buckets: Tensor | None = None,
    ) -> tuple[Tensor, Outputs]:
        """Attend.

        Args:
            hidden_states: (B, T, D), floating point.
            keep_mask: as for `attention_weights`.
            position_bias: as for `attention_weights`.
            rotation: turns queries and keys; None leaves them as they are.
            buckets: (T, T, 1) int64, of query and key, where the layer has biases of its own.

        Returns:
            The context (B, T, D), and the weights (B, H, T, T) as they are before dropout.
        """
        query, key, value = self.project(hidden_states)  # (B, H, T, K), (B, G, T, K) twice
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        if self.relative_bias is not None and buckets is not None:
            position_bias = biases_of(buckets, self.relative_bias)  # (1, H, T, T)
        key, value = self.repeat_heads(key), self.repeat_heads(value)  # (B, H, T, K)
        weights = attention_weights(query, key, keep_mask, self.scale, position_bias)  # (B, H, T, T)
        return self.combine(weights, value), {ATTENTION_WEIGHTS: weights}
