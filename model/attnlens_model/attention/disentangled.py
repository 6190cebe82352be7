"""Disentangled attention of DeBERTa: content and relative position have separate vectors.

He et al. 2020, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", section 3.1
(https://arxiv.org/abs/2006.03654). With content vectors Q and K per token, position vectors Qr and Kr per row
of a table of relative positions, and row(i - j) the table row for query i and key j:

    score[i, j] = (Q[i] . K[j]  +  Q[i] . Kr[row(i - j)]  +  K[j] . Qr[row(i - j)]) / sqrt(d * (1 + n))

The second term is called content-to-position (c2p) and the third position-to-content (p2c); n is the number
of these terms in use, d the head size. The paper has row(j - i) in the third term. This module follows the
published implementation, which uses the same row in both. One table is shared by all layers. DeBERTa versions
2 and 3 (He et al. 2021, https://arxiv.org/abs/2111.09543) group large distances in buckets.

Shape legend: B batch, T tokens, D hidden size, H heads, K head size, R table rows, M maximum input length.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnlens_model.attention.heads import HeadProjections
from attnlens_model.attention.mechanism import (
    ATTENTION_WEIGHTS,
    AttentionConfig,
    BatchInputs,
    EncoderSizes,
    Outputs,
)
from attnlens_model.attention.parts.masks import AttentionMask, prepare_mask
from attnlens_model.attention.parts.weights import attention_weights
from attnlens_model.embeddings import EMBEDDING_STD


@dataclass(frozen=True, kw_only=True)
class DisentangledAttentionConfig(AttentionConfig):
    """Configuration of disentangled attention.

    Attributes:
        terms: Position terms added to scores: "c2p", "p2c" or "c2p|p2c".
        distance_buckets: Number of buckets per direction. The first half hold one distance each, the others
            grow geometrically. If 0, each distance up to `max_relative_positions` has its own row.
        max_relative_positions: Distance at and beyond which all tokens share one row. Defaults to the maximum
            input length.
        share_att_key: Whether position vectors use the content projections. If False, they have their own.
        distance_norm: Whether to apply a LayerNorm to the table of relative positions.
        key_bias: Whether the key projections, of content and positions, have biases.
    """

    kind: Literal["disentangled"] = "disentangled"
    terms: Literal["c2p", "p2c", "c2p|p2c"]
    distance_buckets: int = 0
    max_relative_positions: int | None = None
    share_att_key: bool = False
    distance_norm: bool = False
    key_bias: bool = True

    def check_sizes(self, sizes: EncoderSizes) -> None:
        """Validate the number of heads, the maximum distance and the number of buckets."""
        super().check_sizes(sizes)
        farthest, num_exact = self.farthest_distance(sizes.max_tokens), self.distance_buckets // 2
        self.require("max_relative_positions", farthest >= 1, "must be at least 1, or null")
        is_valid = self.distance_buckets == 0 or 1 <= num_exact < farthest - 1
        limit = (
            f"must be 0 (no buckets), or at least 2 and less than 2 * (max_relative_positions={farthest} - 1)"
        )
        self.require("distance_buckets", is_valid, limit)

    def farthest_distance(self, max_tokens: int) -> int:
        """Return the distance at and beyond which all tokens share one row."""
        return max_tokens if self.max_relative_positions is None else self.max_relative_positions

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a randomly initialized layer module."""
        return DisentangledSelfAttention(self, sizes)

    def make_shared(self, sizes: EncoderSizes) -> nn.Module:
        """Return the module that computes the mask and the relative positions."""
        return SharedDistances(self, sizes)


def bucketed_distances(max_distance: int, num_buckets: int, max_relative_positions: int) -> list[int]:
    """Return the bucket of each distance from 0 to `max_distance`.

    With m = num_buckets // 2, each distance up to m is its own bucket. Larger distances have geometrically
    growing buckets:

        m + ceil(log(distance / m) / log((max_relative_positions - 1) / m) * (m - 1))

    Distance max_relative_positions - 1 has bucket 2 m - 1; the formula also applies to larger distances.
    The bucket of a negative distance is the negated bucket of its absolute value.

    The ceiling is computed by comparing integer powers, because a rounding error of the logarithm could move
    a distance to another bucket. For the published 256 buckets and maximum distance 512, fp32 gives the same
    result; for 18 buckets and maximum distance 17 it does not (at distance 12).
    """
    num_exact, end = num_buckets // 2, max_relative_positions - 1
    num_steps = num_exact - 1
    buckets = list(range(min(num_exact, max_distance) + 1))
    step = 0
    for distance in range(num_exact + 1, max_distance + 1):
        # Equivalent to step < log(distance / num_exact) / log(end / num_exact) * num_steps.
        while end**step * num_exact**num_steps < distance**num_steps * num_exact**step:
            step += 1
        buckets.append(num_exact + step)
    return buckets


class Distances(NamedTuple):
    """Relative positions of a batch, shared by all layers."""

    embeddings: Tensor
    """(1, R, D), floating point: the table of relative positions."""
    by_query: Tensor
    """(T, T) int64, query by key: query * R + table row."""
    by_key: Tensor
    """(T, T) int64, query by key: key * R + table row."""


