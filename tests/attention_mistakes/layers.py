"""A self-attention layer in plain PyTorch with the usual options, and mistakes that users make in it.

Dimensions: B batch, T tokens, D hidden size, H heads, G heads of keys and values, K head size.
"""

# ruff: noqa: ARG002 - mistakes ignore arguments

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

HIDDEN_SIZE, NUM_HEADS = 48, 4
HEAD_SIZE = HIDDEN_SIZE // NUM_HEADS


@dataclass(frozen=True)
class Variant:
    """Options of a correct layer."""

    is_causal: bool = False
    rotary: bool = False
    fused: bool = False
    bias: bool = True
    groups: int = NUM_HEADS

    def __str__(self) -> str:
        parts = [name for name in ("is_causal", "rotary", "fused", "bias") if getattr(self, name)]
        return " ".join([*parts, f"{self.groups} groups"])


VARIANTS = tuple(
    Variant(causal, rotary, fused, bias, groups)
    for causal, rotary, fused, bias in product((False, True), repeat=4)
    for groups in (NUM_HEADS, 2)
)


class Attention(nn.Module):
    """Multi-head self-attention with grouped keys and values; each step can be replaced."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.variant, bias = variant, variant.bias
        self.sizes = [HIDDEN_SIZE, HEAD_SIZE * variant.groups, HEAD_SIZE * variant.groups]
        if variant.fused:
            self.qkv = nn.Linear(HIDDEN_SIZE, sum(self.sizes), bias=bias)
        else:
            self.query, self.key, self.value = (
                nn.Linear(HIDDEN_SIZE, size, bias=bias) for size in self.sizes
            )
        self.output = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=bias)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def project(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D) -> (B, T, H * K) and twice (B, T, G * K)."""
        if self.variant.fused:
            query, key, value = self.qkv(states).split(self.sizes, dim=-1)
            return query, key, value
        return self.query(states), self.key(states), self.value(states)

    def split(self, projected: Tensor) -> Tensor:
        """(B, T, H * K) -> (B, H, T, K)."""
        return projected.reshape(*projected.shape[:2], -1, HEAD_SIZE).transpose(1, 2)

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotate pairs of components by an angle that is proportional to the position (Su et al. 2021)."""
        if not self.variant.rotary:
            return heads
        half = HEAD_SIZE // 2
        angles = torch.arange(heads.shape[-2])[:, None] * 100.0 ** (-torch.arange(half) / half)
        first, second = heads.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def repeat(self, heads: Tensor) -> Tensor:
        """(B, G, T, K) -> (B, H, T, K)."""
        return heads.repeat_interleave(NUM_HEADS // heads.shape[1], dim=1)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2) / math.sqrt(HEAD_SIZE)

    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        num_tokens = scores.shape[-1]
        allowed = torch.ones(num_tokens, num_tokens, dtype=torch.bool)
        allowed = allowed.tril() if self.variant.is_causal else allowed
        return allowed if mask is None else allowed & mask[:, None, None, :]

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.masked_fill(~self.allowed(scores, mask), -math.inf).softmax(dim=-1)

    def drop(self, weights: Tensor) -> Tensor:
        return weights

    def join(self, contexts: Tensor) -> Tensor:
        """(B, H, T, K) -> (B, T, D)."""
        return contexts.transpose(1, 2).flatten(2)

    def finish(self, joined: Tensor) -> Tensor:
        return torch.as_tensor(self.output(joined))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, T, K) three times -> (B, H, T, K)."""
        return self.drop(self.weights(self.scores(query, key), mask)) @ value

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (self.split(each) for each in self.project(states))
        query, key = self.rotate(query), self.rotate(key)
        contexts = self.attend(query, self.repeat(key), self.repeat(value), mask)
        return self.finish(self.join(contexts))


# Other correct implementations


class Fused(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        allowed = self.allowed(torch.empty(query.shape[-2], key.shape[-2]), mask)
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)


