"""The projections to the heads of queries, keys and values, and back: what most mechanisms have in common.

Letters in shapes: B batch, T tokens, D width, H heads, K head width (D = H * K in most families), G heads of
keys and values (G = H unless heads share them).
"""

import math

import torch
from torch import Tensor, nn

from attnlens_model.norm import RMSNorm


class HeadProjections(nn.Module):
    """The four projections of multi-head attention (Vaswani et al. 2017, section 3.2.2).

    Query, key, value and output are separate modules. A fresh one is Xavier-uniform in each of the four
    (Glorot & Bengio 2010), with zero biases. Fewer heads of keys and values than of queries are grouped-query
    attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245). An RMSNorm of each head's query and key
    bounds the scores (QK-norm, Henry et al. 2020, https://arxiv.org/abs/2010.04245, in Qwen3's form). In
    Gemma 4 and EmbeddingGemma 2 each head's value has one too, without a weight.
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
        key_bias: bool = True,
        output_bias: bool | None = None,
        head_norm_eps: float | None = None,
        value_norm_eps: float | None = None,
        projection_norm_eps: float | None = None,
    ) -> None:
        """Make the four projections.

        Args:
            hidden_size: D.
            num_heads: H, a divisor of D where `head_dim` is None.
            dropout: probability of dropping a weight, in training.
            head_dim: K; None: D / H.
            num_key_value_heads: G, a divisor of H; None: H.
            scale: what the dot products of queries and keys are multiplied by; None: 1 / sqrt(K).
            bias: whether the projections have biases.
            key_bias: whether that to keys has one where the others do.
            output_bias: whether that of the output has one; None: as `bias` says.
            head_norm_eps: of the norms of each head's query and key; None: there are none.
            value_norm_eps: of the norm of each head's value, which has no weight; None: there is none.
            projection_norm_eps: of the LayerNorms of projected queries and keys, over all heads; None: none.

        Raises:
            ValueError: H does not divide D, or G not H.
        """
        super().__init__()
        num_shared = num_key_value_heads or num_heads
        whole = hidden_size if head_dim is None else num_heads * head_dim
        _require_divisor("num_heads", num_heads, "hidden_size", whole)
        _require_divisor("num_key_value_heads", num_shared, "num_heads", num_heads)
        self.num_heads, self.num_key_value_heads = num_heads, num_shared
        self.head_dim = head_dim or hidden_size // num_heads
        self.scale = 1.0 / math.sqrt(self.head_dim) if scale is None else scale
        width, shared_width = num_heads * self.head_dim, num_shared * self.head_dim
        self.query = nn.Linear(hidden_size, width, bias=bias)
        self.key = nn.Linear(hidden_size, shared_width, bias=bias and key_bias)
        self.value = nn.Linear(hidden_size, shared_width, bias=bias)
        self.output = nn.Linear(width, hidden_size, bias=bias if output_bias is None else output_bias)
        eps = head_norm_eps
        self.query_norm = None if eps is None else RMSNorm(self.head_dim, eps)
        self.key_norm = None if eps is None else RMSNorm(self.head_dim, eps)
        eps = value_norm_eps
        self.value_norm = None if eps is None else RMSNorm(self.head_dim, eps, weight=False)
        over_heads = projection_norm_eps
        self.query_projection_norm = None if over_heads is None else nn.LayerNorm(width, eps=over_heads)
        self.key_projection_norm = None if over_heads is None else nn.LayerNorm(shared_width, eps=over_heads)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw fresh weights from the global random generator."""
        for projection in (self.query, self.key, self.value, self.output):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query (B, H, T, K), key and value (B, G, T, K) of (B, T, D)."""
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

    def combine(self, weights: Tensor, value: Tensor) -> Tensor:
        """Return the context (B, T, D) of weights (B, H, T, T) and values (B, H, T, K)."""
        heads = self.dropout(weights) @ value  # (B, H, T, K)
        merged = heads.transpose(1, 2).flatten(-2)  # (B, T, H * K)
        output: Tensor = self.output(merged)
        return output

    def split_heads(self, projected: Tensor, num_heads: int) -> Tensor:
        """(B, T, H * K) -> (B, H, T, K)."""
        split = torch.unflatten(projected, -1, (num_heads, self.head_dim))  # (B, T, H, K)
        return split.transpose(1, 2)  # (B, H, T, K)

    def repeat_heads(self, shared: Tensor) -> Tensor:
        """(B, G, T, K) -> (B, H, T, K)."""
        if self.num_key_value_heads == self.num_heads:
            return shared
        times = self.num_heads // self.num_key_value_heads
        # Slices and one Concat, which every ONNX runtime has, unlike Expand.
        heads = [shared[:, head : head + 1] for head in range(self.num_key_value_heads)]
        return torch.cat([head for head in heads for _ in range(times)], dim=1)


def _require_divisor(name: str, value: int, whole_name: str, whole: int) -> None:
    if value < 1 or whole % value:
        raise ValueError(f"{name}={value} does not divide {whole_name}={whole}: choose a divisor")
