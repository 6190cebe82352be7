"""One layer: attention and feed-forward, each followed by residual and LayerNorm.

Letters in shapes: B batch, T tokens, D width, H heads.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attnlens_model.attention import AttentionMask, MultiHeadSelfAttention
from attnlens_model.config import EncoderConfig


def gelu(x: Tensor) -> Tensor:
    """Gaussian error linear unit, exact: x * Phi(x) (Hendrycks & Gimpel 2016)."""
    # Exactly this order: ONNX Runtime fuses it, and other orders crash or degrade other runtimes.
    return x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of `gelu` (Hendrycks & Gimpel 2016)."""
    return x * 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": torch.relu,
}


class FeedForward(nn.Module):
    """Two projections with an activation between, for each token alone (Vaswani et al. 2017, section 3.3)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = _ACTIVATIONS[config.activation]
        for projection in (self.up, self.down):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        output: Tensor = self.down(self.activation(self.up(hidden_states)))
        return output


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each followed by residual and LayerNorm (post-LN)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = MultiHeadSelfAttention(
            config.hidden_size, config.num_heads, config.attention_dropout
        )
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self, hidden_states: Tensor, mask: AttentionMask, position_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(B, T, D) -> (B, T, D), and the attention weights (B, H, T, T)."""
        attended, weights = self.attention(hidden_states, mask, position_bias)
        hidden_states = self.attention_norm(hidden_states + self.dropout(attended))
        hidden_states = self.output_norm(hidden_states + self.dropout(self.feed_forward(hidden_states)))
        return hidden_states, weights
