"""Attention whose scores know the content and the distance of two tokens by vectors of their own.

He et al. 2020, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", section 3.1
(https://arxiv.org/abs/2006.03654). With content vectors Q, K of the tokens, position vectors Qr, Kr of the
distances, and row(i - j) the row of the distance from token j to token i:

    score[i, j] = (Q[i] . K[j]  +  Q[i] . Kr[row(i - j)]  +  K[j] . Qr[row(i - j)]) / sqrt(d * (1 + n))

The second term is "content to position" (c2p), the third "position to content" (p2c); n is how many of the
two there are. The paper writes row(j - i) in the third; the published implementation takes the same row in
both, and so does this. The distances' embeddings are one table, shared by all layers. Versions 2 and 3 of the
model (He et al. 2021, https://arxiv.org/abs/2111.09543) count far distances in buckets.

Letters in shapes: B batch, T tokens, D width, H heads, K head width, R rows of the table, M longest input.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnlens_model.attention.mechanism import (
    ATTENTION_WEIGHTS,
    AttentionConfig,
    BatchInputs,
    EncoderSizes,
    Outputs,
)
from attnlens_model.attention.parts.heads import HeadProjections
from attnlens_model.attention.parts.masks import AttentionMask, prepare_mask
from attnlens_model.attention.parts.weights import attention_weights
from attnlens_model.embeddings import EMBEDDING_STD


@dataclass(frozen=True, kw_only=True)
class DisentangledAttentionConfig(AttentionConfig):
    """Which terms of distance are added to scores, and how distances are told apart.

    Attributes:
        terms: "c2p", "p2c" or both, "c2p|p2c".
        distance_buckets: half as many distances have a bucket each, the others share as many; 0: each
            distance up to `max_relative_positions` has one.
        max_relative_positions: from this distance on all are alike; None means the longest input.
        share_att_key: whether distances are projected as content is; else they have projections of their own.
        distance_norm: whether the distances' embeddings go through a LayerNorm.
        key_bias: whether the projections to keys, of content and of distances, have biases.
    """

    kind: Literal["disentangled"] = "disentangled"
    terms: Literal["c2p", "p2c", "c2p|p2c"]
    distance_buckets: int = 0
    max_relative_positions: int | None = None
    share_att_key: bool = False
    distance_norm: bool = False
    key_bias: bool = True

    def check_sizes(self, sizes: EncoderSizes) -> None:
        """Check what depends on the encoder: that heads divide its width, and that buckets fit distances."""
        super().check_sizes(sizes)
        farthest, middle = self.farthest_distance(sizes.max_tokens), self.distance_buckets // 2
        self.require("max_relative_positions", farthest >= 1, "must be at least 1, or null")
        is_usable = self.distance_buckets == 0 or 1 <= middle < farthest - 1
        limit = (
            f"must be 0 (no buckets), or at least 2 and less than 2 * (max_relative_positions={farthest} - 1)"
        )
        self.require("distance_buckets", is_usable, limit)

    def farthest_distance(self, max_tokens: int) -> int:
        """Return the distance from which on all are alike."""
        return max_tokens if self.max_relative_positions is None else self.max_relative_positions

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a fresh module of one layer."""
        return DisentangledSelfAttention(self, sizes)

    def make_shared(self, sizes: EncoderSizes) -> nn.Module:
        """Return the module that computes mask and distances."""
        return SharedDistances(self, sizes)


def bucketed_distances(max_distance: int, num_buckets: int, max_relative_positions: int) -> list[int]:
    """Return the bucket of each distance from 0 to `max_distance`; the opposite distance has its negative.

    With m = num_buckets // 2, distances up to m are their own bucket. From there buckets grow geometrically:

        m + ceil(log(distance / m) / log((max_relative_positions - 1) / m) * (m - 1))

    which gives max_relative_positions - 1 the bucket 2 m - 1, and goes on beyond.

    The ceiling is taken in integers, by comparing powers, since a logarithm that comes out at 4.0000001 would
    move a distance to another bucket. For 256 buckets and 512, the published values, fp32 gives the same; for
    18 and 17 it does not, at the distance 12.
    """
    middle, end = num_buckets // 2, max_relative_positions - 1
    steps = middle - 1
    buckets = list(range(min(middle, max_distance) + 1))
    step = 0
    for distance in range(middle + 1, max_distance + 1):
        # step >= log(distance / middle) / log(end / middle) * steps, as powers: without fractions
        while end**step * middle**steps < distance**steps * middle**step:
            step += 1
        buckets.append(middle + step)
    return buckets


class Distances(NamedTuple):
    """What every layer needs to know of distances."""

    embeddings: Tensor
    """(1, R, D), floating point: the vectors of the distances."""
    by_query: Tensor
    """(T, T) int64, query by key: query * R + the row of their distance."""
    by_key: Tensor
    """(T, T) int64, query by key: key * R + the row of their distance."""


