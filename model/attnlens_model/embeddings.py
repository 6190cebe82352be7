"""Embeddings: converts token ids to the input of the first layer.

Shape legend: B batch, T tokens, E embedding size, D hidden size (E = D without a projection).
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from attnlens_model.config_part import ConfigPart, is_positive
from attnlens_model.norm import NormConfig, make_norm

# Standard deviation of newly initialized embeddings (Devlin et al. 2018, published implementation).
EMBEDDING_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class EmbeddingsConfig(ConfigPart, path="embeddings"):
    """Token, token type and task embeddings, and the norm and projection of their sum.

    Attributes:
        vocab_size: Number of token ids.
        pad_token_id: Id of the padding token. The encoder only uses it to offset positions; padding is
            determined by the attention mask.
        type_vocab_size: Number of token types. If 0, the encoder does not accept `token_type_ids`. If 1, all
            tokens have the same type and `token_type_ids` may be omitted.
        task_vocab_size: Number of task embeddings. The first one is added to every token. If 0, there are
            none.
        size: Embedding size E, which a projection maps to `hidden_size`. If None, embeddings have size
            `hidden_size` and are not projected.
        projection: "after_norm" (with a bias) or "before_norm" (without a bias).
        norm: Whether the embeddings are normalized.
        scale: Factor of the token embeddings, applied before the other embeddings are added.
    """

    vocab_size: int
    pad_token_id: int = 0
    type_vocab_size: int = 2
    task_vocab_size: int = 0
    size: int | None = None
    projection: Literal["after_norm", "before_norm"] = "after_norm"
    norm: bool = True
    scale: float = 1.0

    def _check(self) -> None:
        self.require("vocab_size", self.vocab_size >= 1, "must be at least 1")
        limit, last = "must be from 0 to vocab_size - 1", self.vocab_size - 1
        self.require("pad_token_id", 0 <= self.pad_token_id <= last, f"{limit} = {last}")
        limit = "must be at least 0 (0 disables token types)"
        self.require("type_vocab_size", self.type_vocab_size >= 0, limit)
        limit = "must be at least 0 (0 disables tasks)"
        self.require("task_vocab_size", self.task_vocab_size >= 0, limit)
        self.require("size", self.size is None or self.size >= 1, "must be at least 1, or null")
        self.require("scale", is_positive(self.scale), "must be greater than 0")


@dataclass(frozen=True, kw_only=True)
class PositionsConfig(ConfigPart, path="positions"):
    """Position embeddings.

    Attributes:
        max_position_embeddings: Number of positions. See `EncoderConfig.max_tokens` for the usable number.
        scheme: How positions are assigned. "absolute": the index in the row, including padding.
            "padding_offset": row pad_token_id + n for the n-th non-padding token. "none": no position
            embedding is added; only attention may use positions.
    """

    max_position_embeddings: int
    scheme: Literal["absolute", "padding_offset", "none"] = "absolute"

    def _check(self) -> None:
        self.require("max_position_embeddings", self.max_position_embeddings >= 1, "must be at least 1")


def padding_offset_positions(attention_mask: Tensor, pad_token_id: int) -> Tensor:
    """Return position ids that count non-padding tokens only.

    The n-th non-padding token (n from 1) has position `pad_token_id` + n, and padding has `pad_token_id` (Liu
    et al. 2019, fairseq implementation). Padding is determined by the attention mask, whereas the published
    implementations compare ids with the padding id. The two differ only for texts that contain the padding
    token.

    Args:
        attention_mask: (B, T) int64, 1 or 0.
        pad_token_id: Row before the first row in use.

    Returns:
        (B, T) int64.
    """
    return attention_mask.cumsum(dim=1) * attention_mask + pad_token_id


class Embeddings(nn.Module):
    """Sum of token, type, position and task embeddings, followed by a norm and an optional projection.

    Token embeddings may be scaled by sqrt(D) (Vaswani et al. 2017, section 3.4).

    The projection follows ELECTRA (Clark et al. 2020, section 3.3) and ALBERT (Lan et al. 2019, section 3.1).
    DeBERTa's implementation projects before the norm and without a bias.
    """

    def __init__(
        self,
        config: EmbeddingsConfig,
        positions: PositionsConfig,
        norm: NormConfig,
        hidden_size: int,
        dropout: float,
    ) -> None:
        super().__init__()
        size = config.size or hidden_size
        self.token = nn.Embedding(config.vocab_size, size)
        has_positions = positions.scheme != "none"
        self.position = nn.Embedding(positions.max_position_embeddings, size) if has_positions else None
        self.token_type = nn.Embedding(config.type_vocab_size, size) if config.type_vocab_size else None
        self.task = nn.Embedding(config.task_vocab_size, size) if config.task_vocab_size else None
        self.is_projected_first = config.projection == "before_norm"
        norm_size = hidden_size if self.is_projected_first else size
        self.norm = make_norm(norm, norm_size) if config.norm else None
        self.dropout = nn.Dropout(dropout)
        has_bias = not self.is_projected_first
        self.projection = nn.Linear(size, hidden_size, has_bias) if config.size else None
        self.scale = config.scale
        self.position_scheme = positions.scheme
        self.pad_token_id = config.pad_token_id
        for table in (self.token, self.position, self.token_type, self.task):
            if table is not None:
                nn.init.normal_(table.weight, std=EMBEDDING_STD)
        if self.projection is not None:
            nn.init.xavier_uniform_(self.projection.weight)
            if has_bias:
                nn.init.zeros_(self.projection.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """Embed token ids (B, T) as (B, T, D). `token_type_ids` default to 0."""
        embedded: Tensor = self.token(input_ids)  # (B, T, E)
        if self.scale != 1.0:
            embedded = embedded * self.scale
        if self.token_type is not None:
            embedded = embedded + self._type_embeddings(self.token_type, token_type_ids)
        if self.position is not None:
            embedded = embedded + self._position_embeddings(self.position, attention_mask)
        if self.task is not None:
            # A lookup, because constant folding of a slice would lose the parameter name.
            embedded = embedded + self.task(input_ids[:1, :1] * 0)  # (1, 1, E)
        if self.is_projected_first:
            embedded = self._projected(embedded)  # (B, T, D)
        embedded = self.dropout(embedded if self.norm is None else self.norm(embedded))
        return embedded if self.is_projected_first else self._projected(embedded)  # (B, T, D)

    def _projected(self, embedded: Tensor) -> Tensor:
        projected: Tensor = embedded if self.projection is None else self.projection(embedded)
        return projected

    def _type_embeddings(self, table: nn.Embedding, token_type_ids: Tensor | None) -> Tensor:
        if table.num_embeddings == 1:
            # A lookup could only return the single row, (1, E).
            return table.weight
        if token_type_ids is None:
            return table.weight[0]  # (E,)
        types: Tensor = table(token_type_ids)  # (B, T, E)
        return types

    def _position_embeddings(self, table: nn.Embedding, attention_mask: Tensor) -> Tensor:
        if self.position_scheme == "padding_offset":
            rows = padding_offset_positions(attention_mask, self.pad_token_id)
            looked_up: Tensor = table(rows)  # (B, T, E)
            return looked_up
        # A slice, since positions are always 0 .. T-1. This avoids a Range operator in the graph.
        return table.weight[: attention_mask.shape[1]]  # (T, E)
