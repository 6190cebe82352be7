"""Multi-head self-attention with scaled dot products (Vaswani et al. 2017, section 3.2).

    softmax(query key^T * scale + bias) value

Optional variants, which can be combined:

- grouped-query attention: query heads share key-value heads (Ainslie et al. 2023,
  https://arxiv.org/abs/2305.13245);
- values with a different size than queries and keys (d_v and d_k of Vaswani et al.), and no output projection
  (He & Hofmann 2023, https://arxiv.org/abs/2311.01906);
- norms of queries, keys and values, per head or over all heads. An RMSNorm of each head's query and key
  (Henry et al. 2020, https://arxiv.org/abs/2010.04245) has the form of Qwen3; Gemma 4 and EmbeddingGemma 2
  also normalize each head's value, without a weight;
- rotary position embedding (`parts.rotary`);
- position biases (`parts.alibi`, `parts.relative_bias`);
- a sliding window, applied as a mask.

Shape legend: B batch, T tokens, D hidden size, H heads, G key-value heads (G = H unless heads share keys and
values), K head size (D = H * K by default), O value head size (O = K by default).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from attnlens_model.attention.heads import HeadProjections
from attnlens_model.attention.mechanism import (
    ATTENTION_WEIGHTS,
    BatchInputs,
    EncoderSizes,
    Outputs,
    SizedHeadsConfig,
)
from attnlens_model.attention.parts.alibi import AlibiBias
from attnlens_model.attention.parts.masks import AttentionMask, prepare_mask, window_keep_mask
from attnlens_model.attention.parts.relative_bias import (
    RelativeBiasConfig,
    RelativePositionBias,
    RelativePositionBuckets,
    look_up_biases,
    make_bias_table,
)
from attnlens_model.attention.parts.rotary import RotaryConfig, RotaryTables, Rotation, rotate
from attnlens_model.attention.parts.weights import attention_weights
from attnlens_model.config_part import is_positive
from attnlens_model.norm import RMSNorm


@dataclass(frozen=True, kw_only=True)
class SoftmaxAttentionConfig(SizedHeadsConfig):
    """Configuration of scaled dot-product attention. The eps of all norms is `norm.eps` of the encoder.

    Attributes:
        head_size: Head size K. Defaults to hidden_size / num_heads.
        value_head_size: Size O of the value of one head. Defaults to K.
        num_key_value_heads: Number of key/value heads G, each shared by H / G consecutive query heads.
            Defaults to `num_heads`.
        scale: Factor applied to the dot products. Defaults to 1 / sqrt(K).
        bias: Whether the query, key, value and output projections have biases.
        key_bias: Whether the key projection has a bias. Ignored if `bias` is False.
        output_projection: Whether the concatenated heads are projected. If False, they are the output, and
            num_heads * value_head_size must equal hidden_size.
        output_bias: Whether the output projection has a bias. Defaults to `bias`.
        head_norm: Whether to apply an RMSNorm to each head's query and key, before rotation.
        value_norm: Whether to apply an RMSNorm without a weight to each head's value.
        window: Maximum distance between a query and its keys, in tokens. If None, it is unlimited.
        rotary: Rotary position embedding of queries and keys. If None, they are not rotated.
        relative_bias: Learned position bias added to scores, if any.
        alibi: Whether to add linear biases (ALiBi) to scores.
        projection_norm: Whether to apply a LayerNorm over all heads to projected queries and keys.
    """

    kind: Literal["softmax"] = "softmax"
    head_size: int | None = None
    value_head_size: int | None = None
    num_key_value_heads: int | None = None
    scale: float | None = None
    bias: bool = True
    key_bias: bool = True
    output_projection: bool = True
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
        for name in ("head_size", "value_head_size", "window"):
            value = getattr(self, name)
            self.require(name, value is None or value >= 1, "must be at least 1, or null")
        shared = self.num_key_value_heads
        is_divisor = shared is None or (shared >= 1 and self.num_heads % shared == 0)
        self.require("num_key_value_heads", is_divisor, f"must divide num_heads={self.num_heads}, or be null")
        is_valid = self.scale is None or is_positive(self.scale)
        self.require("scale", is_valid, "must be greater than 0, or null")
        is_valid = self.output_projection or not self.output_bias
        self.require("output_bias", is_valid, "must be false or null if output_projection is false")
        is_valid = not (self.alibi and self.relative_bias)
        self.require("alibi", is_valid, "must be false if relative_bias is set: choose one position bias")

    def check_sizes(self, sizes: EncoderSizes) -> None:
        """Validate the number and sizes of the heads against the encoder and the options."""
        if self.head_size is None:
            super().check_sizes(sizes)
        head_dim = self.head_dim(sizes.hidden_size)
        limit = f"must be null for the odd head size {head_dim}: rotation applies to pairs of components"
        self.require("rotary", self.rotary is None or head_dim % 2 == 0, limit)
        width = self.num_heads * self.value_dim(sizes.hidden_size)
        limit = (
            f"must be true, because num_heads * value_head_size = {width} is not "
            f"hidden_size={sizes.hidden_size}"
        )
        self.require("output_projection", self.output_projection or width == sizes.hidden_size, limit)

    def value_dim(self, hidden_size: int) -> int:
        """Return O, the size of the value of one head."""
        return self.value_head_size or self.head_dim(hidden_size)

    @property
    def operators(self) -> frozenset[str]:
        """ONNX operators that the modules use in addition to those of BERT."""
        # Rotation swaps the halves of a head, and grouped-query attention repeats heads.
        concatenation = {"Concat"} if self.rotary or self.num_key_value_heads else set()
        window = {"Abs", "Clip"} if self.window else set()
        alibi = {"Abs"} if self.alibi else set()
        norms = {"ReduceSum", "Sqrt"} if self.head_norm or self.value_norm else set()
        return frozenset(concatenation | window | alibi | norms)

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a randomly initialized layer module."""
        return MultiHeadSelfAttention(self, sizes)

    def make_shared(self, sizes: EncoderSizes) -> nn.Module:
        """Return the module that computes the mask, the position bias and the rotation."""
        return SharedSoftmaxInputs(self, sizes)