class GroupedInOperator(Fused):
    def repeat(self, heads: Tensor) -> Tensor:
        return heads

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        allowed = self.allowed(torch.empty(query.shape[-2], key.shape[-2]), mask)
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, enable_gqa=True
        )


class Einsum(Attention):
    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.einsum("bhqk,bhsk->bhqs", query, key) / math.sqrt(HEAD_SIZE)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return torch.einsum("bhsk,bhqs->bhqk", value, self.weights(self.scores(query, key), mask))


class OwnSoftmax(Attention):
    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores.masked_fill(~self.allowed(scores, mask), -math.inf)
        exponentials = (scores - scores.amax(dim=-1, keepdim=True)).exp()
        return exponentials / exponentials.sum(dim=-1, keepdim=True)


class LargeNegativeNumber(Attention):
    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores + torch.where(self.allowed(scores, mask), 0.0, -1e9)).softmax(dim=-1)


class MaskedAndRenormalized(Attention):
    """Weights are set to 0 after the softmax and divided by their sum, which is the same function."""

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = scores.softmax(dim=-1) * self.allowed(scores, mask)
        return weights / weights.sum(dim=-1, keepdim=True)


class BiasByDistance(Attention):
    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        positions = torch.arange(query.shape[-2])
        slopes = 2.0 ** -torch.arange(1, NUM_HEADS + 1)
        return super().scores(query, key) - slopes[:, None, None] * (positions[:, None] - positions).abs()


class NormalizedQueriesAndKeys(Attention):
    def rotate(self, heads: Tensor) -> Tensor:
        return super().rotate(nn.functional.rms_norm(heads, (HEAD_SIZE,)))


class Interleaved(Attention):
    """Rotates adjacent components instead of the two halves."""

    def rotate(self, heads: Tensor) -> Tensor:
        return super().rotate(heads.reshape(*heads.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2))


class InBlock(Attention):
    """Pre-norm and a residual connection in the layer."""

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        normed = nn.functional.layer_norm(states, (HIDDEN_SIZE,))
        return states + super().forward(normed, mask)


class HeadByHead(nn.Module):
    """One module per head, as in many tutorials."""

    def __init__(self, variant: Variant, *, is_shared: bool = False, is_sliced: bool = False) -> None:
        super().__init__()
        self.variant, self.is_sliced = variant, is_sliced
        width = HEAD_SIZE if is_sliced else HIDDEN_SIZE
        heads = [
            nn.ModuleList(nn.Linear(width, HEAD_SIZE, bias=variant.bias) for _ in range(3))
            for _ in range(NUM_HEADS)
        ]
        self.heads = nn.ModuleList([heads[0]] * NUM_HEADS if is_shared else heads)
        self.output = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        contexts = []
        for index, projections in enumerate(self.heads):
            assert isinstance(projections, nn.ModuleList)
            part = states[..., index * HEAD_SIZE : (index + 1) * HEAD_SIZE] if self.is_sliced else states
            query, key, value = (project(part) for project in projections)
            scores = query @ key.transpose(-1, -2) * HEAD_SIZE**-0.5
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool)
            allowed = allowed.tril() if self.variant.is_causal else allowed
            allowed = allowed if mask is None else allowed & mask[:, None, :]
            contexts.append(scores.masked_fill(~allowed, -math.inf).softmax(dim=-1) @ value)
        return torch.as_tensor(self.output(torch.cat(contexts, dim=-1)))


CORRECT: tuple[Callable[[Variant], nn.Module], ...] = (
    Attention, Fused, GroupedInOperator, Einsum, OwnSoftmax, LargeNegativeNumber, MaskedAndRenormalized,
    BiasByDistance, NormalizedQueriesAndKeys, Interleaved, InBlock, HeadByHead,
)  # fmt: skip


# Mistakes


