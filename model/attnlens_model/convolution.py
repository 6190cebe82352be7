"""Convolution over the embeddings, in parallel to the first layer.

He et al. 2020, published implementation of DeBERTa v2 (models with at least 900 million parameters).

Shape legend: B batch, T tokens, D hidden size.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from attnlens_model.activations import ACTIVATIONS, Activation
from attnlens_model.config_part import ConfigPart


@dataclass(frozen=True, kw_only=True)
class ConvolutionConfig(ConfigPart, path="convolution"):
    """Settings of the convolution.

    Attributes:
        kernel_size: Kernel size; odd.
        groups: Number of channel groups; a divisor of `hidden_size`.
        activation: An activation of the feed-forward network, or "tanh".
    """

    kernel_size: int
    groups: int = 1
    activation: Literal[Activation, "tanh"] = "tanh"

    def _check(self) -> None:
        size = self.kernel_size
        self.require("kernel_size", size >= 1 and size % 2 == 1, "must be odd and at least 1")

    def check_sizes(self, hidden_size: int) -> None:
        """Validate the settings against the hidden size.

        Raises:
            ConfigError: `groups` does not divide `hidden_size`.
        """
        divides = self.groups >= 1 and hidden_size % self.groups == 0
        self.require("groups", divides, f"must divide hidden_size={hidden_size}")


class NeighborConvolution(nn.Module):
    """LayerNorm(hidden_states + activation(conv(embeddings))).

    Padding tokens are zeroed, like the padding of the convolution, so that results do not depend on the
    position of a text in its row.
    """

    def __init__(self, config: ConvolutionConfig, hidden_size: int, eps: float, dropout: float) -> None:
        super().__init__()
        size = config.kernel_size
        self.conv = nn.Conv1d(hidden_size, hidden_size, size, padding=size // 2, groups=config.groups)
        self.norm = nn.LayerNorm(hidden_size, eps=eps)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(dropout)
        nn.init.xavier_uniform_(self.conv.weight)
        if self.conv.bias is not None:
            nn.init.zeros_(self.conv.bias)

    def forward(self, embedded: Tensor, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """Add the convolution of the embeddings to the output of the first layer.

        Args:
            embedded: Input of the first layer, (B, T, D).
            hidden_states: Output of the first layer, (B, T, D).
            attention_mask: (B, T), 1 for tokens and 0 for padding.

        Returns:
            (B, T, D).
        """
        live = embedded * attention_mask.to(embedded.dtype)[:, :, None]
        convolved = self.conv(live.transpose(1, 2)).transpose(1, 2)  # (B, T, D)
        output: Tensor = self.norm(hidden_states + self.activation(self.dropout(convolved)))
        return output
