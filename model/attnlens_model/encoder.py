"""A post-LayerNorm transformer encoder of the BERT kind (Devlin et al. 2018), composed of parts.

`EncoderConfig` chooses among the parts: which position embedding a token gets and whether embeddings are
projected (embeddings.py), a bias on scores by distance (relative_bias.py), layers that share their weights
(here), the activation (layer.py). A family of published checkpoints is such a choice, not a class.

It is the body only: no pooling, no task head, no tokenizer. Everything is written in the forms that survive
ONNX export unchanged in meaning on many runtimes; where a form matters, a comment says so.

Letters in shapes: B batch, T tokens, D width, H heads, L layers.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnlens_model.attention import AttentionMask, causal_keep_mask, prepare_mask
from attnlens_model.config import EncoderConfig
from attnlens_model.embeddings import Embeddings
from attnlens_model.layer import EncoderLayer
from attnlens_model.relative_bias import RelativePositionBias


class EncoderOutput(NamedTuple):
    """What an encoder returns."""

    last_hidden_state: Tensor
    """(B, T, D), floating point."""
    attentions: tuple[Tensor, ...]
    """L tensors (B, H, T, T): every layer's weights after softmax. Empty when not asked for."""


class Encoder(nn.Module):
    """Embeddings, then L layers, or fewer of which each is applied several times in a row.

    A new one has random weights from the global generator: embeddings N(0, 0.02), projections Xavier-uniform,
    zero biases. `new_encoder` makes one from a seed, `load_checkpoint` one with published weights.
    """

    positions: Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.relative_bias = RelativePositionBias(config) if config.relative_attention_num_buckets else None
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_distinct_layers))
        if config.is_causal:
            # The device is named so that the values exist even when the rest is built without storage.
            positions = torch.arange(config.max_tokens, device="cpu")
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
            token_type_ids: (B, T) int64; None means 0 everywhere. Of no effect where there is one type only.
            output_attentions: whether to return every layer's weights.

        Returns:
            Hidden states (B, T, D) and L weights (B, H, T, T) in the dtype of the parameters. What stands at
            padded positions has no meaning.

        Raises:
            ValueError: wrong shapes, more tokens than the configuration's `max_tokens`, or token types for an
                encoder that has none. Not checked while exporting.
        """
        if not torch.compiler.is_exporting():
            self._check_inputs(input_ids, attention_mask, token_type_ids)
        hidden_states = self.embeddings(input_ids, attention_mask, token_type_ids)  # (B, T, D)
        mask = self._attention_mask(attention_mask, hidden_states.dtype)
        bias = None if self.relative_bias is None else self.relative_bias(input_ids.shape[1])
        attentions: tuple[Tensor, ...] = ()
        times_in_a_row = self.config.num_layers // len(self.layers)
        for index in range(self.config.num_layers):
            hidden_states, weights = self.layers[index // times_in_a_row](hidden_states, mask, bias)
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
        limit = self.config.max_tokens
        if input_ids.shape[1] > limit:
            raise ValueError(f"{input_ids.shape[1]} tokens are more than max_tokens={limit}: truncate")
        if token_type_ids is not None and not self.config.type_vocab_size:
            raise ValueError("token_type_ids were given but type_vocab_size=0: leave them out")


def new_encoder(config: EncoderConfig, seed: int) -> Encoder:
    """Return a fresh encoder in eval mode, fp32; the same seed gives the same weights.

    The global random generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Encoder(config).eval()