class ValuesUnused(Attention):
    def project(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, _ = super().project(states)
        return query, key, key


class KeysUnused(Attention):
    def project(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, _, value = super().project(states)
        return query, query, value


class RotatedKeysAsValues(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, key, key, mask)


class SlicedInput(Attention):
    """Each head projects only its slice of the input."""

    def project(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = self.variant.groups
        width = HIDDEN_SIZE // groups
        weight = (
            self.qkv.weight
            if self.variant.fused
            else torch.cat([self.query.weight, self.key.weight, self.value.weight])
        )
        parts = []
        for matrix in torch.split(weight, self.sizes):
            size = len(matrix) // groups
            masked = torch.zeros_like(matrix)
            for group in range(groups):
                rows, columns = (
                    slice(group * size, (group + 1) * size),
                    slice(group * width, (group + 1) * width),
                )
                masked[rows, columns] = matrix[rows, columns]
            parts.append(states @ masked.T)
        return parts[0], parts[1], parts[2]


class SlicedInputAfterNorm(SlicedInput):
    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        return states + super().forward(nn.functional.layer_norm(states, (HIDDEN_SIZE,)), mask)


class NoScaling(Attention):
    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2)


class NoScalingWithBias(BiasByDistance):
    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return super().scores(query * HEAD_SIZE**0.5, key)


class NoScalingOfNormalized(NormalizedQueriesAndKeys, NoScaling):
    pass


class NoScalingOwnSoftmax(OwnSoftmax, NoScaling):
    pass


class NoScalingInOperator(Fused):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query * HEAD_SIZE**0.5, key, value, mask)


class ScaledTwice(Fused):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query * HEAD_SIZE**-0.5, key, value, mask)


class ScaledByHiddenSize(Attention):
    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2) / math.sqrt(HIDDEN_SIZE)


class ScaledByTokens(Attention):
    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2) / math.sqrt(key.shape[-2])


class MultipliedByScale(Attention):
    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2) * math.sqrt(HEAD_SIZE)


class SoftmaxOverQueries(Attention):
    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.masked_fill(~self.allowed(scores, mask), -1e9).softmax(dim=-2)


class SoftmaxOverHeads(Attention):
    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.masked_fill(~self.allowed(scores, mask), -1e9).softmax(dim=1)


class OwnSoftmaxOverQueries(Attention):
    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        exponentials = scores.masked_fill(~self.allowed(scores, mask), -1e9).exp()
        return exponentials / exponentials.sum(dim=-2, keepdim=True)


class SoftmaxTwice(Attention):
    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weights(super().weights(scores, mask), mask)


class NoSoftmax(Attention):
    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores * self.allowed(scores, mask)


class Sigmoid(Attention):
    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.masked_fill(~self.allowed(scores, mask), -math.inf).sigmoid()


class LogSoftmax(Attention):
    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.masked_fill(~self.allowed(scores, mask), -1e9).log_softmax(dim=-1)


class LaterTokensVisible(Attention):
    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool)
        return allowed if mask is None else allowed & mask[:, None, None, :]


class NextTokenVisible(Attention):
    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(1)
        return allowed if mask is None else allowed & mask[:, None, None, :]


class MaskInverted(Attention):
    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return ~super().allowed(scores, mask)


class MaskTransposed(Attention):
    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().allowed(scores, mask).transpose(-1, -2)


class MaskHidesItself(Attention):
    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().allowed(scores, mask).tril(-1)


class MaskedScoresAreZero(Attention):
    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores * self.allowed(scores, mask)).softmax(dim=-1)


class MaskedScoresAreSmall(Attention):
    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.masked_fill(~self.allowed(scores, mask), 1e-9).softmax(dim=-1)


class MaskAfterSoftmax(Attention):
    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.softmax(dim=-1) * self.allowed(scores, mask)


class CausalMaskLostWithPadding(Attention):
    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().allowed(scores, None) if mask is None else mask[:, None, None, :]


class PaddingIgnored(Attention):
    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().allowed(scores, None)


class PaddingInverted(Attention):
    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().allowed(scores, None if mask is None else ~mask)