class DistanceEmbeddings(nn.Module):
    """Table of relative positions, and the row for each query-key pair."""

    positions: Tensor
    rows: Tensor

    def __init__(self, config: DisentangledAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__()
        max_tokens, farthest = sizes.max_tokens, config.farthest_distance(sizes.max_tokens)
        span = config.distance_buckets or farthest
        self.table = nn.Embedding(2 * span, sizes.hidden_size)
        nn.init.normal_(self.table.weight, std=EMBEDDING_STD)
        has_norm = config.distance_norm
        self.norm = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps) if has_norm else None
        # Allocate on CPU explicitly so the buffers have values when the model is built on the meta device.
        self.register_buffer("positions", torch.arange(max_tokens, device="cpu"), persistent=False)
        distances = list(range(max_tokens))
        if config.distance_buckets:
            distances = bucketed_distances(max_tokens - 1, config.distance_buckets, farthest)
        # Indexed by query - key + M - 1, which takes 2M - 1 elements instead of M x M.
        signed = torch.tensor([-distance for distance in distances[:0:-1]] + distances, device="cpu")
        self.register_buffer("rows", (signed + span).clamp(0, 2 * span - 1), persistent=False)
        self.num_rows, self.max_tokens = 2 * span, max_tokens

    def forward(self, num_tokens: int) -> Distances:
        """Return the relative positions for T = `num_tokens`."""
        embeddings = self.table.weight[None]  # (1, R, D)
        if self.norm is not None:
            embeddings = self.norm(embeddings)
        positions = self.positions[:num_tokens]
        query, key = positions[:, None], positions[None, :]
        rows = self.rows[query - key + (self.max_tokens - 1)]  # (T, T), query by key
        return Distances(embeddings, query * self.num_rows + rows, key * self.num_rows + rows)


class SharedDistances(nn.Module):
    """Computes the mask and the relative positions for all layers with the same configuration."""

    def __init__(self, config: DisentangledAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__()
        self.distances = DistanceEmbeddings(config, sizes)

    def forward(self, inputs: BatchInputs) -> tuple[AttentionMask, Distances]:
        """Return the inputs of `DisentangledSelfAttention` in addition to hidden states."""
        mask = prepare_mask(inputs.keep, inputs.keep.dtype)
        return mask, self.distances(inputs.attention_mask.shape[1])


class DisentangledSelfAttention(HeadProjections):
    """Multi-head self-attention with the terms c2p, p2c or both.

    Position vectors are projections of the shared table. They use the content projections if `share_att_key`
    is True, otherwise separate projections with the same initialization.
    """

    def __init__(self, config: DisentangledAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__(config, sizes, key_bias=config.key_bias)
        terms, width = config.terms.split("|"), sizes.hidden_size
        self.scale = 1.0 / math.sqrt(self.head_dim * (1 + len(terms)))
        self.has_c2p, self.has_p2c = "c2p" in terms, "p2c" in terms
        is_separate = not config.share_att_key
        self.distance_key = nn.Linear(width, width, config.key_bias) if is_separate and self.has_c2p else None
        self.distance_query = nn.Linear(width, width) if is_separate and self.has_p2c else None
        self.distance_dropout = nn.Dropout(sizes.hidden_dropout)
        for projection in (self.distance_key, self.distance_query):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def forward(
        self, hidden_states: Tensor, keep_mask: Tensor | AttentionMask | None, distances: Distances
    ) -> tuple[Tensor, Outputs]:
        """Compute the attention of one layer.

        Args:
            hidden_states: (B, T, D), floating point.
            keep_mask: See `attention_weights`.
            distances: Result of `DistanceEmbeddings` for T tokens.

        Returns:
            The context (B, T, D), and the weights (B, H, T, T) before dropout.
        """
        query, key, value = self.project(hidden_states)  # (B, H, T, K) each
        query = query * self.scale
        scores = self._distance_scores(query, key, distances)  # (B, H, T, T)
        weights = attention_weights(query, key, keep_mask, 1.0, scores)
        return self.combine(weights, value), {ATTENTION_WEIGHTS: weights}

    def _distance_scores(self, query: Tensor, key: Tensor, distances: Distances) -> Tensor | None:
        """Return c2p + p2c (B, H, T, T) for a scaled query and an unscaled key.

        Each token is multiplied with all R rows, and the result is gathered by pair. This takes T x R dot
        products and avoids position vectors per pair of tokens, (T, T, K).
        """
        embeddings = self.distance_dropout(distances.embeddings)
        scores = None
        if self.has_c2p:
            projection = self.distance_key or self.key
            rows = self.split_heads(projection(embeddings), self.num_heads)  # (1, H, R, K)
            scores = _gather(query @ rows.transpose(-2, -1), distances.by_query)
        if self.has_p2c:
            projection = self.distance_query or self.query
            rows = self.split_heads(projection(embeddings), self.num_heads)
            from_key = _gather(key @ (rows * self.scale).transpose(-2, -1), distances.by_key)
            scores = from_key if scores is None else scores + from_key
        return scores


def _gather(products: Tensor, index: Tensor) -> Tensor:
    """Return products.flatten(-2)[..., index]: (B, H, T, R) and (T, T) -> (B, H, T, T).

    All texts and heads share one index, whereas `torch.gather` (ONNX GatherElements) would need one for each.
    """
    return products.flatten(-2)[:, :, index]
