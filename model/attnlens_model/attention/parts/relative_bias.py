"""A learned bias on attention scores that depends on how far apart two tokens are.

Raffel et al. 2019, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
section 2.1, in the bidirectional form; MPNet (Song et al. 2020) adds the same bias in every layer.

Letters in shapes: T tokens, H heads, R buckets, M the longest input.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnlens_model.config_part import ConfigPart
from attnlens_model.embeddings import EMBEDDING_STD

_FEWEST_BUCKETS = 4


@dataclass(frozen=True, kw_only=True)
class RelativeBiasConfig(ConfigPart, path="attention.relative_bias"):
    """Which biases each head adds to its scores.

    Attributes:
        num_buckets: how many there are, chosen by the distance of key and query.
        max_distance: from this distance on all share the last bucket.
        per_layer: whether each layer has biases of its own; else all of one configuration have the same.
    """

    num_buckets: int
    max_distance: int = 128
    per_layer: bool = False

    def _check(self) -> None:
        buckets = self.num_buckets
        is_usable = buckets >= _FEWEST_BUCKETS and buckets % 2 == 0
        self.require("num_buckets", is_usable, f"must be even and at least {_FEWEST_BUCKETS}")
        limit = f"must be greater than num_buckets / 4 = {buckets // 4}"
        self.require("max_distance", self.max_distance > buckets // 4, limit)


def relative_position_bucket(relative_position: int, num_buckets: int, max_distance: int) -> int:
    """Return the bucket, 0 to num_buckets - 1, of a key that is `relative_position` places after its query.

    The lower half of the buckets is for keys up to the query, the upper half for those after it. In each, the
    shorter half of the distances have a bucket each; from there buckets grow geometrically to `max_distance`:
    exact + floor(log(distance / exact) / log(max_distance / exact) * logarithmic).

    The floor is taken in integers, by comparing powers, since a logarithm that comes out at 1.9999999 would
    move a distance to another bucket. For 32 buckets and 128, the published values, fp32 gives the same.
    """
    half = num_buckets // 2
    first = half if relative_position > 0 else 0
    distance = abs(relative_position)
    exact = half // 2
    if distance < exact:
        return first + distance
    logarithmic = half - exact
    # step <= log(distance / exact) / log(max_distance / exact) * logarithmic, as powers: without fractions
    reached = [
        step
        for step in range(1, logarithmic)
        if distance**logarithmic * exact**step >= max_distance**step * exact**logarithmic
    ]
    return first + exact + len(reached)


class RelativePositionBuckets(nn.Module):
    """The bucket of every query and key."""

    positions: Tensor
    buckets: Tensor

    def __init__(self, config: RelativeBiasConfig, max_tokens: int) -> None:
        super().__init__()
        # The devices are named so that the values exist even when the rest is built without storage.
        self.register_buffer("positions", torch.arange(max_tokens, device="cpu"), persistent=False)
        # By key - query + M - 1: a list of 2M - 1 instead of a table of M x M.
        buckets = [
            [relative_position_bucket(distance, config.num_buckets, config.max_distance)]
            for distance in range(1 - max_tokens, max_tokens)
        ]
        self.register_buffer("buckets", torch.tensor(buckets, device="cpu"), persistent=False)
        self.max_tokens = max_tokens

    def forward(self, num_tokens: int) -> Tensor:
        """Return the buckets (T, T, 1) int64, query by key, for T = `num_tokens`."""
        positions = self.positions[:num_tokens]
        distances = positions[None, :] - positions[:, None] + (self.max_tokens - 1)  # (T, T), query by key
        # The bucket before its bias: a constant lookup in the parameter would be folded, and its name lost.
        return nn.functional.embedding(distances, self.buckets)  # (T, T, 1)


class RelativePositionBias(RelativePositionBuckets):
    """One learned number for each bucket and head."""

    def __init__(self, config: RelativeBiasConfig, num_heads: int, max_tokens: int) -> None:
        super().__init__(config, max_tokens)
        self.bias = bias_table(config, num_heads)

    def forward(self, num_tokens: int) -> Tensor:
        """Return the bias (1, H, T, T), query by key, for T = `num_tokens`."""
        return biases_of(super().forward(num_tokens), self.bias)


def bias_table(config: RelativeBiasConfig, num_heads: int) -> nn.Embedding:
    """Return a fresh table (R, H): a number for each bucket and head."""
    table = nn.Embedding(config.num_buckets, num_heads)
    nn.init.normal_(table.weight, std=EMBEDDING_STD)
    return table


def biases_of(buckets: Tensor, table: nn.Embedding) -> Tensor:
    """Return the biases (1, H, T, T) of buckets (T, T, 1) int64."""
    biases: Tensor = table(buckets)  # (T, T, 1, H)
    return biases.permute(2, 3, 0, 1)  # (1, H, T, T)
