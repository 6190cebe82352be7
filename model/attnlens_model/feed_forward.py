"""Feed-forward network of a layer.

Shape legend: B batch, T tokens, D hidden size.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from attnlens_model.activations import ACTIVATIONS, GATE_ACTIVATIONS, Activation
from attnlens_model.config_part import ConfigPart
from attnlens_model.experts import Experts, ExpertsConfig


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig(ConfigPart, path="feed_forward"):
    """Settings of a feed-forward network.

    Attributes:
        intermediate_size: Intermediate size, of each expert if there are experts.
        kind: "plain": down(activation(up(x))). "gated": down(activation(gate(x)) * up(x)).
        activation: "gelu" (exact, using erf), "gelu_tanh" (tanh approximation), "relu" or "silu".
        up_bias: Whether the up (and gate) projections have a bias.
        down_bias: Whether the down projection, or the sum of the experts, has a bias.
        experts: Settings of a mixture of experts. If None, there is a single network.
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
        limit = "if there are experts"
        self.require("kind", not (has_experts and self.kind == "gated"), f"must be 'plain' {limit}")
        self.require("up_bias", not (has_experts and self.up_bias), f"must be false {limit}")


class FeedForward(nn.Module):
    """Position-wise feed-forward network (Vaswani et al. 2017, section 3.3).

    The gated variant multiplies by a third, activated projection (Shazeer 2020,
    https://arxiv.org/abs/2002.05202).
    """

    def __init__(self, config: FeedForwardConfig, hidden_size: int) -> None:
        super().__init__()
        size = config.intermediate_size
        self.up = nn.Linear(hidden_size, size, bias=config.up_bias)
        is_gated = config.kind == "gated"
        self.gate = nn.Linear(hidden_size, size, bias=config.up_bias) if is_gated else None
        self.down = nn.Linear(size, hidden_size, bias=config.down_bias)
        self.activation = (GATE_ACTIVATIONS if is_gated else ACTIVATIONS)[config.activation]
        for projection in (self.up, self.gate, self.down):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        intermediate: Tensor = self.up(hidden_states)  # (B, T, intermediate_size)
        if self.gate is None:
            intermediate = self.activation(intermediate)
        else:
            intermediate = intermediate * self.activation(self.gate(hidden_states))
        output: Tensor = self.down(intermediate)
        return output


def make_feed_forward(config: FeedForwardConfig, hidden_size: int) -> nn.Module:
    """Return a newly initialized feed-forward network, (B, T, D) -> (B, T, D) for D = `hidden_size`."""
    if config.experts is None:
        return FeedForward(config, hidden_size)
    # The activated values are multiplied by the gate of the router.
    activation = GATE_ACTIVATIONS[config.activation]
    return Experts(config.experts, hidden_size, config.intermediate_size, activation, bias=config.down_bias)
