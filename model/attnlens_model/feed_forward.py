"""The feed-forward part of a layer.

Letters in shapes: B batch, T tokens, D width.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from attnlens_model.activations import ACTIVATIONS, GATE_ACTIVATIONS, Activation
from attnlens_model.config_part import ConfigPart
from attnlens_model.experts import Experts, ExpertsConfig


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig(ConfigPart, path="feed_forward"):
    """The feed-forward part of a layer.

    Attributes:
        intermediate_size: width of its middle; where there are experts, of each expert's.
        kind: "plain": down(activation(up(x))). "gated": down(activation(gate(x)) * up(x)).
        activation: "gelu" (exact, by erf), "gelu_tanh" (its tanh approximation), "relu" or "silu".
        up_bias: whether the projections up (and gate) have biases.
        down_bias: whether the projection down has one; where there are experts, whether their sum has.
        experts: several feed-forward parts in place of one, of which each token goes to a few; None: one.
    """

    intermediate_size: int
    kind: Literal["plain", "gated"] = "plain"
    activation: Activation = "gelu"
    up_bias: bool = True
    down_bias: bool = True
    experts: ExpertsConfig | None = None

    def _check(self) -> None:
        self.require("intermediate_size", self.intermediate_size >= 1, "must be at least 1")
        has_experts = self.experts is not None
        limit = "where there are experts"
        self.require("kind", not (has_experts and self.kind == "gated"), f"must be 'plain' {limit}")
        self.require("up_bias", not (has_experts and self.up_bias), f"must be false {limit}")


class FeedForward(nn.Module):
    """Two projections with an activation between, for each token alone (Vaswani et al. 2017, section 3.3).

    The gated kind multiplies by the activation of a third (Shazeer 2020, https://arxiv.org/abs/2002.05202).
    """

    def __init__(self, config: FeedForwardConfig, width: int) -> None:
        super().__init__()
        middle = config.intermediate_size
        self.up = nn.Linear(width, middle, bias=config.up_bias)
        is_gated = config.kind == "gated"
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


def make_feed_forward(config: FeedForwardConfig, width: int) -> nn.Module:
    """Return a fresh feed-forward part, (B, T, D) -> (B, T, D) for D = `width`."""
    if config.experts is None:
        return FeedForward(config, width)
    # What goes through it is multiplied by the router's number.
    activation = GATE_ACTIVATIONS[config.activation]
    return Experts(config.experts, width, config.intermediate_size, activation, bias=config.down_bias)
