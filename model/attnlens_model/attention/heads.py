"""Base class of layer modules: query, key, value and output projections.

Shape legend: B batch, T tokens, D hidden size, H heads, G key-value heads (G = H unless heads share keys and
values), K head size (D = H * K by default).
"""

import math

import torch
from torch import Tensor, nn

from attnlens_model.attention.mechanism import AttentionConfig, EncoderSizes


class HeadProjections(nn.Module):
    """Base class for layer modules with the projections of multi-head attention.

    Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2. Each projection is a separate module,
    with Xavier-uniform weights (Glorot & Bengio 2010) and zero biases.
    """

    def __init__(
        self,
        config: AttentionConfig,
        sizes: EncoderSizes,
        *,
        bias: bool = True,
        key_bias: bool = True,
        output_bias: bool | None = None,
    ) -> None:
        """Create the projections.

        Args:
            config: Configuration of the layer, which determines H, G, K and the dropout.
            sizes: Sizes of the encoder.
            bias: Whether the projections have biases.
            key_bias: Whether the key projection has a bias. Ignored if `bias` is False.
            output_bias: Whether the output projection has a bias. Defaults to `bias`.

        Raises:
            ConfigError: The configuration does not fit the encoder.
        """
        super().__init__()
        config.check_sizes(sizes)
        self.num_heads, self.num_key_value_heads = config.num_heads, config.num_shared_heads
        self.head_dim = config.head_dim(sizes.hidden_size)
        self.scale = 1.0 / math.sqrt(self.head_dim)
        width, shared_width = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        self.query = nn.Linear(sizes.hidden_size, width, bias=bias)
        self.key = nn.Linear(sizes.hidden_size, shared_width, bias=bias and key_bias)
        self.value = nn.Linear(sizes.hidden_size, shared_width, bias=bias)
        self.output = nn.Linear(width, sizes.hidden_size, bias=bias if output_bias is None else output_bias)
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the projections from the global random generator."""
        for projection in (self.query, self.key, self.value, self.output):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project (B, T, D) to the query (B, H, T, K), the key (B, G, T, K) and the value (B, G, T, K)."""
        query, key = self.query(hidden_states), self.key(hidden_states)  # (B, T, H * K), (B, T, G * K)
        query, key = self.split_heads(query, self.num_heads), self.split_heads(key, self.num_key_value_heads)
        return query, key, self.split_heads(self.value(hidden_states), self.num_key_value_heads)

    def combine(self, weights: Tensor, value: Tensor) -> Tensor:
        """Return the context (B, T, D) for weights (B, H, T, T) and values (B, H, T, K)."""
        heads = self.dropout(weights) @ value  # (B, H, T, K)
        concatenated = heads.transpose(1, 2).flatten(-2)  # (B, T, H * K)
        context: Tensor = self.output(concatenated)
        return context

    def split_heads(self, projected: Tensor, num_heads: int) -> Tensor:
        """(B, T, H * K) -> (B, H, T, K)."""
        split = torch.unflatten(projected, -1, (num_heads, self.head_dim))  # (B, T, H, K)
        return split.transpose(1, 2)  # (B, H, T, K)
