"""Multi-head self-attention, and nothing else: embeddings, residuals and norms are in encoder.py.

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V

Vaswani et al. 2017, "Attention Is All You Need", section 3.2. It is written out instead of calling a fused
kernel because the weights are a result here, and in the arithmetic forms that every ONNX runtime understands:
a mask is a number that is added, never -inf and never a boolean.

Letters in shapes: B batch, T tokens, D width, H heads, K head width (D = H * K in most families), G heads of
keys and values (G = H unless heads share them).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnlens_model.rotary import Rotation, rotate

MASKED_SCORE = -(2.0**15)
"""What is added to the score of a masked key, in every dtype; float16 and bfloat16 hold it exactly.

The exponential of a number below -104 is exactly 0 in fp32: a masked score may be up to 32,664 above the best
live one. In float16 it may be as low as -32,736 before the sum is infinite. Lower numbers are no use to
runtimes that compute in half precision: in bfloat16 OpenVINO returns wrong numbers at -1e20 and below, and
less accurate ones at -1e9.
"""


class AttentionMask(NamedTuple):
    """A keep-mask in the two forms that attention needs, so that all layers share one computation.

    Both are floating point and broadcast to (B, H, T, T).
    """

    keep: Tensor
    """1 where a query may attend to a key, else 0."""
    bias: Tensor
    """0 where a query may attend to a key, else `MASKED_SCORE`."""


def prepare_mask(keep_mask: Tensor, dtype: torch.dtype) -> AttentionMask:
    """Turn a keep-mask (bool, int or float; True or 1 = may attend) into both forms, in floating `dtype`."""
    keep = keep_mask.to(dtype)
    return AttentionMask(keep, (1.0 - keep) * MASKED_SCORE)


def causal_keep_mask(positions: Tensor) -> Tensor:
    """Return the (T, T) keep-mask in which a token attends to itself and to those before it.

    `positions` is (T,) int64: 0, 1, 2 ... The mask is float32, which counts exactly where half precision does
    not. Clamping the distance is plain arithmetic, which more ONNX runtimes have than Trilu or a comparison.
    """
    exact = positions.to(torch.float32)
    distance = exact[:, None] - exact[None, :]  # (T, T)
    return (distance + 1.0).clamp(0.0, 1.0)


def window_keep_mask(positions: Tensor, window: int) -> Tensor:
    """Return the (T, T) keep-mask in which a token attends to those at most `window` places away.

    `positions` and the mask are as for `causal_keep_mask`.
    """
    exact = positions.to(torch.float32)
    distance = (exact[:, None] - exact[None, :]).abs()  # (T, T)
    return (window + 1.0 - distance).clamp(0.0, 1.0)


def attention_weights(
    query: Tensor,
    key: Tensor,
    keep_mask: Tensor | AttentionMask | None,
    scale: float,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Return softmax(query key^T * scale + position_bias) over the keys that the mask keeps.

    Args:
        query: (B, H, T, K), floating point.
        key: (B, H, T, K), same dtype.
        keep_mask: True or 1 where a query may attend to a key, else False or 0; broadcastable to
            (B, H, T, T). An `AttentionMask` is one that was prepared before. None keeps all.
        scale: what the dot products are multiplied by: 1 / sqrt(K) in the paper.
        position_bias: same dtype, broadcastable to (B, H, T, T); None adds nothing.

    Returns:
        (B, H, T, T), same dtype. A row sums to 1, is exactly 0 at masked keys, and all 0 if every key is
        masked.
    """
    scaled = query if scale == 1.0 else query * scale
    scores = scaled @ key.transpose(-2, -1)  # (B, H, T, T)
    if position_bias is not None:
        scores = scores + position_bias
    if keep_mask is None:
        return scores.softmax(dim=-1)
    mask = keep_mask if isinstance(keep_mask, AttentionMask) else prepare_mask(keep_mask, scores.dtype)
    # The softmax of a fully masked row is not zero: the product makes it so and changes no other row.
    return (scores + mask.bias).softmax(dim=-1) * mask.keep


