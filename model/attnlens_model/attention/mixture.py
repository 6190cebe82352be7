"""Attention in which each token chooses among heads: some are shared by all tokens, of the others it takes K.

Jin et al. 2024, "MoH: Multi-Head Attention as Mixture-of-Head Attention" (https://arxiv.org/abs/2410.11842).
Of H heads the first S are shared, and E = H - S are routed. A token with the vector x gives each head a gate,
by which the head's result is multiplied before the projection to the output. The weights of all heads are
computed, and are what they would be without gates. With p = softmax(routed x), of which the A largest are
chosen, the gates of shared heads, and of chosen ones, are

    "paper" (equations 5 and 6):
        a1 * softmax(shared x),      a2 * p,                             [a1, a2] = softmax(balance x)
    "code":
        a1 * S * softmax(shared x),  a2 * A * p / sum of the chosen p,   [a1, a2] = 2 * softmax(balance x)

"code" is the published program, https://github.com/SkyworkAI/MoH: its gates are 1 where the three projections
are 0. A single shared head has 1 for its softmax, without a projection. Where there are no shared heads, or
none but these, a1 and a2 are absent.

The router "norm" (section 4.4, for models that were trained without gates) has no projections: heads whose
queries are longest are chosen, p = softmax(length / standard deviation of lengths), and gates are 1 or 0.

Letters in shapes: B batch, T tokens, D width, H heads, K head width, S shared heads, E routed heads.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnlens_model.attention.mechanism import (
    ATTENTION_WEIGHTS,
    AttentionConfig,
    AttentionOutput,
    ChoosingModule,
    EncoderSizes,
    OutputRole,
    Outputs,
)
from attnlens_model.attention.parts.heads import HeadProjections
from attnlens_model.attention.parts.masks import AttentionMask
from attnlens_model.attention.parts.selection import LargestOf
from attnlens_model.attention.parts.weights import attention_weights

HEAD_GATES = OutputRole("head_gates")
"""How much a token takes from each head: (B, T, H), at least 0, and 0 where a head was not chosen."""


@dataclass(frozen=True, kw_only=True)
class MixtureAttentionConfig(AttentionConfig):
    """Heads among which each token chooses.

    Attributes:
        shared_heads: how many heads, the first ones, all tokens take.
        active_heads: how many of the others a token takes; 0 only where all heads are shared.
        router: "learned": heads are chosen, and gates computed, by projections of a token's vector. "norm":
            those with the longest queries are chosen, and gates are 1.
        gates: "code": as the published program computes them. "paper": as the paper's equations do. Of no
            effect for the router "norm".
        bias: whether the projections to queries, keys, values and output have biases.
    """

    kind: Literal["mixture"] = "mixture"
    shared_heads: int
    active_heads: int
    router: Literal["learned", "norm"] = "learned"
    gates: Literal["code", "paper"] = "code"
    bias: bool = True

    def _check(self) -> None:
        super()._check()
        is_possible = 0 <= self.shared_heads <= self.num_heads
        self.require("shared_heads", is_possible, f"must be from 0 to num_heads={self.num_heads}")
        routed = self.routed_heads
        lowest = min(1, routed)
        limit = f"must be from {lowest} to num_heads - shared_heads = {routed}"
        self.require("active_heads", lowest <= self.active_heads <= routed, limit)
        has_norms = self.router == "learned" or routed > 1
        self.require("router", has_norms, "must be 'learned' where fewer than two heads are routed")

    @property
    def routed_heads(self) -> int:
        """E, how many heads tokens choose from."""
        return self.num_heads - self.shared_heads

    @property
    def operators(self) -> frozenset[str]:
        """The operators of ONNX that the modules need beside those of BERT."""
        choosing = {"Clip", "ReduceSum", "Sign"} if self.routed_heads else set()
        return frozenset(choosing | ({"Concat"} if self.routed_heads and self.shared_heads else set()))

    def outputs(self) -> tuple[AttentionOutput, ...]:
        """Return what a layer returns, in order."""
        return (*super().outputs(), AttentionOutput(HEAD_GATES, "per_token", self.num_heads, "unbounded"))

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a fresh module of one layer."""
        return MixtureSelfAttention(self, sizes)