class PaddedQueriesMasked(Attention):
    def allowed(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        allowed = super().allowed(scores, None)
        return allowed if mask is None else allowed & mask[:, None, :, None]


class SplitByView(Attention):
    def split(self, projected: Tensor) -> Tensor:
        return projected.reshape(len(projected), -1, projected.shape[1], HEAD_SIZE)


class JoinedWithoutTranspose(Attention):
    def join(self, contexts: Tensor) -> Tensor:
        return contexts.reshape(len(contexts), -1, HIDDEN_SIZE)


class JoinedWithoutTransposeOrOutput(JoinedWithoutTranspose):
    def __init__(self, variant: Variant) -> None:
        super().__init__(variant)
        del self.output

    def finish(self, joined: Tensor) -> Tensor:
        return joined


class HeadsAveraged(Attention):
    def __init__(self, variant: Variant) -> None:
        super().__init__(variant)
        self.output = nn.Linear(HEAD_SIZE, HIDDEN_SIZE)

    def join(self, contexts: Tensor) -> Tensor:
        return contexts.mean(dim=1)


class OutputUnused(Attention):
    def finish(self, joined: Tensor) -> Tensor:
        return joined


class SharedHeads(Attention):
    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return super().scores(query[:, :1].expand_as(query), key[:, :1].expand_as(key))


class SharedModules(HeadByHead):
    def __init__(self, variant: Variant) -> None:
        super().__init__(variant, is_shared=True)


class SlicedModules(HeadByHead):
    def __init__(self, variant: Variant) -> None:
        super().__init__(variant, is_sliced=True)


class OneHead(Attention):
    def split(self, projected: Tensor) -> Tensor:
        return projected[:, None]

    def repeat(self, heads: Tensor) -> Tensor:
        return heads.repeat(1, 1, 1, HIDDEN_SIZE // heads.shape[-1])

    def rotate(self, heads: Tensor) -> Tensor:
        return heads


class DropoutInEvaluation(Attention):
    def drop(self, weights: Tensor) -> Tensor:
        return nn.functional.dropout(weights, 0.1)


class TextsMixed(Attention):
    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(states.transpose(0, 1)).transpose(0, 1)


class OnlyQueriesRotated(Attention):
    is_query = True

    def rotate(self, heads: Tensor) -> Tensor:
        rotated = super().rotate(heads) if self.is_query else heads
        self.is_query = not self.is_query
        return rotated


class RotatedByHead(Attention):
    def rotate(self, heads: Tensor) -> Tensor:
        return super().rotate(heads.transpose(1, 2)).transpose(1, 2)


class RotatedWrongPairs(Attention):
    """The two halves are rotated with the angles of adjacent components."""

    def rotate(self, heads: Tensor) -> Tensor:
        half = HEAD_SIZE // 2
        frequencies = (100.0 ** (-torch.arange(half) / half)).repeat_interleave(2)
        angles = torch.arange(heads.shape[-2])[:, None] * frequencies
        first, second = heads.chunk(2, dim=-1)
        return heads * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


@dataclass(frozen=True)
class WrongLayer:
    """A mistake with the first check that must fail, a part of its remedy, and the variants that have it."""

    make: Callable[[Variant], nn.Module]
    check: str
    remedy: str
    applies: Callable[[Variant], bool] = bool

    def __str__(self) -> str:
        return getattr(self.make, "__name__", "")


def _causal(variant: Variant) -> bool:
    return variant.is_causal


def _rotary(variant: Variant) -> bool:
    return variant.rotary


def _ungrouped(variant: Variant) -> bool:
    return variant.groups == NUM_HEADS


def _plain(variant: Variant) -> bool:
    return _ungrouped(variant) and not variant.rotary and not variant.fused


_IGNORED = "Use them in forward"
_SCALE = "square root of the head size"
_BEFORE_SOFTMAX = "to -inf before the softmax"
_EACH_SLICE = "all D features"
_JOIN = "contexts.transpose(1, 2)"
_PADDING = "Set scores of padded keys"

WRONG = (
    WrongLayer(ValuesUnused, "gradients", _IGNORED),
    WrongLayer(KeysUnused, "gradients", _IGNORED, _ungrouped),
    WrongLayer(RotatedKeysAsValues, "gradients", _IGNORED),
    WrongLayer(SlicedInput, "heads", _EACH_SLICE),
    WrongLayer(SlicedInputAfterNorm, "heads", _EACH_SLICE),
    WrongLayer(SlicedModules, "heads", _EACH_SLICE, _plain),
    WrongLayer(NoScaling, "scaling", _SCALE),
    WrongLayer(NoScalingWithBias, "scaling", _SCALE),
    WrongLayer(NoScalingOfNormalized, "scaling", _SCALE),
    WrongLayer(NoScalingOwnSoftmax, "scaling", _SCALE),
    WrongLayer(NoScalingInOperator, "scaling", _SCALE),
    WrongLayer(ScaledTwice, "scaling", "applied twice"),
    WrongLayer(ScaledByHiddenSize, "scaling", "not of the hidden size"),
    WrongLayer(ScaledByTokens, "scaling", "not of the number of tokens"),
    WrongLayer(MultipliedByScale, "scaling", "instead of multiplying"),
    WrongLayer(SoftmaxOverQueries, "softmax axis", "softmax(dim=-1)"),
    WrongLayer(SoftmaxOverHeads, "softmax axis", "softmax(dim=-1)"),
    WrongLayer(OwnSoftmaxOverQueries, "softmax axis", "softmax(dim=-1)"),
    WrongLayer(SoftmaxTwice, "softmax axis", "once"),
    WrongLayer(NoSoftmax, "row sums", "Apply the softmax"),
    WrongLayer(Sigmoid, "row sums", "Apply the softmax"),
    WrongLayer(LogSoftmax, "row sums", "Apply the softmax"),
    WrongLayer(LaterTokensVisible, "causal mask", _BEFORE_SOFTMAX, _causal),
    WrongLayer(NextTokenVisible, "causal mask", _BEFORE_SOFTMAX, _causal),
    WrongLayer(MaskInverted, "causal mask", "inverted"),
    WrongLayer(MaskTransposed, "causal mask", "triu(..., diagonal=1)", _causal),
    WrongLayer(MaskHidesItself, "causal mask", "attend to itself", _causal),
    WrongLayer(MaskedScoresAreZero, "causal mask", _BEFORE_SOFTMAX, _causal),
    WrongLayer(MaskedScoresAreSmall, "causal mask", _BEFORE_SOFTMAX, _causal),
    WrongLayer(MaskAfterSoftmax, "causal mask", "after the softmax leaks", _causal),
    WrongLayer(CausalMaskLostWithPadding, "causal mask", "both masks", _causal),
    WrongLayer(MaskedScoresAreZero, "padding mask", _PADDING, lambda variant: not variant.is_causal),
    WrongLayer(MaskAfterSoftmax, "padding mask", _PADDING, lambda variant: not variant.is_causal),
    WrongLayer(PaddingIgnored, "padding mask", _PADDING),
    WrongLayer(PaddingInverted, "padding mask", "`mask_style`"),
    WrongLayer(PaddedQueriesMasked, "padding mask", "the last axis"),
    WrongLayer(SplitByView, "scores of token pairs", "transpose(1, 2)"),
    WrongLayer(JoinedWithoutTranspose, "heads", _JOIN),
    WrongLayer(JoinedWithoutTransposeOrOutput, "heads", _JOIN),
    WrongLayer(HeadsAveraged, "heads", "Concatenate"),
    WrongLayer(OutputUnused, "gradients", _IGNORED),
    WrongLayer(SharedHeads, "heads", "Give each head its own part"),
    WrongLayer(SharedModules, "heads", "Give each head its own part", _plain),
    WrongLayer(OneHead, "heads", "Split queries, keys and values into heads", _ungrouped),
    WrongLayer(DropoutInEvaluation, "dropout in evaluation", "training=self.training"),
    WrongLayer(TextsMixed, "batch independence", "batch_first"),
    WrongLayer(OnlyQueriesRotated, "token order", "both queries and keys", _rotary),
    WrongLayer(RotatedByHead, "token order", "token", _rotary),
    WrongLayer(RotatedWrongPairs, "token order", "same pairs", _rotary),
)
