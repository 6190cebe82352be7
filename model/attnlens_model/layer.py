"""One layer: attention and feed-forward, each with a residual and a norm.

Letters in shapes: B batch, T tokens, D width.
"""

from torch import Tensor, nn

from attnlens_model.attention.mechanism import Outputs
from attnlens_model.config import EncoderConfig
from attnlens_model.feed_forward import make_feed_forward
from attnlens_model.norm import make_norm


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each with a residual and a norm.

    The norm follows the residual sum (post-LN, Vaswani et al. 2017), or it precedes attention and
    feed-forward and the sum stays as it is (pre-LN, Xiong et al. 2020, https://arxiv.org/abs/2002.04745).
    With norms on both sides, what attention and feed-forward return is normalised too, before the sum
    (Gemma Team 2024, https://arxiv.org/abs/2408.00118, section 2).
    Post-LN has one more form, in which attention's residual is added and normalised twice.
    """

    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__()
        number = index * config.times_in_a_row
        self.attention = config.layer_attentions[number].make_layer(config.sizes)
        self.is_pre_norm = config.norm.placement in ("pre", "both")
        is_normalised = self.is_pre_norm and config.embeddings.norm and index == 0
        has_none = is_normalised and not config.norm.first_layer
        self.attention_norm = None if has_none else make_norm(config.norm, config.hidden_size)
        is_twice = config.norm.placement == "post_twice"
        self.second_attention_norm = make_norm(config.norm, config.hidden_size) if is_twice else None
        self.feed_forward = make_feed_forward(config.layer_feed_forwards[number], config.hidden_size)
        self.output_norm = make_norm(config.norm, config.hidden_size)
        """After (or, in pre-LN, before) the feed-forward."""
        has_both = config.norm.placement == "both"
        self.attention_post_norm = make_norm(config.norm, config.hidden_size) if has_both else None
        self.feed_forward_post_norm = make_norm(config.norm, config.hidden_size) if has_both else None
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: Tensor,
        *shared: object,
    ) -> tuple[Tensor, Outputs]:
        """(B, T, D) -> (B, T, D), and the outputs of attention, which takes `shared` beside hidden states."""
        before, after = (self.attention_norm, None) if self.is_pre_norm else (None, self.attention_norm)
        attended, outputs = self.attention(_normalised(hidden_states, before), *shared)
        attended = _normalised(attended, self.attention_post_norm)
        attended = _normalised(hidden_states + self.dropout(attended), after)
        if self.second_attention_norm is not None:
            attended = self.second_attention_norm(hidden_states + attended)
        hidden_states = attended
        before, after = (self.output_norm, None) if self.is_pre_norm else (None, self.output_norm)
        output = self.feed_forward(_normalised(hidden_states, before))
        output = _normalised(output, self.feed_forward_post_norm)
        return _normalised(hidden_states + self.dropout(output), after), outputs


def _normalised(hidden_states: Tensor, norm: nn.Module | None) -> Tensor:
    return hidden_states if norm is None else norm(hidden_states)