class SharedSoftmaxInputs(nn.Module):
    """Computes the mask, position bias and rotation for all layers with the same configuration."""

    positions: Tensor

    def __init__(self, config: SoftmaxAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__()
        max_tokens, bias, rotary = sizes.max_tokens, config.relative_bias, config.rotary
        self.relative_bias = self.buckets = None
        if bias is not None and bias.per_layer:
            self.buckets = RelativePositionBuckets(bias, max_tokens)
        elif bias is not None:
            self.relative_bias = RelativePositionBias(bias, config.num_heads, max_tokens)
        self.alibi = AlibiBias(config.num_heads, max_tokens) if config.alibi else None
        head_dim = config.head_dim(sizes.hidden_size)
        self.rotary = None if rotary is None else RotaryTables(rotary, head_dim, max_tokens)
        self.window = config.window
        if self.window is not None:
            # Allocate on CPU explicitly so the buffer has values when the model is built on the meta device.
            self.register_buffer("positions", torch.arange(max_tokens, device="cpu"), persistent=False)

    def forward(
        self, inputs: BatchInputs
    ) -> tuple[AttentionMask, Tensor | None, Rotation | None, Tensor | None]:
        """Return the inputs of `MultiHeadSelfAttention` in addition to hidden states."""
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
    """Multi-head self-attention with scaled dot products."""

    def __init__(self, config: SoftmaxAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__(
            config,
            sizes,
            bias=config.bias,
            key_bias=config.key_bias,
            output_bias=config.output_bias,
            value_head_dim=config.value_head_size,
            output_projection=config.output_projection,
        )
        if config.scale is not None:
            self.scale = config.scale
        eps, head_dim = sizes.layer_norm_eps, self.head_dim
        self.query_norm = RMSNorm(head_dim, eps) if config.head_norm else None
        self.key_norm = RMSNorm(head_dim, eps) if config.head_norm else None
        value_dim = config.value_dim(sizes.hidden_size)
        self.value_norm = RMSNorm(value_dim, eps, weight=False) if config.value_norm else None
        self.query_projection_norm = self.key_projection_norm = None
        if config.projection_norm:
            self.query_projection_norm = nn.LayerNorm(self.num_heads * head_dim, eps=eps)
            self.key_projection_norm = nn.LayerNorm(self.num_key_value_heads * head_dim, eps=eps)
        bias = config.relative_bias
        self.relative_bias = (
            make_bias_table(bias, self.num_heads) if bias is not None and bias.per_layer else None
        )

    def forward(
        self,
        hidden_states: Tensor,
        keep_mask: Tensor | AttentionMask | None = None,
        position_bias: Tensor | None = None,
        rotation: Rotation | None = None,
        buckets: Tensor | None = None,
    ) -> tuple[Tensor, Outputs]:
        """Compute the attention of one layer.

        Args:
            hidden_states: (B, T, D), floating point.
            keep_mask: See `attention_weights`.
            position_bias: See `attention_weights`.
            rotation: Rotation of queries and keys, if any.
            buckets: (T, T, 1) int64, query by key: relative position buckets, if the layer has its own
                biases.

        Returns:
            The context (B, T, D), and the weights (B, H, T, T) before dropout.
        """
        query, key, value = self.project(hidden_states)  # (B, H, T, K), (B, G, T, K), (B, G, T, O)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        if self.relative_bias is not None and buckets is not None:
            position_bias = look_up_biases(buckets, self.relative_bias)  # (1, H, T, T)
        key, value = self.repeat_heads(key), self.repeat_heads(value)  # (B, H, T, K), (B, H, T, O)
        weights = attention_weights(query, key, keep_mask, self.scale, position_bias)  # (B, H, T, T)
        return self.combine(weights, value), {ATTENTION_WEIGHTS: weights}

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project (B, T, D) and normalize: query (B, H, T, K), key (B, G, T, K), value (B, G, T, O)."""
        query, key = self.query(hidden_states), self.key(hidden_states)  # (B, T, H * K), (B, T, G * K)
        if self.query_projection_norm is not None and self.key_projection_norm is not None:
            query, key = self.query_projection_norm(query), self.key_projection_norm(key)
        query, key = self.split_heads(query, self.num_heads), self.split_heads(key, self.num_key_value_heads)
        value = self.split_heads(self.value(hidden_states), self.num_key_value_heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.value_norm is not None:
            value = self.value_norm(value)
        return query, key, value

    def repeat_heads(self, shared: Tensor) -> Tensor:
        """(B, G, T, K) -> (B, H, T, K), also for the size O."""
        if self.num_key_value_heads == self.num_heads:
            return shared
        times = self.num_heads // self.num_key_value_heads
        # Slices and one Concat, because some ONNX runtimes lack Expand.
        heads = [shared[:, head : head + 1] for head in range(self.num_key_value_heads)]
        return torch.cat([head for head in heads for _ in range(times)], dim=1)
