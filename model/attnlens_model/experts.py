"""A feed-forward part of several experts, of which each token goes to a few (Shazeer et al. 2017).

https://arxiv.org/abs/1701.06538, in the form of Nussbaum & Duderstadt 2025, "Training Sparse Mixture Of
Experts Text Embedding Models", https://arxiv.org/abs/2502.07972: the router's probabilities over all experts
weigh those that are selected, and are not scaled to a sum of 1; one bias is added to the weighted sum.

Every expert computes every token, and those that a token does not go to count 0. In a graph without sizes
that depend on data the only other way is to look up each token's matrices, which for experts of 768 x 3,072
takes 38 MB for each token. With 8 experts this part costs 8 plain ones, and not the 2 that a token needs.

Letters in shapes: B batch, T tokens, D width, F width of an expert's middle, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from attnlens_model.config_part import ConfigPart

_FEWEST = 2


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(ConfigPart, path="feed_forward.experts"):
    """How many experts there are, and how many a token goes to.

    Attributes:
        num_experts: E.
        num_selected: to how many of them, those that the router finds most probable, a token goes; of equally
            probable ones to the first.
    """

    num_experts: int
    num_selected: int

    def _check(self) -> None:
        self.require("num_experts", self.num_experts >= _FEWEST, f"must be at least {_FEWEST}")
        limit = f"must be from 1 to num_experts={self.num_experts}"
        self.require("num_selected", 1 <= self.num_selected <= self.num_experts, limit)


class Expert(nn.Module):
    """Two projections without biases and an activation between."""

    def __init__(self, width: int, middle: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(width, middle, bias=False)
        # (F, D), as the checkpoints have it: the transpose of a Linear's weight.
        self.down = nn.Parameter(torch.empty(middle, width))
        self.activation = activation
        nn.init.xavier_uniform_(self.up.weight)
        nn.init.xavier_uniform_(self.down)

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """(B, T, D) and a factor for each token (B, T, 1) -> (B, T, D)."""
        middle: Tensor = self.activation(self.up(hidden_states))  # (B, T, F)
        return (middle * gate) @ self.down


class Experts(nn.Module):
    """The router, the experts, and the bias of their sum."""

    numbers: Tensor

    def __init__(
        self,
        config: ExpertsConfig,
        width: int,
        middle: int,
        activation: Callable[[Tensor], Tensor],
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.num_selected = config.num_selected
        self.router = nn.Linear(width, config.num_experts, bias=False)
        nn.init.xavier_uniform_(self.router.weight)
        self.experts = nn.ModuleList(Expert(width, middle, activation) for _ in range(config.num_experts))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        # The device is named so that the values exist even when the rest is built without storage.
        self.register_buffer("numbers", torch.arange(config.num_experts, device="cpu"), persistent=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        gates = self.gates(hidden_states)  # (B, T, E)
        # One after the other, so that the middle of a single expert exists at a time.
        parts = (
            expert(hidden_states, gates[..., number : number + 1])
            for number, expert in enumerate(self.experts)
        )
        output: Tensor = reduce(torch.add, parts)
        return output if self.bias is None else output + self.bias

    def gates(self, hidden_states: Tensor) -> Tensor:
        """Return what each expert counts for each token: (B, T, D) -> (B, T, E).

        The most probable expert is found and taken out, as often as experts are selected: ArgMax takes the
        first of several that are equal in every runtime, unlike TopK in PyTorch.
        """
        probabilities: Tensor = self.router(hidden_states).softmax(dim=-1)  # (B, T, E)
        rest, selected = probabilities, None
        for _ in range(self.num_selected):
            best = rest.argmax(dim=-1, keepdim=True)  # (B, T, 1) int64
            # 1 at the number of the expert and 0 elsewhere, by arithmetic, which every runtime has.
            is_best = 1.0 - (self.numbers - best).to(rest.dtype).abs().clamp(0.0, 1.0)  # (B, T, E)
            selected = is_best if selected is None else selected + is_best
            # Below every probability.
            rest = rest - 2.0 * is_best
        return probabilities if selected is None else probabilities * selected
