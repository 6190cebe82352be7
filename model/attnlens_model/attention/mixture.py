"""Mixture-of-head attention (MoH): each token selects some of the heads.

Jin et al. 2024, "MoH: Multi-Head Attention as Mixture-of-Head Attention" (https://arxiv.org/abs/2410.11842).
Of the H heads, the first S are shared by all tokens and the other E = H - S are routed: each token selects A
of them. The result of each head is multiplied by a gate before the output projection. Attention weights are
computed for all heads and do not depend on the gates.

For a token with hidden state x, let p = softmax(routed x) and [a1, a2] = softmax(balance x). The A largest
elements of p are selected. The gates of the shared heads and of the selected heads are:

    "paper" (equations 5 and 6):  a1 * softmax(shared x),          a2 * p
    "code":                       2 * a1 * S * softmax(shared x),  2 * a2 * A * p / (sum of the selected p)

"code" is the published implementation (https://github.com/SkyworkAI/MoH). With all three projections at 0,
the gates are 1. With a single shared head, softmax(shared x) is always 1, so its projection is omitted. If
all heads are shared or all are routed, the factors a1 and a2 are omitted, together with the factor 2.

The router "norm" (section 4.4, for models trained without gates) has no projections. It selects the heads
with the longest queries, with p = softmax(length / standard deviation of lengths), and its gates are 1 or 0.

Shape legend: B batch, T tokens, D hidden size, H heads, K head size, S shared heads, E routed heads.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnlens_model.attention.heads import HeadProjections
from attnlens_model.attention.mechanism import (
    ATTENTION_WEIGHTS,
    AttentionConfig,
    AttentionOutput,
    ChoosingModule,
    EncoderSizes,
    OutputRole,
    Outputs,
)
from attnlens_model.attention.parts.masks import AttentionMask
from attnlens_model.attention.parts.weights import attention_weights

HEAD_GATES = OutputRole("head_gates")
"""Gate of each token and head, (B, T, H): at least 0, and 0 for heads that the token did not select."""


@dataclass(frozen=True, kw_only=True)
class MixtureAttentionConfig(AttentionConfig):
    """Configuration of mixture-of-head attention.

    Attributes:
        shared_heads: Number of heads S shared by all tokens.
        active_heads: Number of routed heads A that each token selects. 0 only if all heads are shared.
        router: "learned" selects heads and computes gates from projections of hidden states. "norm" selects
            the heads with the longest queries, with gates of 1.
        gates: "code" for the formula of the published implementation, "paper" for that in the paper. Ignored
            if the router is "norm".
        bias: Whether the query, key, value and output projections have biases.
    """

    kind: Literal["mixture"] = "mixture"
    shared_heads: int
    active_heads: int
    router: Literal["learned", "norm"] = "learned"
    gates: Literal["code", "paper"] = "code"
    bias: bool = True

    def _check(self) -> None:
        super()._check()
        is_valid = 0 <= self.shared_heads <= self.num_heads
        self.require("shared_heads", is_valid, f"must be from 0 to num_heads={self.num_heads}")
        routed = self.routed_heads
        minimum = min(1, routed)
        limit = f"must be from {minimum} to num_heads - shared_heads = {routed}"
        self.require("active_heads", minimum <= self.active_heads <= routed, limit)
        is_valid = self.router == "learned" or routed > 1
        self.require("router", is_valid, "must be 'learned' if fewer than two heads are routed")

    @property
    def routed_heads(self) -> int:
        """E, the number of heads that tokens select from."""
        return self.num_heads - self.shared_heads

    @property
    def operators(self) -> frozenset[str]:
        """ONNX operators that the modules use in addition to those of BERT."""
        selection = {"Clip", "ReduceSum", "Sign"} if self.routed_heads else set()
        return frozenset(selection | ({"Concat"} if self.routed_heads and self.shared_heads else set()))

    def outputs(self) -> tuple[AttentionOutput, ...]:
        """Return the outputs of a layer: the weights of all heads and the gates."""
        return (*super().outputs(), AttentionOutput(HEAD_GATES, "per_token", self.num_heads, "unbounded"))

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a randomly initialized layer module."""
        return MixtureSelfAttention(self, sizes)


class Routing(NamedTuple):
    """Result of a router."""

    gates: Tensor
    """(B, T, H): factor applied to the result of each head."""
    probabilities: Tensor
    """(B, T, E): p. E is 0 if all heads are shared."""
    chosen: Tensor
    """(B, T, E): 1 for selected heads, otherwise 0. No gradient flows through it."""


