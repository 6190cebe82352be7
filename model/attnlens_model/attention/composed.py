"""Attention whose heads are composed anew for every pair of tokens, before and after the softmax.

Xiao et al. 2024, "Improving Transformers with Dynamically Composable Multi-Head Attention"
(https://arxiv.org/abs/2405.08553). Composed head n takes, at query i and key j, from each head m

    composed[n, i, j] = sum over m of heads[m, i, j] * (I + static + by_query[i] + by_key[j])[n, m]

where a matrix that depends on a token is sum over r of second[r, n] first[r, m], plus tanh(diagonal[n]) where
n = m; its parts are projections of the token's vector. Scores are composed, masked and normalised, and the
weights of the softmax are composed again. These sum to 1 no more, and may be negative. Values stay as they
are.

Where paper and published programs differ, this follows the program that trained the published models
(https://github.com/Caiyun-AI/DCFormer, jax/): the identity beside the static matrix, and the standard
deviations of fresh weights. Its PyTorch version draws the diagonal ten times as wide; GELU is exact, as in
PyTorch.

Letters in shapes: B batch, T tokens, D width, H heads, R rank.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnlens_model.activations import gelu
from attnlens_model.attention.mechanism import (
    ATTENTION_WEIGHTS,
    AttentionConfig,
    AttentionOutput,
    EncoderSizes,
    OutputRole,
    Outputs,
)
from attnlens_model.attention.parts.heads import HeadProjections
from attnlens_model.attention.parts.masks import AttentionMask
from attnlens_model.attention.parts.weights import masked_softmax

ATTENTION_COMPOSED = OutputRole("attention_composed")
"""The weights by which values are really added up; of either sign, with any sum."""

_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class ComposedAttentionConfig(AttentionConfig):
    """Heads that are composed of one another, differently for every query and key.

    Attributes:
        rank: R, of the matrices that depend on a token, their diagonal aside.
        before_softmax: whether scores are composed.
        after_softmax: whether the weights of the softmax are.
        by_query: whether the query's vector has a say in it.
        by_key: whether the key's vector has.
        static: whether a matrix that is the same for all tokens has.
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
        is_used = self.before_softmax or self.after_softmax
        self.require("before_softmax", is_used, "must be true where after_softmax is false")
        has_any = self.by_query or self.by_key or self.static
        self.require("by_query", has_any, "must be true where by_key and static are false")

    @property
    def operators(self) -> frozenset[str]:
        """The operators of ONNX that the modules need beside those of BERT."""
        # The scale of what heads are weighed by, and the sum over heads for keys.
        return frozenset({"ReduceSum", "Sqrt"} if self.by_query or self.by_key else ())

    def outputs(self) -> tuple[AttentionOutput, ...]:
        """Return what a layer returns, in order."""
        if not self.after_softmax:
            return super().outputs()
        composed = AttentionOutput(ATTENTION_COMPOSED, "dense", self.num_heads, "unbounded")
        return (*super().outputs(), composed)

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a fresh module of one layer."""
        return ComposedSelfAttention(self, sizes)


class Kernel(NamedTuple):
    """What makes the matrix of each token."""

    first: Tensor
    """(B, T, R, H): what is taken of each head."""
    second: Tensor
    """(B, T, R, H): what is given to each composed head."""
    diagonal: Tensor
    """(B, T, H), within -1 and 1."""


class KernelProjections(nn.Module):
    """Projects token vectors to their matrices over heads."""

    def __init__(self, config: ComposedAttentionConfig, width: int) -> None:
        super().__init__()
        heads, self.rank = config.num_heads, config.rank
        self.shape = (2 * config.rank, heads)
        inner = 2 * config.rank * heads
        self.hidden = nn.Linear(width, inner, bias=False)
        self.factors = nn.Linear(inner, inner, bias=False)
        self.diagonal = nn.Linear(width, heads, bias=False)
        nn.init.normal_(self.hidden.weight, std=math.sqrt(2 / (width + inner)))
        nn.init.normal_(self.factors.weight, std=0.02 / (math.sqrt(inner) * (heads + config.rank)))
        nn.init.normal_(self.diagonal.weight, std=0.005 * math.sqrt(2 / (width + heads)))

    def forward(self, hidden_states: Tensor) -> Kernel:
        """Return the kernel of each of (B, T, D)."""
        factors = self.factors(gelu(self.hidden(hidden_states)))  # (B, T, 2 R H)
        factors = torch.unflatten(factors, -1, self.shape)  # (B, T, 2 R, H)
        first, second = factors[:, :, : self.rank], factors[:, :, self.rank :]
        # The sum, not the mean: see RMSNorm.
        mean_square = (first * first).sum(dim=-1, keepdim=True) * (1.0 / self.shape[1])
        first = first / torch.sqrt(mean_square + _NORM_EPS)
        return Kernel(first, second, torch.tanh(self.diagonal(hidden_states)))


class Composition(nn.Module):
    """Composes heads of one another; scores before the softmax, or weights after it."""

    identity: Tensor

    def __init__(self, config: ComposedAttentionConfig, width: int) -> None:
        super().__init__()
        heads = config.num_heads
        self.by_query = KernelProjections(config, width) if config.by_query else None
        self.by_key = KernelProjections(config, width) if config.by_key else None
        self.static = nn.Parameter(torch.empty(heads, heads)) if config.static else None
        """Row n is what composed head n takes of each head beside itself."""
        if self.static is not None:
            nn.init.normal_(self.static, std=0.1 * math.sqrt(1 / heads))
        # The device is named so that the values exist even when the rest is built without storage.
        self.register_buffer("identity", torch.eye(heads, device="cpu"), persistent=False)

    def forward(self, heads: Tensor, hidden_states: Tensor) -> Tensor:
        """Compose (B, H, T, T), query by key, by the vectors (B, T, D). What is 0 in all heads stays 0."""
        composed = heads
        matrices = self._query_matrices(hidden_states)  # (B, T, H, H), (H, H) or None
        if matrices is not None:
            composed = (matrices @ heads.transpose(1, 2)).transpose(1, 2)
        if self.by_key is not None:
            first, second, diagonal = self.by_key(hidden_states)
            composed = composed + heads * _by_key(diagonal)
            # Matrices here would need heads beside keys: two more transposes, which take longer than these.
            for rank in range(first.shape[2]):
                taken = (heads * _by_key(first[:, :, rank])).sum(dim=1, keepdim=True)  # (B, 1, T, T)
                composed = composed + taken * _by_key(second[:, :, rank])
        return composed

    def _query_matrices(self, hidden_states: Tensor) -> Tensor | None:
        """Return what each query composes by, the heads themselves included."""
        matrices = None if self.static is None else self.identity + self.static
        if self.by_query is None:
            return matrices
        first, second, diagonal = self.by_query(hidden_states)
        whole: Tensor = second.transpose(-2, -1) @ first + (1.0 + diagonal)[..., None] * self.identity
        return whole if self.static is None else whole + self.static


def _by_key(tensor: Tensor) -> Tensor:
    """(B, T, H) -> (B, H, 1, T)."""
    return tensor.transpose(1, 2)[:, :, None, :]


class ComposedSelfAttention(HeadProjections):
    """Multi-head self-attention with compositions of heads before and after the softmax."""

    def __init__(self, config: ComposedAttentionConfig, sizes: EncoderSizes) -> None:
        width = sizes.hidden_size
        super().__init__(width, config.num_heads, config.dropout)
        self.before = Composition(config, width) if config.before_softmax else None
        self.after = Composition(config, width) if config.after_softmax else None

    def forward(self, hidden_states: Tensor, mask: AttentionMask) -> tuple[Tensor, Outputs]:
        """Attend.

        Args:
            hidden_states: (B, T, D), floating point.
            mask: which keys each query may attend to.

        Returns:
            The context (B, T, D), the weights (B, H, T, T) after softmax and, where they are composed, the
            composed ones (B, H, T, T), as they are before dropout. Both are 0 at masked keys.
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
