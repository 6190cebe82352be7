"""Base class of layer modules: query, key, value and output projections.

Shape legend: B batch, T tokens, D hidden size, H heads, G key-value heads (G = H unless heads share keys and
values), K head size (D = H * K by default), O value head size (O = K by default).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from attnlens_model.attention.mechanism import AttentionConfig, EncoderSizes


class HeadProjections(nn.Module):
    """Base class for layer modules with the projections of multi-head attention.

    Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2. Each projection is a separate module,
    with Xavier-uniform weights (Glorot & Bengio 2010) and zero biases.
    """

    output: Any
    """`nn.Linear`, or `nn.Identity` without an output projection."""

    def __init__(
        self,
        config: AttentionConfig,
        sizes: EncoderSizes,
        *,
        bias: bool = True,
        key_bias: bool = True,
        output_bias: bool | None = None,
        value_head_dim: int | None = None,
        output_projection: bool = True,
    ) -> None:
        """Create the projections.

        Args:
            config: Configuration of the layer, which determines H, G, K and the dropout.
            sizes: Sizes of the encoder.
            bias: Whether the projections have biases.
            key_bias: Whether the key projection has a bias. Ignored if `bias` is False.
            output_bias: Whether the output projection has a bias. Defaults to `bias`.
            value_head_dim: O. Defaults to K.
            output_projection: Whether to project the concatenated heads. If False, `output` is the identity.

        Raises:
            ConfigError: The configuration does not fit the encoder.
        """
        super().__init__()
        config.check_sizes(sizes)
        self.num_heads, self.num_key_value_heads = config.num_heads, config.num_shared_heads
        self.head_dim = config.head_dim(sizes.hidden_size)
        self.scale = 1.0 / math.sqrt(self.head_dim)
        value_dim = self.head_dim if value_head_dim is None else value_head_dim
        hidden_size, num_shared = sizes.hidden_size, self.num_key_value_heads
        self.query = nn.Linear(hidden_size, self.num_heads * self.head_dim, bias=bias)
        self.key = nn.Linear(hidden_size, num_shared * self.head_dim, bias=bias and key_bias)
        self.value = nn.Linear(hidden_size, num_shared * value_dim, bias=bias)
        has_bias = bias if output_bias is None else output_bias
        self.output = (
            nn.Linear(self.num_heads * value_dim, hidden_size, bias=has_bias)
            if output_projection
            else nn.Identity()
        )
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the projections from the global random generator."""
        for projection in (self.query, self.key, self.value, self.output):
            if not isinstance(projection, nn.Linear):
                continue
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project (B, T, D) to the query (B, H, T, K), the key (B, G, T, K) and the value (B, G, T, O)."""
        query, key = self.query(hidden_states), self.key(hidden_states)  # (B, T, H * K), (B, T, G * K)
        query, key = self.split_heads(query, self.num_heads), self.split_heads(key, self.num_key_value_heads)
        return query, key, self.split_heads(self.value(hidden_states), self.num_key_value_heads)

    def combine(self, weights: Tensor, value: Tensor) -> Tensor:
        """Return the context (B, T, D) for weights (B, H, T, T) and values (B, H, T, O)."""
        heads = self.dropout(weights) @ value  # (B, H, T, O)
        concatenated = heads.transpose(1, 2).flatten(-2)  # (B, T, H * O)
        context: Tensor = self.output(concatenated)
        return context

    def split_heads(self, projected: Tensor, num_heads: int) -> Tensor:
        """(B, T, H * K) -> (B, H, T, K), also for the size O."""
        size = projected.shape[-1] // num_heads
        split = torch.unflatten(projected, -1, (num_heads, size))  # (B, T, H, K)
        return split.transpose(1, 2)  # (B, H, T, K)