class DistanceEmbeddings(nn.Module):
    """The table of the distances' embeddings, and which row a query and a key take."""

    positions: Tensor
    rows: Tensor

    def __init__(self, config: DisentangledAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__()
        limit, farthest = sizes.max_tokens, config.farthest_distance(sizes.max_tokens)
        span = config.distance_buckets or farthest
        self.table = nn.Embedding(2 * span, sizes.hidden_size)
        nn.init.normal_(self.table.weight, std=EMBEDDING_STD)
        has_norm = config.distance_norm
        self.norm = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps) if has_norm else None
        # The devices are named so that the values exist even when the rest is built without storage.
        self.register_buffer("positions", torch.arange(limit, device="cpu"), persistent=False)
        distances = list(range(limit))
        if config.distance_buckets:
            distances = bucketed_distances(limit - 1, config.distance_buckets, farthest)
        # By query - key + M - 1: a list of 2M - 1 instead of a table of M x M.
        signed = torch.tensor([-distance for distance in distances[:0:-1]] + distances, device="cpu")
        self.register_buffer("rows", (signed + span).clamp(0, 2 * span - 1), persistent=False)
        self.num_rows, self.max_tokens = 2 * span, limit

    def forward(self, num_tokens: int) -> Distances:
        """Return what layers need for T = `num_tokens`."""
        embeddings = self.table.weight[None]  # (1, R, D)
        if self.norm is not None:
            embeddings = self.norm(embeddings)
        positions = self.positions[:num_tokens]
        query, key = positions[:, None], positions[None, :]
        rows = self.rows[query - key + (self.max_tokens - 1)]  # (T, T), query by key
        return Distances(embeddings, query * self.num_rows + rows, key * self.num_rows + rows)


class SharedDistances(nn.Module):
    """The mask and the distances of all layers of one configuration."""

    def __init__(self, config: DisentangledAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__()
        self.distances = DistanceEmbeddings(config, sizes)

    def forward(self, inputs: BatchInputs) -> tuple[AttentionMask, Distances]:
        """Return what `DisentangledSelfAttention` takes beside hidden states."""
        mask = prepare_mask(inputs.keep, inputs.keep.dtype)
        return mask, self.distances(inputs.attention_mask.shape[1])


class DisentangledSelfAttention(HeadProjections):
    """Multi-head self-attention with one or both terms of distances.

    The position vectors are projections of the distances' embeddings: by the projections of content
    (`share_att_key`), or by others, which are drawn alike.
    """

    def __init__(self, config: DisentangledAttentionConfig, sizes: EncoderSizes) -> None:
        terms, width = config.terms.split("|"), sizes.hidden_size
        scale = 1.0 / math.sqrt(width // config.num_heads * (1 + len(terms)))
        super().__init__(width, config.num_heads, config.dropout, scale=scale, key_bias=config.key_bias)
        self.has_c2p, self.has_p2c = "c2p" in terms, "p2c" in terms
        has_own = not config.share_att_key
        self.distance_key = nn.Linear(width, width, config.key_bias) if has_own and self.has_c2p else None
        self.distance_query = nn.Linear(width, width) if has_own and self.has_p2c else None
        self.distance_dropout = nn.Dropout(sizes.hidden_dropout)
        for projection in (self.distance_key, self.distance_query):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def forward(
        self, hidden_states: Tensor, keep_mask: Tensor | AttentionMask | None, distances: Distances
    ) -> tuple[Tensor, Outputs]:
        """Attend.

        Args:
            hidden_states: (B, T, D), floating point.
            keep_mask: as for `attention_weights`.
            distances: what `DistanceEmbeddings` returns for T.

        Returns:
            The context (B, T, D), and the weights (B, H, T, T) as they are before dropout.
        """
        query, key, value = self.project(hidden_states)  # (B, H, T, K) each
        query = query * self.scale
        scores = self._distance_scores(query, key, distances)  # (B, H, T, T)
        weights = attention_weights(query, key, keep_mask, 1.0, scores)
        return self.combine(weights, value), {ATTENTION_WEIGHTS: weights}

    def _distance_scores(self, query: Tensor, key: Tensor, distances: Distances) -> Tensor | None:
        """Return c2p + p2c, (B, H, T, T); `query` is scaled, `key` is not.

        Every token is multiplied with all R rows, and the T that it needs are looked up: T x R products
        instead of T x T x K, or of position vectors repeated for every pair.
        """
        embeddings = self.distance_dropout(distances.embeddings)
        scores = None
        if self.has_c2p:
            rows = self.split_heads(
                (self.distance_key or self.key)(embeddings), self.num_heads
            )  # (1, H, R, K)
            scores = _look_up(query @ rows.transpose(-2, -1), distances.by_query)
        if self.has_p2c:
            rows = self.split_heads((self.distance_query or self.query)(embeddings), self.num_heads)
            from_key = _look_up(key @ (rows * self.scale).transpose(-2, -1), distances.by_key)
            scores = from_key if scores is None else scores + from_key
        return scores


def _look_up(products: Tensor, index: Tensor) -> Tensor:
    """Return products.flatten(-2)[..., index]: (B, H, T, R) and (T, T) -> (B, H, T, T).

    One index for all texts and heads, where `torch.gather`, ONNX's GatherElements, would need one for each.
    """
    return products.flatten(-2)[:, :, index]
