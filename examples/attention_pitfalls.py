"""A self-attention layer in plain PyTorch, and common mistakes in it. docs/pitfalls.md explains each mistake.

    python examples/attention_pitfalls.py

`SelfAttention` is correct. Each mistake is a subclass that replaces one step. The program runs
`attnlens_model.testing.check_attention` on all of them and prints the failed checks.

Dimensions: B batch, T tokens, D hidden size, H heads, K head size.
"""

# ruff: noqa: ARG002 - mistakes ignore arguments

import math

import torch
from torch import Tensor, nn

from attnlens_model.testing import LayerReport, check_attention

HIDDEN_SIZE, NUM_HEADS = 64, 4


class SelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2.2), optionally causal."""

    is_causal = False

    def __init__(
        self, hidden_size: int = HIDDEN_SIZE, num_heads: int = NUM_HEADS, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads, self.head_size, self.dropout = num_heads, hidden_size // num_heads, dropout
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)
        self.initialize()

    def initialize(self) -> None:
        """Initialize the projections."""
        for projection in (self.query, self.key, self.value, self.output):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def split_heads(self, projected: Tensor) -> Tensor:
        """(B, T, D) -> (B, H, T, K)."""
        return projected.view(*projected.shape[:-1], self.num_heads, self.head_size).transpose(1, 2)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """(B, H, T, K) twice -> (B, H, T, T)."""
        return query @ key.transpose(-1, -2) / math.sqrt(self.head_size)

    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Return which keys each query may attend to, broadcastable to (B, H, T, T)."""
        num_tokens = scores.shape[-1]
        allowed = torch.ones(num_tokens, num_tokens, dtype=torch.bool)
        if self.is_causal:
            allowed = allowed.tril()
        return allowed if mask is None else allowed & mask[:, None, None, :]

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Apply the mask and the softmax over keys."""
        return scores.masked_fill(~self.allowed(scores, mask), -math.inf).softmax(dim=-1)

    def drop(self, weights: Tensor) -> Tensor:
        """Apply dropout to the weights in training."""
        return nn.functional.dropout(weights, self.dropout, training=self.training)

    def join_heads(self, heads: Tensor) -> Tensor:
        """(B, H, T, K) -> (B, T, D)."""
        return heads.transpose(1, 2).flatten(-2)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output (B, T, D) and the weights (B, H, T, T). `mask` (B, T) is True for tokens."""
        query, key, value = (
            self.split_heads(project(hidden_states)) for project in (self.query, self.key, self.value)
        )
        weights = self.weights(self.scores(query, key), mask)
        return self.output(self.join_heads(self.drop(weights) @ value)), weights


class CausalSelfAttention(SelfAttention):
    """The same layer for decoders."""

    is_causal = True


class SoftmaxOverQueries(SelfAttention):
    """The softmax normalizes over queries: columns sum to 1 instead of rows."""

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.masked_fill(~self.allowed(scores, mask), -math.inf).softmax(dim=-2)


class ScoresOverComponents(SelfAttention):
    """The product contracts tokens instead of components, so scores compare components."""

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query.transpose(-1, -2) @ key / math.sqrt(self.head_size)

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.softmax(dim=-1)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        query, key, value = (
            self.split_heads(project(hidden_states)) for project in (self.query, self.key, self.value)
        )
        weights = self.weights(self.scores(query, key), mask)
        return self.output(self.join_heads(value @ weights)), weights


class ViewInsteadOfTranspose(SelfAttention):
    """`view(B, H, T, K)` keeps the memory order, so a head contains pieces of several tokens."""

    def split_heads(self, projected: Tensor) -> Tensor:
        return projected.reshape(len(projected), self.num_heads, -1, self.head_size)


class NoScaling(SelfAttention):
    """Scores are not divided by sqrt(K)."""

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2)


class ScaledByHiddenSize(SelfAttention):
    """Scores are divided by sqrt(D) instead of sqrt(K)."""

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2) / math.sqrt(self.num_heads * self.head_size)


class NoCausalMask(CausalSelfAttention):
    """Tokens attend to the tokens that they are trained to predict."""

    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return torch.ones_like(scores, dtype=torch.bool) if mask is None else mask[:, None, None, :]


class CausalMaskAfterSoftmax(CausalSelfAttention):
    """Weights of later tokens are set to 0 after the softmax, whose denominator still contains them."""

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        allowed = self.allowed(scores, mask)
        return scores.softmax(dim=-1) * allowed


class CausalMaskShifted(CausalSelfAttention):
    """The mask also hides the token itself. The first token has no key, so its weights are NaN."""

    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        num_tokens = scores.shape[-1]
        allowed = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril(-1)
        allowed[0, 0] = True
        return allowed if mask is None else allowed & mask[:, None, None, :]