class Routing(NamedTuple):
    """What a router decides for each token."""

    gates: Tensor
    """(B, T, H): what each head's result is multiplied by."""
    probabilities: Tensor
    """(B, T, E): p. In a module without routed heads E is 0."""
    chosen: Tensor
    """(B, T, E): 1 for heads that were chosen, else 0; without gradient."""


def load_balance_loss(routing: Routing, attention_mask: Tensor) -> Tensor:
    """Return what keeps routers from always taking the same heads, a scalar: E * sum over e of P[e] * f[e].

    P is the mean of the probabilities over tokens and f the share of tokens that chose a head: equation 7 of
    the paper times E, as the published program has it, whose training adds 0.01 times the mean over layers.
    Where choices are even it is the number of active heads.

    Args:
        routing: of one layer.
        attention_mask: (B, T), 1 for a token and 0 for padding, which does not count; at least one token.
    """
    live = attention_mask.to(routing.probabilities.dtype)[..., None]  # (B, T, 1)
    number = live.sum()
    mean = (routing.probabilities * live).sum(dim=(0, 1)) / number  # (E,)
    share = (routing.chosen * live).sum(dim=(0, 1)) / number  # (E,)
    return mean.shape[0] * (mean * share).sum()


@contextmanager
def recorded_routing(encoder: nn.Module) -> Iterator[Sequence[Routing]]:
    """Collect what the routers in `encoder` decide, layer by layer, while the context is open.

    with recorded_routing(encoder) as routings:
        output = encoder(ids, mask)
    loss = task(output) + 0.01 * sum(load_balance_loss(r, mask) for r in routings) / len(routings)
    """
    found: list[Routing] = []

    def keep(_router: nn.Module, _args: object, routing: Routing) -> None:
        found.append(routing)

    routers = [module for module in encoder.modules() if isinstance(module, _Router)]
    hooks = [router.register_forward_hook(keep) for router in routers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


class _Router(ChoosingModule):
    """Chooses heads for tokens: `forward` takes their vectors (B, T, D) and queries (B, H, T, K)."""

    def margins(self, routing: Routing) -> Tensor:
        """Return, for each token, how much more probable the last head chosen is than the next: (B, T)."""
        probabilities, chosen = routing.probabilities, routing.chosen
        # Probabilities are below 2: with all heads chosen, or none to choose from, nothing is close.
        out = probabilities.new_full((*probabilities.shape[:-1], 1), -2.0)
        least = torch.cat([probabilities + 4.0 * (1.0 - chosen), out + 4.0], dim=-1).amin(dim=-1)
        most = torch.cat([probabilities - 4.0 * chosen, out], dim=-1).amax(dim=-1)
        return least - most


class LearnedRouter(_Router):
    """Gates by projections of a token's vector, which start Xavier-uniform and have no biases."""

    def __init__(self, config: MixtureAttentionConfig, width: int) -> None:
        super().__init__()
        shared, routed, active = config.shared_heads, config.routed_heads, config.active_heads
        self.num_shared, self.num_active, self.is_paper = shared, active, config.gates == "paper"
        self.shared = nn.Linear(width, shared, bias=False) if shared > 1 else None
        self.routed = nn.Linear(width, routed, bias=False) if routed else None
        self.balance = nn.Linear(width, 2, bias=False) if shared and routed else None
        self.largest = LargestOf(routed, active)
        for projection in (self.shared, self.routed, self.balance):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)

    def forward(self, hidden_states: Tensor, query: Tensor) -> Routing:  # noqa: ARG002 - others need it
        """Return the gates and how they came about."""
        first, none = hidden_states[..., :1] * 0.0 + 1.0, hidden_states[..., :0]  # (B, T, 1), (B, T, 0)
        shared = none
        if self.num_shared:
            shared = first if self.shared is None else self.shared(hidden_states).softmax(dim=-1)
            shared = shared if self.is_paper else shared * float(self.num_shared)  # (B, T, S)
        if self.routed is None:
            return Routing(shared, none, none)
        logits = self.routed(hidden_states)  # (B, T, E)
        probabilities, chosen = logits.softmax(dim=-1), self.largest(logits)
        routed = probabilities * chosen
        if not self.is_paper:
            # The sum is at least A / E, so that nothing need keep it from 0.
            routed = routed * float(self.num_active) / routed.sum(dim=-1, keepdim=True)
        if self.balance is None:
            return Routing(routed, probabilities, chosen)
        balance = self.balance(hidden_states).softmax(dim=-1)  # (B, T, 2)
        balance = balance if self.is_paper else balance * 2.0
        gates = torch.cat([balance[..., :1] * shared, balance[..., 1:] * routed], dim=-1)
        return Routing(gates, probabilities, chosen)


