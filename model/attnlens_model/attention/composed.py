"""Dynamically composable multi-head attention (DCMHA): heads are mixed per query and key.

Xiao et al. 2024, "Improving Transformers with Dynamically Composable Multi-Head Attention"
(https://arxiv.org/abs/2405.08553). At query i and key j, composed head n is a linear combination of all heads
m:

    composed[n, i, j] = sum over m of (I + static + by_query[i] + by_key[j])[n, m] * heads[m, i, j]

    by_query[i][n, m] = sum over r of second[i, r, n] * first[i, r, m]  +  (tanh(diagonal[i, n]) if n = m)

where `first`, `second` and `diagonal` are projections of the token's hidden state, and by_key has the same
form. The composition is applied to scores before masking and softmax, and to attention weights after it.
Composed weights may be negative and do not sum to 1. Values are not composed.

Where the paper and the published code differ, this module follows the code that trained the published models
(https://github.com/Caiyun-AI/DCFormer, jax/): it adds the identity to the static matrix and uses its standard
deviations for initialization. The PyTorch code of the same repository initializes the diagonal with ten times
the standard deviation. GELU is exact, as in PyTorch.

Shape legend: B batch, T tokens, D hidden size, H heads, K head size, R rank.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnlens_model.activations import gelu
from attnlens_model.attention.heads import HeadProjections
from attnlens_model.attention.mechanism import (
    ATTENTION_WEIGHTS,
    AttentionConfig,
    AttentionOutput,
    EncoderSizes,
    OutputRole,
    Outputs,
)
from attnlens_model.attention.parts.masks import AttentionMask
from attnlens_model.attention.parts.weights import masked_softmax

ATTENTION_COMPOSED = OutputRole("attention_composed")
"""Attention weights after composition. They may be negative and do not sum to 1."""

_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class ComposedAttentionConfig(AttentionConfig):
    """Configuration of composed attention.

    Attributes:
        rank: Rank R of the token-dependent matrices without their diagonal.
        before_softmax: Whether to compose scores.
        after_softmax: Whether to compose attention weights.
        by_query: Whether the composition depends on the query token.
        by_key: Whether the composition depends on the key token.
        static: Whether to add a learned matrix that is the same for all tokens.
    """

    kind: Literal["composed"] = "composed"
    rank: int = 2
    before_softmax: bool = True
    after_softmax: bool = True
    by_query: bool = True
    by_key: bool = True
    static: bool = False

    def _check(self) -> None:
        super()._check()
        self.require("rank", self.rank >= 1, "must be at least 1")
        is_applied = self.before_softmax or self.after_softmax
        self.require("before_softmax", is_applied, "must be true if after_softmax is false")
        has_matrix = self.by_query or self.by_key or self.static
        self.require("by_query", has_matrix, "must be true if by_key and static are false")

    @property
    def operators(self) -> frozenset[str]:
        """ONNX operators that the modules use in addition to those of BERT."""
        # Sqrt normalizes `first`; ReduceSum also sums over heads for each key.
        return frozenset({"ReduceSum", "Sqrt"} if self.by_query or self.by_key else ())

    def outputs(self) -> tuple[AttentionOutput, ...]:
        """Return the outputs of a layer: the softmax weights and, if enabled, the composed weights."""
        if not self.after_softmax:
            return super().outputs()
        composed = AttentionOutput(ATTENTION_COMPOSED, "dense", self.num_heads, "unbounded")
        return (*super().outputs(), composed)

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a randomly initialized layer module."""
        return ComposedSelfAttention(self, sizes)


class Kernel(NamedTuple):
    """Factors of each token's matrix over heads."""

    first: Tensor
    """(B, T, R, H): weight of each head in rank r."""
    second: Tensor
    """(B, T, R, H): weight of rank r in each composed head."""
    diagonal: Tensor
    """(B, T, H), between -1 and 1."""