def load_balance_loss(routing: Routing, attention_mask: Tensor) -> Tensor:
    """Return the load balance loss, a scalar: E * sum over e of P[e] * f[e].

    P is the mean probability over tokens, and f the fraction of tokens that selected a head. This is equation
    7 of the paper times E, as in the published implementation, which adds 0.01 times the mean over layers to
    the training loss. For evenly distributed selections, the loss is the number of active heads.

    Args:
        routing: Routing of one layer.
        attention_mask: (B, T), 1 for tokens and 0 for padding, which is ignored. At least one token is
            required.
    """
    live = attention_mask.to(routing.probabilities.dtype)[..., None]  # (B, T, 1)
    num_tokens = live.sum()
    mean = (routing.probabilities * live).sum(dim=(0, 1)) / num_tokens  # (E,)
    fraction = (routing.chosen * live).sum(dim=(0, 1)) / num_tokens  # (E,)
    return mean.shape[0] * (mean * fraction).sum()


@contextmanager
def recorded_routing(encoder: nn.Module) -> Iterator[Sequence[Routing]]:
    """Record the results of all routers in `encoder`, in layer order, while the context is active.

    with recorded_routing(encoder) as routings:
        output = encoder(ids, mask)
    loss = task(output) + 0.01 * sum(load_balance_loss(r, mask) for r in routings) / len(routings)
    """
    routings: list[Routing] = []

    def append(_router: nn.Module, _args: object, routing: Routing) -> None:
        routings.append(routing)

    routers = [module for module in encoder.modules() if isinstance(module, _Router)]
    hooks = [router.register_forward_hook(append) for router in routers]
    try:
        yield routings
    finally:
        for hook in hooks:
            hook.remove()


class TopKMask(nn.Module):
    """Marks the `count` largest of E numbers. Ties are resolved in favor of the first.

    The rank of a number is the number of elements before it in descending order. This takes E x E
    comparisons, which is cheap because the number of heads E is small.
    """

    earlier: Tensor

    def __init__(self, num_choices: int, count: int) -> None:
        super().__init__()
        self.count = count
        # 1 if number j precedes number i. Allocate on CPU explicitly so the buffer has values when the model
        # is built on the meta device.
        earlier = torch.ones(num_choices, num_choices, device="cpu").tril(diagonal=-1)
        self.register_buffer("earlier", earlier, persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """(..., E) -> (..., E): 1 for the largest numbers, otherwise 0. The result has no gradient."""
        numbers = numbers.detach()
        order = torch.sign(
            numbers[..., None, :] - numbers[..., :, None]
        )  # (..., E, E): 1 if j is larger than i
        is_ahead = (2.0 * order + self.earlier).clamp(0.0, 1.0)
        rank = is_ahead.sum(dim=-1)  # (..., E), integers
        return (self.count - rank).clamp(0.0, 1.0)


class _Router(ChoosingModule):
    """Base class of routers, whose `forward` takes hidden states (B, T, D) and queries (B, H, T, K)."""

    def margins(self, routing: Routing) -> Tensor:
        """Return the difference (B, T) between the lowest selected and the highest unselected probability."""
        probabilities, chosen = routing.probabilities, routing.chosen
        # Probabilities are below 2, so the margin is large if all heads or no heads are selected.
        outside = probabilities.new_full((*probabilities.shape[:-1], 1), -2.0)
        lowest = torch.cat([probabilities + 4.0 * (1.0 - chosen), outside + 4.0], dim=-1).amin(dim=-1)
        highest = torch.cat([probabilities - 4.0 * chosen, outside], dim=-1).amax(dim=-1)
        return lowest - highest


class LearnedRouter(_Router):
    """Computes gates from projections of hidden states, with Xavier-uniform weights and no biases."""

    def __init__(self, config: MixtureAttentionConfig, hidden_size: int) -> None:
        super().__init__()
        shared, routed, active = config.shared_heads, config.routed_heads, config.active_heads
        self.num_shared, self.num_active, self.is_paper = shared, active, config.gates == "paper"
        self.shared = nn.Linear(hidden_size, shared, bias=False) if shared > 1 else None
        self.routed = nn.Linear(hidden_size, routed, bias=False) if routed else None
        self.balance = nn.Linear(hidden_size, 2, bias=False) if shared and routed else None
        self.largest = TopKMask(routed, active)
        for projection in (self.shared, self.routed, self.balance):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)

    def forward(self, hidden_states: Tensor, query: Tensor) -> Routing:  # noqa: ARG002 - see `_Router`
        """Return the routing for each token."""
        ones, empty = hidden_states[..., :1] * 0.0 + 1.0, hidden_states[..., :0]  # (B, T, 1), (B, T, 0)
        shared = empty
        if self.num_shared:
            shared = ones if self.shared is None else self.shared(hidden_states).softmax(dim=-1)
            shared = shared if self.is_paper else shared * float(self.num_shared)  # (B, T, S)
        if self.routed is None:
            return Routing(shared, empty, empty)
        logits = self.routed(hidden_states)  # (B, T, E)
        probabilities, chosen = logits.softmax(dim=-1), self.largest(logits)
        routed = probabilities * chosen
        if not self.is_paper:
            # The sum is at least A / E, so no epsilon is needed.
            routed = routed * float(self.num_active) / routed.sum(dim=-1, keepdim=True)
        if self.balance is None:
            return Routing(routed, probabilities, chosen)
        balance = self.balance(hidden_states).softmax(dim=-1)  # (B, T, 2)
        balance = balance if self.is_paper else balance * 2.0
        gates = torch.cat([balance[..., :1] * shared, balance[..., 1:] * routed], dim=-1)
        return Routing(gates, probabilities, chosen)