class NormRouter(_Router):
    """Gates of 1 for shared heads and for those with the longest queries, else 0. It has no parameters.

    The standard deviation is that of the token's E lengths, with E - 1 for the number of them.
    """

    def __init__(self, config: MixtureAttentionConfig, head_dim: int) -> None:
        super().__init__()
        self.num_shared, self.head_dim = config.shared_heads, head_dim
        self.largest = LargestOf(config.routed_heads, config.active_heads)

    def forward(self, hidden_states: Tensor, query: Tensor) -> Routing:  # noqa: ARG002 - others need it
        """Return the gates and how they came about."""
        routed = query[:, self.num_shared :]  # (B, E, T, K)
        # Mean squares have the order of lengths; their sums could leave fp16's range.
        squares = (routed * routed * (1.0 / self.head_dim)).sum(dim=-1).transpose(1, 2)  # (B, T, E)
        chosen = self.largest(squares)
        gates = torch.cat([chosen[..., :1] * 0.0 + 1.0] * self.num_shared + [chosen], dim=-1)
        return Routing(gates, _softmax_of_lengths(squares), chosen)


def _softmax_of_lengths(squares: Tensor) -> Tensor:
    """(B, T, E) -> (B, T, E). Only training and parity look at it: it is no part of a graph."""
    smallest = torch.finfo(squares.dtype).tiny  # an empty query has no direction to become longer in
    lengths = squares.clamp(min=smallest).sqrt()
    centred = lengths - lengths.mean(dim=-1, keepdim=True)
    variance = (centred * centred).sum(dim=-1, keepdim=True) / (squares.shape[-1] - 1)
    return (lengths / variance.clamp(min=smallest).sqrt()).softmax(dim=-1)


class MixtureSelfAttention(HeadProjections):
    """Multi-head self-attention with a gate for each token and head."""

    def __init__(self, config: MixtureAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__(sizes.hidden_size, config.num_heads, config.dropout, bias=config.bias)
        is_learned = config.router == "learned"
        self.router = (
            LearnedRouter(config, sizes.hidden_size) if is_learned else NormRouter(config, self.head_dim)
        )

    def forward(self, hidden_states: Tensor, mask: AttentionMask) -> tuple[Tensor, Outputs]:
        """Attend.

        Args:
            hidden_states: (B, T, D), floating point.
            mask: which keys each query may attend to.

        Returns:
            The context (B, T, D), the weights (B, H, T, T) as they are before dropout, without gates, and the
            gates (B, T, H).
        """
        query, key, value = self.project(hidden_states)  # (B, H, T, K) each
        weights = attention_weights(query, key, mask, self.scale)  # (B, H, T, T)
        routing: Routing = self.router(hidden_states, query)
        heads = (self.dropout(weights) @ value).transpose(1, 2)  # (B, T, H, K)
        gated = heads * routing.gates[..., None]
        context: Tensor = self.output(gated.flatten(-2))
        return context, {ATTENTION_WEIGHTS: weights, HEAD_GATES: routing.gates}