class KernelProjections(nn.Module):
    """Projects hidden states to the factors of their matrices."""

    def __init__(self, config: ComposedAttentionConfig, hidden_size: int) -> None:
        super().__init__()
        heads, self.rank = config.num_heads, config.rank
        self.shape = (2 * config.rank, heads)
        inner_size = 2 * config.rank * heads
        self.hidden = nn.Linear(hidden_size, inner_size, bias=False)
        self.factors = nn.Linear(inner_size, inner_size, bias=False)
        self.diagonal = nn.Linear(hidden_size, heads, bias=False)
        nn.init.normal_(self.hidden.weight, std=math.sqrt(2 / (hidden_size + inner_size)))
        nn.init.normal_(self.factors.weight, std=0.02 / (math.sqrt(inner_size) * (heads + config.rank)))
        nn.init.normal_(self.diagonal.weight, std=0.005 * math.sqrt(2 / (hidden_size + heads)))

    def forward(self, hidden_states: Tensor) -> Kernel:
        """Return the factors for hidden states (B, T, D)."""
        factors = self.factors(gelu(self.hidden(hidden_states)))  # (B, T, 2 R H)
        factors = torch.unflatten(factors, -1, self.shape)  # (B, T, 2 R, H)
        first, second = factors[:, :, : self.rank], factors[:, :, self.rank :]
        # Not a mean, for the reason given in `RMSNorm`.
        mean_square = (first * first).sum(dim=-1, keepdim=True) * (1.0 / self.shape[1])
        first = first / torch.sqrt(mean_square + _NORM_EPS)
        return Kernel(first, second, torch.tanh(self.diagonal(hidden_states)))


class Composition(nn.Module):
    """Composes heads, either scores before the softmax or weights after it."""

    identity: Tensor

    def __init__(self, config: ComposedAttentionConfig, hidden_size: int) -> None:
        super().__init__()
        heads = config.num_heads
        self.by_query = KernelProjections(config, hidden_size) if config.by_query else None
        self.by_key = KernelProjections(config, hidden_size) if config.by_key else None
        self.static = nn.Parameter(torch.empty(heads, heads)) if config.static else None
        """(H, H), composed head by head."""
        if self.static is not None:
            nn.init.normal_(self.static, std=0.1 * math.sqrt(1 / heads))
        # Allocate on CPU explicitly so the buffer has values when the model is built on the meta device.
        self.register_buffer("identity", torch.eye(heads, device="cpu"), persistent=False)

    def forward(self, heads: Tensor, hidden_states: Tensor) -> Tensor:
        """Compose heads (B, H, T, T), query by key. Entries that are 0 in all heads remain 0.

        Args:
            heads: Scores or weights.
            hidden_states: (B, T, D).
        """
        composed = heads
        matrices = self._query_matrices(hidden_states)  # (B, T, H, H), (H, H) or None
        if matrices is not None:
            composed = (matrices @ heads.transpose(1, 2)).transpose(1, 2)
        if self.by_key is not None:
            first, second, diagonal = self.by_key(hidden_states)
            composed = composed + heads * _align_with_keys(diagonal)
            # A matrix product would require two more transposes, which is slower.
            for rank in range(first.shape[2]):
                mixed = (heads * _align_with_keys(first[:, :, rank])).sum(dim=1, keepdim=True)  # (B, 1, T, T)
                composed = composed + mixed * _align_with_keys(second[:, :, rank])
        return composed

    def _query_matrices(self, hidden_states: Tensor) -> Tensor | None:
        """Return the sum of the identity, the static matrix and the matrix of each query."""
        matrices = None if self.static is None else self.identity + self.static
        if self.by_query is None:
            return matrices
        first, second, diagonal = self.by_query(hidden_states)
        total: Tensor = second.transpose(-2, -1) @ first + (1.0 + diagonal)[..., None] * self.identity
        return total if self.static is None else total + self.static


def _align_with_keys(tensor: Tensor) -> Tensor:
    """(B, T, H) -> (B, H, 1, T)."""
    return tensor.transpose(1, 2)[:, :, None, :]


class ComposedSelfAttention(HeadProjections):
    """Multi-head self-attention with head composition before and after the softmax."""

    def __init__(self, config: ComposedAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__(config, sizes)
        self.before = Composition(config, sizes.hidden_size) if config.before_softmax else None
        self.after = Composition(config, sizes.hidden_size) if config.after_softmax else None

    def forward(self, hidden_states: Tensor, mask: AttentionMask) -> tuple[Tensor, Outputs]:
        """Compute the attention of one layer.

        Args:
            hidden_states: (B, T, D), floating point.
            mask: Keys that each query may attend to.

        Returns:
            The context (B, T, D), the softmax weights (B, H, T, T) and, if weights are composed, the composed
            weights (B, H, T, T). Both are before dropout and exactly 0 at masked keys.
        """
        query, key, value = self.project(hidden_states)  # (B, H, T, K) each
        scores = (query * self.scale) @ key.transpose(-2, -1)  # (B, H, T, T)
        if self.before is not None:
            scores = self.before(scores, hidden_states)
        weights = masked_softmax(scores, mask)
        outputs = {ATTENTION_WEIGHTS: weights}
        if self.after is not None:
            outputs[ATTENTION_COMPOSED] = self.after(weights, hidden_states)
        return self.combine(outputs.get(ATTENTION_COMPOSED, weights), value), outputs
