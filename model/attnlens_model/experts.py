"""Mixture-of-experts feed-forward network (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538).

Implements the variant of Nussbaum & Duderstadt 2025, "Training Sparse Mixture Of Experts Text Embedding
Models", https://arxiv.org/abs/2502.07972: selected experts are weighted by the router's softmax over all
experts, without renormalization, and one bias is added to the weighted sum.

Every expert processes every token, and experts that are not selected have weight 0. The only alternative
without data-dependent shapes is to gather the matrices of each token's experts, which takes 38 MB per token
for experts of 768 x 3,072. With 8 experts, the cost is that of 8 feed-forward networks, even if only 2 are
selected per token.

Shape legend: B batch, T tokens, D hidden size, F intermediate size of an expert, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from attnlens_model.config_part import ConfigPart

_MIN_EXPERTS = 2


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(ConfigPart, path="feed_forward.experts"):
    """Settings of a mixture of experts.

    Attributes:
        num_experts: Number of experts E.
        num_selected: Number of experts per token, selected by router probability. Ties go to the lower index.
    """

    num_experts: int
    num_selected: int

    def _check(self) -> None:
        self.require("num_experts", self.num_experts >= _MIN_EXPERTS, f"must be at least {_MIN_EXPERTS}")
        limit = f"must be from 1 to num_experts={self.num_experts}"
        self.require("num_selected", 1 <= self.num_selected <= self.num_experts, limit)


class Expert(nn.Module):
    """Two projections without biases and an activation in between."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, intermediate_size, bias=False)
        # (F, D) as in the checkpoints: the transpose of a Linear weight.
        self.down = nn.Parameter(torch.empty(intermediate_size, hidden_size))
        self.activation = activation
        nn.init.xavier_uniform_(self.up.weight)
        nn.init.xavier_uniform_(self.down)

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Map (B, T, D), with a gate per token (B, T, 1), to (B, T, D)."""
        intermediate: Tensor = self.activation(self.up(hidden_states))  # (B, T, F)
        return (intermediate * gate) @ self.down


class Experts(nn.Module):
    """Router, experts, and the bias of their weighted sum."""

    numbers: Tensor

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        intermediate_size: int,
        activation: Callable[[Tensor], Tensor],
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.num_selected = config.num_selected
        self.router = nn.Linear(hidden_size, config.num_experts, bias=False)
        nn.init.xavier_uniform_(self.router.weight)
        self.experts = nn.ModuleList(
            Expert(hidden_size, intermediate_size, activation) for _ in range(config.num_experts)
        )
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None
        # Allocate on CPU explicitly so the buffer has real values when the model is built on the meta device.
        self.register_buffer("numbers", torch.arange(config.num_experts, device="cpu"), persistent=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        gates = self.gates(hidden_states)  # (B, T, E)
        # Run experts sequentially so that only one intermediate tensor exists at a time.
        parts = (
            expert(hidden_states, gates[..., index : index + 1]) for index, expert in enumerate(self.experts)
        )
        output: Tensor = reduce(torch.add, parts)
        return output if self.bias is None else output + self.bias

    def gates(self, hidden_states: Tensor) -> Tensor:
        """Return the weight of each expert for each token: (B, T, D) -> (B, T, E).

        Experts are selected one at a time by ArgMax, which resolves ties in favor of the lowest index in
        every runtime, unlike TopK in PyTorch.
        """
        probabilities: Tensor = self.router(hidden_states).softmax(dim=-1)  # (B, T, E)
        remaining, selected = probabilities, None
        for _ in range(self.num_selected):
            best = remaining.argmax(dim=-1, keepdim=True)  # (B, T, 1) int64
            # One-hot encoding of the expert index, in arithmetic that every runtime supports.
            is_best = 1.0 - (self.numbers - best).to(remaining.dtype).abs().clamp(0.0, 1.0)  # (B, T, E)
            selected = is_best if selected is None else selected + is_best
            # Make the selected expert lower than any probability.
            remaining = remaining - 2.0 * is_best
        return probabilities if selected is None else probabilities * selected
