"""A convolution beside the first layer, which shows every token its neighbours.

He et al. 2020, the published implementation of DeBERTa version 2 (models of 900 million parameters and more).

Letters in shapes: B batch, T tokens, D width.
"""

from torch import Tensor, nn

from attnlens_model.activations import ACTIVATIONS
from attnlens_model.config import EncoderConfig


class NeighbourConvolution(nn.Module):
    """LayerNorm(hidden states + activation(convolution of the embeddings)).

    Padding counts as zeros, as what lies beyond the ends does, so a text gets the same wherever it stands.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width, size = config.hidden_size, config.conv_kernel_size
        self.conv = nn.Conv1d(width, width, size, padding=size // 2, groups=config.conv_groups)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.activation = ACTIVATIONS[config.conv_activation]
        self.dropout = nn.Dropout(config.hidden_dropout)
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
