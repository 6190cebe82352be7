"""One layer: attention and feed-forward, each with a residual and a norm.

Letters in shapes: B batch, T tokens, D width, H heads.
"""

from torch import Tensor, nn

from attnlens_model.activations import ACTIVATIONS, GATE_ACTIVATIONS
from attnlens_model.attention.disentangled import DisentangledSelfAttention, Distances
from attnlens_model.attention.masks import AttentionMask
from attnlens_model.attention.rotary import Rotation
from attnlens_model.attention.softmax import MultiHeadSelfAttention
from attnlens_model.config import EncoderConfig
from attnlens_model.norm import make_norm


class FeedForward(nn.Module):
    """Two projections with an activation between, for each token alone (Vaswani et al. 2017, section 3.3).

    The gated kind multiplies by the activation of a third (Shazeer 2020, https://arxiv.org/abs/2002.05202).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width, middle = config.hidden_size, config.intermediate_size
        self.up = nn.Linear(width, middle, bias=config.up_bias)
        is_gated = config.feed_forward == "gated"
        self.gate = nn.Linear(width, middle, bias=config.up_bias) if is_gated else None
        self.down = nn.Linear(middle, width, bias=config.down_bias)
        self.activation = (GATE_ACTIVATIONS if is_gated else ACTIVATIONS)[config.activation]
        for projection in (self.up, self.gate, self.down):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        middle: Tensor = self.up(hidden_states)  # (B, T, intermediate_size)
        if self.gate is None:
            middle = self.activation(middle)
        else:
            middle = middle * self.activation(self.gate(hidden_states))
        output: Tensor = self.down(middle)
        return output


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each with a residual and a norm.

    The norm follows the residual sum (post-LN, Vaswani et al. 2017), or it precedes attention and
    feed-forward and the sum stays as it is (pre-LN, Xiong et al. 2020, https://arxiv.org/abs/2002.04745).
    """

    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__()
        self.attention = _make_attention(config)
        self.is_pre_norm = config.norm_placement == "pre"
        is_normalised = self.is_pre_norm and config.embedding_norm and index == 0
        self.attention_norm = None if is_normalised else make_norm(config, config.hidden_size)
        self.feed_forward = FeedForward(config)
        self.output_norm = make_norm(config, config.hidden_size)
        """After (or, in pre-LN, before) the feed-forward."""
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: Tensor,
        mask: AttentionMask,
        position_bias: Tensor | Distances | None,
        rotation: Rotation | None,
    ) -> tuple[Tensor, Tensor]:
        """(B, T, D) -> (B, T, D), and the attention weights (B, H, T, T)."""
        before, after = (self.attention_norm, None) if self.is_pre_norm else (None, self.attention_norm)
        attended, weights = self.attention(_normalised(hidden_states, before), mask, position_bias, rotation)
        hidden_states = _normalised(hidden_states + self.dropout(attended), after)
        before, after = (self.output_norm, None) if self.is_pre_norm else (None, self.output_norm)
        output = self.feed_forward(_normalised(hidden_states, before))
        return _normalised(hidden_states + self.dropout(output), after), weights


def _normalised(hidden_states: Tensor, norm: nn.Module | None) -> Tensor:
    return hidden_states if norm is None else norm(hidden_states)


def _make_attention(config: EncoderConfig) -> MultiHeadSelfAttention:
    if config.disentangled_attention != "none":
        return DisentangledSelfAttention(config)
    return MultiHeadSelfAttention(
        config.hidden_size,
        config.num_heads,
        config.attention_dropout,
        head_dim=config.head_size,
        num_key_value_heads=config.num_key_value_heads,
        scale=config.attention_scale,
        bias=config.attention_bias,
    )
