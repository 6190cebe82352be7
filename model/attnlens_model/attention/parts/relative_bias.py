"""Relative position bias of T5: a learned bias per head and bucket of relative positions, added to scores.

    score[h, i, j] = query[h, i] . key[h, j] * scale + bias[bucket(j - i), h]

Raffel et al. 2019, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
section 2.1 (https://arxiv.org/abs/1910.10683), in its bidirectional form. MPNet (Song et al. 2020,
https://arxiv.org/abs/2004.09297) shares one table across all layers.

Shape legend: T tokens, H heads, R buckets, M maximum input length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnlens_model.config_part import ConfigPart
from attnlens_model.embeddings import EMBEDDING_STD

_MIN_BUCKETS = 4


@dataclass(frozen=True, kw_only=True)
class RelativeBiasConfig(ConfigPart, path="attention.relative_bias"):
    """Buckets and tables of the relative position bias.

    Attributes:
        num_buckets: Number of buckets R.
        max_distance: Distance at and beyond which all tokens share the last bucket.
        per_layer: Whether each layer has its own table. If False, all layers with the same configuration
            share one.
    """

    num_buckets: int
    max_distance: int = 128
    per_layer: bool = False

    def _check(self) -> None:
        buckets = self.num_buckets
        is_valid = buckets >= _MIN_BUCKETS and buckets % 2 == 0
        self.require("num_buckets", is_valid, f"must be even and at least {_MIN_BUCKETS}")
        limit = f"must be greater than num_buckets / 4 = {buckets // 4}"
        self.require("max_distance", self.max_distance > buckets // 4, limit)


def relative_position_bucket(relative_position: int, num_buckets: int, max_distance: int) -> int:
    """Return the bucket, from 0 to num_buckets - 1, for a relative position: key position - query position.

    The lower half of the buckets is for keys up to the query, the upper half for later keys. Within each
    half, the first half of the buckets cover a single distance each, and the rest widen geometrically up to
    `max_distance`:

        exact + floor(log(distance / exact) / log(max_distance / exact) * (half - exact))

    The floor is computed by comparing integer powers, because a rounding error of the logarithm could move a
    distance to another bucket. For the published 32 buckets and maximum distance 128, fp32 gives the same
    result.
    """
    half = num_buckets // 2
    first = half if relative_position > 0 else 0
    distance = abs(relative_position)
    exact = half // 2
    if distance < exact:
        return first + distance
    num_logarithmic = half - exact
    # Equivalent to step <= log(distance / exact) / log(max_distance / exact) * num_logarithmic.
    reached = [
        step
        for step in range(1, num_logarithmic)
        if distance**num_logarithmic * exact**step >= max_distance**step * exact**num_logarithmic
    ]
    return first + exact + len(reached)


class RelativePositionBuckets(nn.Module):
    """Computes the bucket of each query-key pair."""

    positions: Tensor
    buckets: Tensor

    def __init__(self, config: RelativeBiasConfig, max_tokens: int) -> None:
        super().__init__()
        # Allocate on CPU explicitly so the buffers have values when the model is built on the meta device.
        self.register_buffer("positions", torch.arange(max_tokens, device="cpu"), persistent=False)
        # Indexed by key - query + M - 1, which takes 2M - 1 elements instead of M x M.
        buckets = [
            [relative_position_bucket(position, config.num_buckets, config.max_distance)]
            for position in range(1 - max_tokens, max_tokens)
        ]
        self.register_buffer("buckets", torch.tensor(buckets, device="cpu"), persistent=False)
        self.max_tokens = max_tokens

    def forward(self, num_tokens: int) -> Tensor:
        """Return the buckets (T, T, 1) int64, query by key, for T = `num_tokens`."""
        positions = self.positions[:num_tokens]
        indices = positions[None, :] - positions[:, None] + (self.max_tokens - 1)  # (T, T), query by key
        # Look up buckets before biases: a constant lookup in the parameter would be folded at export, and
        # the name of the parameter would be lost.
        return nn.functional.embedding(indices, self.buckets)  # (T, T, 1)


class RelativePositionBias(RelativePositionBuckets):
    """Computes the bias of all heads from a learned table."""

    def __init__(self, config: RelativeBiasConfig, num_heads: int, max_tokens: int) -> None:
        super().__init__(config, max_tokens)
        self.bias = make_bias_table(config, num_heads)

    def forward(self, num_tokens: int) -> Tensor:
        """Return the bias (1, H, T, T), query by key, for T = `num_tokens`."""
        return look_up_biases(super().forward(num_tokens), self.bias)


def make_bias_table(config: RelativeBiasConfig, num_heads: int) -> nn.Embedding:
    """Return a randomly initialized table (R, H)."""
    table = nn.Embedding(config.num_buckets, num_heads)
    nn.init.normal_(table.weight, std=EMBEDDING_STD)
    return table


def look_up_biases(buckets: Tensor, table: nn.Embedding) -> Tensor:
    """Return the biases (1, H, T, T) for buckets (T, T, 1) int64."""
    biases: Tensor = table(buckets)  # (T, T, 1, H)
    return biases.permute(2, 3, 0, 1)  # (1, H, T, T)
