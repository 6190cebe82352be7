"""From token ids to the vectors that the first layer reads.

Letters in shapes: B batch, T tokens, E embedding width, D encoder width (E = D where nothing is projected).
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from attnlens_model.config_part import ConfigPart, is_positive
from attnlens_model.norm import NormConfig, make_norm

# The standard deviation of fresh embeddings (Devlin et al. 2018, the published implementation).
EMBEDDING_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class EmbeddingsConfig(ConfigPart, path="embeddings"):
    """The tables of tokens and of token types, and what is done with their sum.

    Attributes:
        vocab_size: number of token ids.
        pad_token_id: the id that fills a batch up. The encoder itself goes by the attention mask alone.
        type_vocab_size: number of token types; 0 means that there are none and that the encoder takes no
            `token_type_ids`, 1 that every token has the same and that none need to be given.
        task_vocab_size: number of tasks, of which every token gets the embedding of the first; 0 means none.
        size: E, the width of the embeddings, which a projection brings to `hidden_size`; None means that they
            are `hidden_size` wide and are not projected.
        projection: "after_norm", with a bias, or "before_norm", without.
        norm: whether the embeddings are normalised.
        scale: what the token's embedding is multiplied by, before anything is added.
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
        limit = "must be at least 0 (0: no token types)"
        self.require("type_vocab_size", self.type_vocab_size >= 0, limit)
        limit = "must be at least 0 (0: no tasks)"
        self.require("task_vocab_size", self.task_vocab_size >= 0, limit)
        self.require("size", self.size is None or self.size >= 1, "must be at least 1, or null")
        self.require("scale", is_positive(self.scale), "must be greater than 0")


@dataclass(frozen=True, kw_only=True)
class PositionsConfig(ConfigPart, path="positions"):
    """The positions, learned or computed.

    Attributes:
        max_position_embeddings: their number; `EncoderConfig.max_tokens` says how many are usable.
        scheme: which position embedding a token gets. "absolute": that of its place in the row, padding
            included. "padding_offset": of the n-th token that is not padding, row pad_token_id + n. "none":
            none is added; positions reach the encoder through its attention, if at all.
    """

    max_position_embeddings: int
    scheme: Literal["absolute", "padding_offset", "none"] = "absolute"

    def _check(self) -> None:
        self.require("max_position_embeddings", self.max_position_embeddings >= 1, "must be at least 1")


def padding_offset_positions(attention_mask: Tensor, pad_token_id: int) -> Tensor:
    """Return which position embedding each token gets when positions are counted over tokens alone.

    The n-th token that is not padding gets `pad_token_id` + n, n from 1, whatever stands around it; padding
    gets `pad_token_id` (Liu et al. 2019, in fairseq's implementation). The publishers take for padding what
    has the padding id; here it is what the attention mask leaves out. The two differ only for a text that
    itself contains the padding token.

    Args:
        attention_mask: (B, T) int64, 1 or 0.
        pad_token_id: the row before the first one in use.

    Returns:
        (B, T) int64.
    """
    return attention_mask.cumsum(dim=1) * attention_mask + pad_token_id


class Embeddings(nn.Module):
    """The sum of token, type, position and task embeddings, then a norm, then a projection if E is not D.

    Only the token embeddings are in every family. Multiplying them by sqrt(D) is Vaswani et al. 2017, section
    3.4.

    The projection is ELECTRA's (Clark et al. 2020, section 3.3) and ALBERT's (Lan et al. 2019, section 3.1).
    DeBERTa's implementation projects before the norm, and without a bias.
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
        width = config.size or hidden_size
        self.token = nn.Embedding(config.vocab_size, width)
        has_positions = positions.scheme != "none"
        self.position = nn.Embedding(positions.max_position_embeddings, width) if has_positions else None
        self.token_type = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.task = nn.Embedding(config.task_vocab_size, width) if config.task_vocab_size else None
        self.is_projected_first = config.projection == "before_norm"
        norm_width = hidden_size if self.is_projected_first else width
        self.norm = make_norm(norm, norm_width) if config.norm else None
        self.dropout = nn.Dropout(dropout)
        has_bias = not self.is_projected_first
        self.projection = nn.Linear(width, hidden_size, has_bias) if config.size else None
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
        """Embed (B, T) ids -> (B, T, D). No `token_type_ids` means type 0 everywhere."""
        embedded: Tensor = self.token(input_ids)  # (B, T, E)
        if self.scale != 1.0:
            embedded = embedded * self.scale
        if self.token_type is not None:
            embedded = embedded + self._type_embeddings(self.token_type, token_type_ids)
        if self.position is not None:
            embedded = embedded + self._position_embeddings(self.position, attention_mask)
        if self.task is not None:
            # Looked up: a row of a constant would be folded into another constant, and its name lost.
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
            # The whole table, (1, E): whatever the input, a lookup could only give its one row.
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
        # A slice of the table: positions are 0 .. T-1 whatever the padding, and no Range enters the graph.
        return table.weight[: attention_mask.shape[1]]  # (T, E)
