"""From token ids to the vectors that the first layer reads.

Letters in shapes: B batch, T tokens, E embedding width, D encoder width (E = D where nothing is projected).
"""

from torch import Tensor, nn

from attnlens_model.config import EncoderConfig
from attnlens_model.norm import make_norm

# The standard deviation of fresh embeddings (Devlin et al. 2018, the published implementation).
EMBEDDING_STD = 0.02


def padding_offset_positions(attention_mask: Tensor, pad_token_id: int) -> Tensor:
    """Return which position embedding each token gets when positions are counted over tokens alone.

    The n-th token that is no padding gets `pad_token_id` + n, n from 1, whatever stands around it; padding
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
    """The sum of token, token type and position embeddings, then a norm, then a projection if E is not D.

    Only the token embeddings are in every family.

    The projection is ELECTRA's (Clark et al. 2020, section 3.3) and ALBERT's (Lan et al. 2019, section 3.1).
    DeBERTa's implementation projects before the norm, and without a bias.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_size or config.hidden_size
        self.token = nn.Embedding(config.vocab_size, width)
        has_positions = config.position_scheme != "none"
        self.position = nn.Embedding(config.max_position_embeddings, width) if has_positions else None
        self.token_type = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.is_projected_first = config.embedding_projection == "before_norm"
        norm_width = config.hidden_size if self.is_projected_first else width
        self.norm = make_norm(config, norm_width) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.hidden_dropout)
        has_bias = not self.is_projected_first
        self.projection = nn.Linear(width, config.hidden_size, has_bias) if config.embedding_size else None
        self.position_scheme = config.position_scheme
        self.pad_token_id = config.pad_token_id
        for table in (self.token, self.position, self.token_type):
            if table is not None:
                nn.init.normal_(table.weight, std=EMBEDDING_STD)
        if self.projection is not None:
            nn.init.xavier_uniform_(self.projection.weight)
            if has_bias:
                nn.init.zeros_(self.projection.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """Embed (B, T) ids -> (B, T, D). No `token_type_ids` means type 0 everywhere."""
        embedded: Tensor = self.token(input_ids)  # (B, T, E)
        if self.token_type is not None:
            embedded = embedded + self._type_embeddings(self.token_type, token_type_ids)
        if self.position is not None:
            embedded = embedded + self._position_embeddings(self.position, attention_mask)
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