class NormRouter(_Router):
    """Selects the heads with the longest queries. It has no parameters.

    The gates of shared and selected heads are 1. The standard deviation is that of the token's E query
    lengths, with divisor E - 1.
    """

    def __init__(self, config: MixtureAttentionConfig, head_dim: int) -> None:
        super().__init__()
        self.num_shared, self.head_dim = config.shared_heads, head_dim
        self.largest = TopKMask(config.routed_heads, config.active_heads)

    def forward(self, hidden_states: Tensor, query: Tensor) -> Routing:  # noqa: ARG002 - see `_Router`
        """Return the routing for each token."""
        routed = query[:, self.num_shared :]  # (B, E, T, K)
        # Ranking by mean squares is equivalent to ranking by lengths. Sums of squares could overflow fp16.
        squares = (routed * routed * (1.0 / self.head_dim)).sum(dim=-1).transpose(1, 2)  # (B, T, E)
        chosen = self.largest(squares)
        gates = torch.cat([chosen[..., :1] * 0.0 + 1.0] * self.num_shared + [chosen], dim=-1)
        return Routing(gates, _softmax_of_lengths(squares), chosen)


def _softmax_of_lengths(squares: Tensor) -> Tensor:
    """(B, T, E) -> (B, T, E). Used only in training and the parity check, not part of an exported graph."""
    tiny = torch.finfo(squares.dtype).tiny  # keeps the gradient finite for an all-zero query
    lengths = squares.clamp(min=tiny).sqrt()
    centered = lengths - lengths.mean(dim=-1, keepdim=True)
    variance = (centered * centered).sum(dim=-1, keepdim=True) / (squares.shape[-1] - 1)
    return (lengths / variance.clamp(min=tiny).sqrt()).softmax(dim=-1)


class MixtureSelfAttention(HeadProjections):
    """Multi-head self-attention with a gate per token and head."""

    def __init__(self, config: MixtureAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__(config, sizes, bias=config.bias)
        is_learned = config.router == "learned"
        self.router = (
            LearnedRouter(config, sizes.hidden_size) if is_learned else NormRouter(config, self.head_dim)
        )

    def forward(self, hidden_states: Tensor, mask: AttentionMask) -> tuple[Tensor, Outputs]:
        """Compute the attention of one layer.

        Args:
            hidden_states: (B, T, D), floating point.
            mask: Keys that each query may attend to.

        Returns:
            The context (B, T, D), the weights (B, H, T, T) before gates and dropout, and the gates (B, T, H).
        """
        query, key, value = self.project(hidden_states)  # (B, H, T, K) each
        weights = attention_weights(query, key, mask, self.scale)  # (B, H, T, T)
        routing: Routing = self.router(hidden_states, query)
        heads = (self.dropout(weights) @ value).transpose(1, 2)  # (B, T, H, K)
        gated = heads * routing.gates[..., None]
        context: Tensor = self.output(gated.flatten(-2))
        return context, {ATTENTION_WEIGHTS: weights, HEAD_GATES: routing.gates}
