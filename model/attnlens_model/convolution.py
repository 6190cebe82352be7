"""A convolution beside the first layer, which shows every token its neighbours.

He et al. 2020, the published implementation of DeBERTa version 2 (models of 900 million parameters and more).

Letters in shapes: B batch, T tokens, D width.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from attnlens_model.activations import ACTIVATIONS, Activation
from attnlens_model.config_part import ConfigPart


@dataclass(frozen=True, kw_only=True)
class ConvolutionConfig(ConfigPart, path="convolution"):
    """A convolution beside the first layer.

    Attributes:
        kernel_size: how many embeddings it joins; odd.
        groups: in how many groups it splits their components; a divisor of `hidden_size`.
        activation: as that of the feed-forward part, or "tanh".
    """

    kernel_size: int
    groups: int = 1
    activation: Literal[Activation, "tanh"] = "tanh"

    def _check(self) -> None:
        size = self.kernel_size
        self.require("kernel_size", size >= 1 and size % 2 == 1, "must be odd and at least 1")

    def check_sizes(self, hidden_size: int) -> None:
        """Check what depends on the encoder's width.

        Raises:
            ConfigError: the groups do not divide it.
        """
        divides = self.groups >= 1 and hidden_size % self.groups == 0
        self.require("groups", divides, f"must divide hidden_size={hidden_size}")


class NeighbourConvolution(nn.Module):
    """LayerNorm(hidden states + activation(convolution of the embeddings)).

    Padding counts as zeros, as what lies beyond the ends does, so a text gets the same wherever it stands.
    """

    def __init__(self, config: ConvolutionConfig, width: int, eps: float, dropout: float) -> None:
        super().__init__()
        size = config.kernel_size
        self.conv = nn.Conv1d(width, width, size, padding=size // 2, groups=config.groups)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(dropout)
        nn.init.xavier_uniform_(self.conv.weight)
        if self.conv.bias is not None:
            nn.init.zeros_(self.conv.bias)

    def forward(self, embedded: Tensor, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """Add to the first layer's output what the convolution makes of its input.

        Args:
            embedded: (B, T, D), what the first layer read.
            hidden_states: (B, T, D), what it returned.
            attention_mask: (B, T), 1 for a token and 0 for padding.

        Returns:
            (B, T, D).
        """
        live = embedded * attention_mask.to(embedded.dtype)[:, :, None]
        neighbours = self.conv(live.transpose(1, 2)).transpose(1, 2)  # (B, T, D)
        output: Tensor = self.norm(hidden_states + self.activation(self.dropout(neighbours)))
        return output
