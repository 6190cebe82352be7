"""`EncoderLayer`: attention and a feed-forward network, each with a residual connection and a norm.

Shape legend: B batch, T tokens, D hidden size.
"""

from torch import Tensor, nn

from attnlens_model.attention.mechanism import Outputs
from attnlens_model.config import EncoderConfig
from attnlens_model.feed_forward import make_feed_forward
from attnlens_model.norm import make_norm


class EncoderLayer(nn.Module):
    """Attention and a feed-forward network, each with a residual connection and a norm.

    The norm follows the residual sum (post-LN, Vaswani et al. 2017), or precedes attention and the
    feed-forward network (pre-LN, Xiong et al. 2020, https://arxiv.org/abs/2002.04745). With
    `placement="both"`, their outputs are also normalized before the residual sum (Gemma Team 2024,
    https://arxiv.org/abs/2408.00118, section 2). With "post_twice", the attention residual is added and
    normalized twice.
    """

    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__()
        layer = index * config.times_in_a_row
        self.attention = config.layer_attentions[layer].make_layer(config.sizes)
        self.is_pre_norm = config.norm.placement in ("pre", "both")
        is_normalized = self.is_pre_norm and config.embeddings.norm and index == 0
        has_none = is_normalized and not config.norm.first_layer
        self.attention_norm = None if has_none else make_norm(config.norm, config.hidden_size)
        is_twice = config.norm.placement == "post_twice"
        self.second_attention_norm = make_norm(config.norm, config.hidden_size) if is_twice else None
        self.feed_forward = make_feed_forward(config.layer_feed_forwards[layer], config.hidden_size)
        self.output_norm = make_norm(config.norm, config.hidden_size)
        """Applied after the feed-forward network (post-LN) or before it (pre-LN)."""
        has_both = config.norm.placement == "both"
        self.attention_post_norm = make_norm(config.norm, config.hidden_size) if has_both else None
        self.feed_forward_post_norm = make_norm(config.norm, config.hidden_size) if has_both else None
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: Tensor,
        *shared: object,
    ) -> tuple[Tensor, Outputs]:
        """Return the new hidden states (B, T, D) and the outputs of attention.

        Args:
            hidden_states: (B, T, D).
            shared: Additional arguments of attention, which layers of the same configuration share.
        """
        before, after = (self.attention_norm, None) if self.is_pre_norm else (None, self.attention_norm)
        attended, outputs = self.attention(_normalize(hidden_states, before), *shared)
        attended = _normalize(attended, self.attention_post_norm)
        attended = _normalize(hidden_states + self.dropout(attended), after)
        if self.second_attention_norm is not None:
            attended = self.second_attention_norm(hidden_states + attended)
        hidden_states = attended
        before, after = (self.output_norm, None) if self.is_pre_norm else (None, self.output_norm)
        output = self.feed_forward(_normalize(hidden_states, before))
        output = _normalize(output, self.feed_forward_post_norm)
        return _normalize(hidden_states + self.dropout(output), after), outputs


def _normalize(hidden_states: Tensor, norm: nn.Module | None) -> Tensor:
    return hidden_states if norm is None else norm(hidden_states)