class MultiHeadSelfAttention(nn.Module):
    """Self-attention with H heads (Vaswani et al. 2017, section 3.2.2).

    Query, key, value and output are separate projections. A fresh one is Xavier-uniform in each of the four
    (Glorot & Bengio 2010), with zero biases. `num_heads=1` is plain attention. Fewer heads of keys and values
    than of queries are grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245).
    """

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
    ) -> None:
        """Make the four projections.

        Args:
            hidden_size: D.
            num_heads: H, a divisor of D where `head_dim` is None.
            dropout: probability of dropping a weight, in training.
            head_dim: K; None: D / H.
            num_key_value_heads: G, a divisor of H; None: H.
            scale: see `attention_weights`; None: 1 / sqrt(K).
            bias: whether the projections have biases.

        Raises:
            ValueError: H does not divide D, or G not H.
        """
        super().__init__()
        if num_heads < 1 or (head_dim is None and hidden_size % num_heads):
            raise ValueError(
                f"num_heads={num_heads} does not divide hidden_size={hidden_size}: choose a divisor"
            )
        num_shared = num_key_value_heads or num_heads
        if num_heads % num_shared:
            raise ValueError(
                f"num_key_value_heads={num_shared} does not divide num_heads={num_heads}: choose a divisor"
            )
        self.num_heads, self.num_key_value_heads = num_heads, num_shared
        self.head_dim = head_dim or hidden_size // num_heads
        self.scale = 1.0 / math.sqrt(self.head_dim) if scale is None else scale
        width, shared_width = num_heads * self.head_dim, num_shared * self.head_dim
        self.query = nn.Linear(hidden_size, width, bias=bias)
        self.key = nn.Linear(hidden_size, shared_width, bias=bias)
        self.value = nn.Linear(hidden_size, shared_width, bias=bias)
        self.output = nn.Linear(width, hidden_size, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw fresh weights from the global random generator."""
        for projection in (self.query, self.key, self.value, self.output):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        hidden_states: Tensor,
        keep_mask: Tensor | AttentionMask | None = None,
        position_bias: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            hidden_states: (B, T, D), floating point.
            keep_mask: as for `attention_weights`.
            position_bias: as for `attention_weights`.
            rotation: turns queries and keys; None leaves them as they are.

        Returns:
            The output (B, T, D), and the weights (B, H, T, T) as they are before dropout.
        """
        query, key, value = self.project(hidden_states)  # (B, H, T, K), (B, G, T, K) twice
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        if self.num_key_value_heads < self.num_heads:
            key, value = self._repeat_heads(key), self._repeat_heads(value)  # (B, H, T, K)
        weights = attention_weights(query, key, keep_mask, self.scale, position_bias)  # (B, H, T, T)
        return self.combine(weights, value), weights

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query (B, H, T, K), key and value (B, G, T, K) of (B, T, D)."""
        return (
            self._split_heads(self.query(hidden_states), self.num_heads),
            self._split_heads(self.key(hidden_states), self.num_key_value_heads),
            self._split_heads(self.value(hidden_states), self.num_key_value_heads),
        )

    def combine(self, weights: Tensor, value: Tensor) -> Tensor:
        """Return the output (B, T, D) of weights (B, H, T, T) and values (B, H, T, K)."""
        context = self.dropout(weights) @ value  # (B, H, T, K)
        merged = context.transpose(1, 2).flatten(-2)  # (B, T, H * K)
        output: Tensor = self.output(merged)
        return output

    def _split_heads(self, projected: Tensor, num_heads: int) -> Tensor:
        split = torch.unflatten(projected, -1, (num_heads, self.head_dim))  # (B, T, H, K)
        return split.transpose(1, 2)  # (B, H, T, K)

    def _repeat_heads(self, shared: Tensor) -> Tensor:
        times = self.num_heads // self.num_key_value_heads
        # Slices and one Concat, which every ONNX runtime has, unlike Expand.
        heads = [shared[:, head : head + 1] for head in range(self.num_key_value_heads)]
        return torch.cat([head for head in heads for _ in range(times)], dim=1)
