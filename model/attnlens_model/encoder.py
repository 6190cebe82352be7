"""A post-LayerNorm transformer encoder of the BERT kind (Devlin et al. 2018).

It is the body only: no pooling, no task head, no tokenizer. Everything is written in the forms that survive
ONNX export unchanged in meaning on many runtimes; where a form matters, a comment says so.

Letters in shapes: B batch, T tokens, D width, H heads, L layers.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnlens_model.attention import AttentionMask, MultiHeadSelfAttention, causal_keep_mask, prepare_mask
from attnlens_model.config import EncoderConfig

# The standard deviation of fresh embeddings (Devlin et al. 2018, the published implementation).
_EMBEDDING_STD = 0.02


class EncoderOutput(NamedTuple):
    """What an encoder returns."""

    last_hidden_state: Tensor
    """(B, T, D), floating point."""
    attentions: tuple[Tensor, ...]
    """L tensors (B, H, T, T): every layer's weights after softmax. Empty when not asked for."""


def gelu(x: Tensor) -> Tensor:
    """Gaussian error linear unit, exact: x * Phi(x) (Hendrycks & Gimpel 2016)."""
    # Exactly this order: ONNX Runtime fuses it, and other orders crash or degrade other runtimes.
    return x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of `gelu` (Hendrycks & Gimpel 2016)."""
    return x * 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": torch.relu,
}


class Embeddings(nn.Module):
    """The sum of token, token type and position embeddings, then LayerNorm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type = (
            nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """Embed (B, T) ids -> (B, T, D). No `token_type_ids` means type 0 everywhere."""
        hidden_states: Tensor = self.token(input_ids)  # (B, T, D)
        if self.token_type is not None:
            hidden_states = hidden_states + (
                self.token_type.weight[0] if token_type_ids is None else self.token_type(token_type_ids)
            )
        # A slice of the table: positions are 0 .. T-1 whatever the padding, and no Range enters the graph.
        hidden_states = hidden_states + self.position.weight[: input_ids.shape[1]]
        embedded: Tensor = self.dropout(self.norm(hidden_states))
        return embedded


class FeedForward(nn.Module):
    """Two projections with an activation between, for each token alone (Vaswani et al. 2017, section 3.3)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = _ACTIVATIONS[config.activation]
        for projection in (self.up, self.down):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        output: Tensor = self.down(self.activation(self.up(hidden_states)))
        return output


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each followed by residual and LayerNorm (post-LN)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = MultiHeadSelfAttention(
            config.hidden_size, config.num_heads, config.attention_dropout
        )
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """(B, T, D) -> (B, T, D), and the attention weights (B, H, T, T)."""
        attended, weights = self.attention(hidden_states, mask)
        hidden_states = self.attention_norm(hidden_states + self.dropout(attended))
        hidden_states = self.output_norm(hidden_states + self.dropout(self.feed_forward(hidden_states)))
        return hidden_states, weights


class Encoder(nn.Module):
    """Embeddings and L layers.

    A new one has random weights from the global generator: embeddings N(0, 0.02), projections Xavier-uniform,
    zero biases. `new_encoder` makes one from a seed, `load_checkpoint` one with published weights.
    """

    positions: Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))
        for module in self.embeddings.children():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=_EMBEDDING_STD)
        if config.is_causal:
            # The device is named so that the values exist even when the rest is built without storage.
            positions = torch.arange(config.max_position_embeddings, device="cpu")
            self.register_buffer("positions", positions, persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        output_attentions: bool = False,
    ) -> EncoderOutput:
        """Encode a batch of token ids.

        Args:
            input_ids: (B, T) int64, each from 0 to `vocab_size - 1`.
            attention_mask: (B, T) int64, 1 for a token and 0 for padding, on any side.
            token_type_ids: (B, T) int64; None means 0 everywhere.
            output_attentions: whether to return every layer's weights.

        Returns:
            Hidden states (B, T, D) and L weights (B, H, T, T) in the dtype of the parameters. What stands at
            padded positions has no meaning.

        Raises:
            ValueError: wrong shapes, more tokens than `max_position_embeddings`, or token types for an
                encoder that has none. Not checked while exporting.
        """
        if not torch.compiler.is_exporting():
            self._check_inputs(input_ids, attention_mask, token_type_ids)
        hidden_states = self.embeddings(input_ids, token_type_ids)  # (B, T, D)
        mask = self._attention_mask(attention_mask, hidden_states.dtype)
        attentions: tuple[Tensor, ...] = ()
        for layer in self.layers:
            hidden_states, weights = layer(hidden_states, mask)
            if output_attentions:
                attentions += (weights,)
        return EncoderOutput(hidden_states, attentions)

    def _attention_mask(self, attention_mask: Tensor, dtype: torch.dtype) -> AttentionMask:
        keep = attention_mask.to(dtype)[:, None, None, :]  # (B, 1, 1, T)
        if self.config.is_causal:
            positions = self.positions[: attention_mask.shape[1]]
            keep = keep * causal_keep_mask(positions).to(dtype)  # (B, 1, T, T)
        return prepare_mask(keep, dtype)

    def _check_inputs(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None) -> None:
        if input_ids.ndim != 2:  # noqa: PLR2004 - (B, T)
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}: it must be (batch, tokens)")
        named = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        for name, tensor in named.items():
            if tensor is not None and tensor.shape != input_ids.shape:
                shapes = f"{tuple(tensor.shape)} but input_ids {tuple(input_ids.shape)}"
                raise ValueError(f"{name} has shape {shapes}: they must be equal")
        limit = self.config.max_position_embeddings
        if input_ids.shape[1] > limit:
            raise ValueError(
                f"{input_ids.shape[1]} tokens are more than max_position_embeddings={limit}: truncate"
            )
        if token_type_ids is not None and not self.config.type_vocab_size:
            raise ValueError("token_type_ids were given but type_vocab_size=0: leave them out")


def new_encoder(config: EncoderConfig, seed: int) -> Encoder:
    """Return a fresh encoder in eval mode, fp32; the same seed gives the same weights.

    The global random generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Encoder(config).eval()
