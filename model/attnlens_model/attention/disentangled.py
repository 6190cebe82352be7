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
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnlens_model.attention.masks import AttentionMask
from attnlens_model.attention.rotary import Rotation
from attnlens_model.attention.softmax import MultiHeadSelfAttention
from attnlens_model.attention.weights import attention_weights
from attnlens_model.config import EncoderConfig
from attnlens_model.embeddings import EMBEDDING_STD


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
        # step >= log(distance / middle) / log(end / middle) * steps, raised to what has no fractions
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

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        span = config.distance_buckets or config.farthest_distance
        self.table = nn.Embedding(2 * span, config.hidden_size)
        nn.init.normal_(self.table.weight, std=EMBEDDING_STD)
        has_norm = config.distance_norm
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if has_norm else None
        # The devices are named so that the values exist even when the rest is built without storage.
        limit = config.max_tokens
        self.register_buffer("positions", torch.arange(limit, device="cpu"), persistent=False)
        distances = list(range(limit))
        if config.distance_buckets:
            distances = bucketed_distances(limit - 1, config.distance_buckets, config.farthest_distance)
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


class DisentangledSelfAttention(MultiHeadSelfAttention):
    """Multi-head self-attention with one or both terms of distances.

    The position vectors are projections of the distances' embeddings: by the projections of content
    (`share_att_key`), or by others, which are drawn alike.
    """

    def __init__(self, config: EncoderConfig) -> None:
        terms = config.disentangled_attention.split("|")
        scale = 1.0 / math.sqrt(config.head_dim * (1 + len(terms)))
        super().__init__(config.hidden_size, config.num_heads, config.attention_dropout, scale=scale)
        self.has_c2p, self.has_p2c = "c2p" in terms, "p2c" in terms
        width, has_own = config.hidden_size, not config.share_att_key
        self.distance_key = nn.Linear(width, width) if has_own and self.has_c2p else None
        self.distance_query = nn.Linear(width, width) if has_own and self.has_p2c else None
        self.distance_dropout = nn.Dropout(config.hidden_dropout)
        for projection in (self.distance_key, self.distance_query):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        hidden_states: Tensor,
        keep_mask: Tensor | AttentionMask | None = None,
        position_bias: Tensor | Distances | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            hidden_states: (B, T, D), floating point.
            keep_mask: as for `attention_weights`.
            position_bias: what `DistanceEmbeddings` returns for T.
            rotation: None.

        Returns:
            The output (B, T, D), and the weights (B, H, T, T) as they are before dropout.

        Raises:
            TypeError: another kind of position than distances.
        """
        if not isinstance(position_bias, Distances) or rotation is not None:
            raise TypeError("disentangled attention takes Distances and no rotation: see DistanceEmbeddings")
        query, key, value = self.project(hidden_states)  # (B, H, T, K) each
        query = query * self.scale
        scores = self._distance_scores(query, key, position_bias)  # (B, H, T, T)
        weights = attention_weights(query, key, keep_mask, 1.0, scores)
        return self.combine(weights, value), weights

    def _distance_scores(self, query: Tensor, key: Tensor, distances: Distances) -> Tensor | None:
        """Return c2p + p2c, (B, H, T, T); `query` is scaled, `key` is not.

        Every token is multiplied with all R rows, and the T that it needs are looked up: T x R products
        instead of T x T x K, or of position vectors repeated for every pair.
        """
        embeddings = self.distance_dropout(distances.embeddings)
        scores = None
        if self.has_c2p:
            rows = self._split_heads(
                (self.distance_key or self.key)(embeddings), self.num_heads
            )  # (1, H, R, K)
            scores = _look_up(query @ rows.transpose(-2, -1), distances.by_query)
        if self.has_p2c:
            rows = self._split_heads((self.distance_query or self.query)(embeddings), self.num_heads)
            from_key = _look_up(key @ (rows * self.scale).transpose(-2, -1), distances.by_key)
            scores = from_key if scores is None else scores + from_key
        return scores


def _look_up(products: Tensor, index: Tensor) -> Tensor:
    """Return products.flatten(-2)[..., index]: (B, H, T, R) and (T, T) -> (B, H, T, T).

    One index for all texts and heads, where `torch.gather`, ONNX's GatherElements, would need one for each.
    """
    return products.flatten(-2)[:, :, index]