class MaskOfHeadSize(CausalSelfAttention):
    """The causal mask is registered with the head size instead of the maximum number of tokens."""

    def __init__(
        self, hidden_size: int = HIDDEN_SIZE, num_heads: int = NUM_HEADS, dropout: float = 0.0
    ) -> None:
        super().__init__(hidden_size, num_heads, dropout)
        self.register_buffer("tril", torch.tril(torch.ones(self.head_size, self.head_size)))

    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        allowed = self.get_buffer("tril").bool()
        return allowed if mask is None else allowed & mask[:, None, None, :]


class PaddingIgnored(SelfAttention):
    """The padding mask is accepted and not used."""

    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().allowed(scores, None)


class PaddingMaskInverted(SelfAttention):
    """The mask is True for padding, as in nn.MultiheadAttention, but callers pass True for tokens."""

    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().allowed(scores, None if mask is None else ~mask)


class PaddedQueriesMasked(SelfAttention):
    """The mask is applied to queries (rows) instead of keys (columns)."""

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = scores.softmax(dim=-1)
        return weights if mask is None else weights * mask[:, None, :, None]


class StandardNormalInitialization(SelfAttention):
    """Projections are initialized with a standard normal distribution instead of Xavier."""

    def initialize(self) -> None:
        for projection in (self.query, self.key, self.value, self.output):
            nn.init.normal_(projection.weight)
            nn.init.zeros_(projection.bias)


class DropoutInEvaluation(SelfAttention):
    """`nn.functional.dropout` is active unless `training=False` is passed."""

    def drop(self, weights: Tensor) -> Tensor:
        return nn.functional.dropout(weights, max(self.dropout, 0.1))


class DropoutWithoutRescaling(SelfAttention):
    """Dropped weights are not compensated, so rows sum to less than 1 in training."""

    def drop(self, weights: Tensor) -> Tensor:
        if not self.training:
            return weights
        return weights * (torch.rand_like(weights) >= max(self.dropout, 0.1))


class DropoutBeforeSoftmax(SelfAttention):
    """Dropout sets scores to 0, which is not a small score: it gives keys an average weight."""

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weights(nn.functional.dropout(scores, max(self.dropout, 0.1), self.training), mask)


class SequenceFirst(SelfAttention):
    """The layer expects (T, B, D), the default of nn.MultiheadAttention, and gets (B, T, D)."""

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        output, weights = super().forward(hidden_states.transpose(0, 1), None)
        return output.transpose(0, 1), weights


class SharedHeads(SelfAttention):
    """All heads use the same part of the query and key projections, so they compute the same weights."""

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return super().scores(query[:, :1].expand_as(query), key[:, :1].expand_as(key))


class HeadsNotJoined(SelfAttention):
    """The output has one vector per head instead of one per token."""

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        query, key, value = (
            self.split_heads(project(hidden_states)) for project in (self.query, self.key, self.value)
        )
        weights = self.weights(self.scores(query, key), mask)
        return (weights @ value).transpose(1, 2).mean(dim=2), weights


class DetachedKeys(SelfAttention):
    """Keys are detached from the graph, so their projection is never trained."""

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return super().scores(query, key.detach())


CORRECT: tuple[type[SelfAttention], ...] = (SelfAttention, CausalSelfAttention)
PITFALLS: dict[type[SelfAttention], str] = {
    SoftmaxOverQueries: "softmax axis",
    ScoresOverComponents: "score shape",
    ViewInsteadOfTranspose: "scores of token pairs",
    NoScaling: "scaling",
    ScaledByHiddenSize: "scaling",
    NoCausalMask: "causal mask",
    CausalMaskAfterSoftmax: "row sums",
    CausalMaskShifted: "causal mask",
    MaskOfHeadSize: "input lengths",
    PaddingIgnored: "padding mask",
    PaddingMaskInverted: "padding mask",
    PaddedQueriesMasked: "padding mask",
    StandardNormalInitialization: "initialization",
    DropoutInEvaluation: "dropout in evaluation",
    DropoutWithoutRescaling: "dropout in training",
    DropoutBeforeSoftmax: "dropout in training",
    SequenceFirst: "batch independence",
    SharedHeads: "heads",
    HeadsNotJoined: "output shape",
    DetachedKeys: "gradients",
}
"""Mistakes, each with the check that must fail."""


def check(layer: type[SelfAttention]) -> LayerReport:
    """Check a layer with freshly initialized weights."""
    torch.manual_seed(0)
    return check_attention(
        layer(dropout=0.1), hidden_size=HIDDEN_SIZE, num_heads=NUM_HEADS, is_causal=layer.is_causal
    )


def main() -> None:
    """Check the correct layers and all mistakes."""
    for layer in (*CORRECT, *PITFALLS):
        failures = check(layer).failures
        found = "; ".join(f"{item.name}: {item.measured}" for item in failures) or "all checks passed"
        print(f"{layer.__name__:30} {found}")


if __name__ == "__main__":
    main()
