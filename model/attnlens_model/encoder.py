"""A transformer encoder of the BERT kind (Devlin et al. 2018) and its successors, composed of parts.

`EncoderConfig` chooses among the parts: which position embedding a token gets and whether embeddings are
projected (embeddings.py), the mechanism of attention, one for all layers or a pattern (attention/), the norm
(norm.py) and its place (layer.py), the feed-forward part (feed_forward.py), a convolution beside the first
layer (convolution.py), an input for each layer (per_layer_input.py), whether layers share their weights and
whether hidden states are projected at the end (here). A family of published checkpoints is such a choice, not
a class.

It is the body only: no pooling, no task head, no tokenizer. Everything is written in the forms that survive
ONNX export unchanged in meaning on many runtimes; where a form matters, a comment says so.

Letters in shapes: B batch, T tokens, D width, V width of token vectors (V = D unless they are projected),
H heads, L layers.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnlens_model.attention.mechanism import ATTENTION_WEIGHTS, BatchInputs, Outputs
from attnlens_model.attention.parts.masks import causal_keep_mask
from attnlens_model.config import EncoderConfig
from attnlens_model.convolution import NeighbourConvolution
from attnlens_model.embeddings import Embeddings
from attnlens_model.layer import EncoderLayer
from attnlens_model.norm import make_norm
from attnlens_model.per_layer_input import PerLayerInputs


class EncoderOutput(NamedTuple):
    """What an encoder returns."""

    last_hidden_state: Tensor
    """(B, T, V), floating point."""
    layers: tuple[Outputs, ...]
    """Of each layer, the outputs of its attention by role. Empty when not asked for."""
    embedded: Tensor
    """(B, T, D): the embeddings of the tokens, as the first layer reads them."""

    @property
    def attentions(self) -> tuple[Tensor, ...]:
        """L tensors (B, H, T, T): every layer's weights after softmax."""
        return tuple(layer[ATTENTION_WEIGHTS] for layer in self.layers)


class Encoder(nn.Module):
    """Embeddings, then L layers, or fewer of which each is applied several times in a row.

    A new one has random weights from the global generator: embeddings N(0, 0.02), projections Xavier-uniform,
    zero biases. `new_encoder` makes one from a seed, `load_checkpoint` one with published weights.
    """

    positions: Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        norm, width, dropout = config.norm, config.hidden_size, config.hidden_dropout
        self.embeddings = Embeddings(config.embeddings, config.positions, norm, width, dropout)
        attentions = list(dict.fromkeys(config.layer_attentions))
        self.shared = nn.ModuleList(attention.make_shared(config.sizes) for attention in attentions)
        self.shared_of_layer = [attentions.index(attention) for attention in config.layer_attentions]
        self.layers = nn.ModuleList(
            EncoderLayer(config, index) for index in range(config.num_distinct_layers)
        )
        beside = config.convolution
        self.convolution = None if beside is None else NeighbourConvolution(beside, width, norm.eps, dropout)
        inputs, num_layers = config.per_layer_input, config.num_layers
        self.per_layer_input = None if inputs is None else PerLayerInputs(inputs, norm, width, num_layers)
        self.final_norm = make_norm(norm, width) if norm.placement in ("pre", "both") else None
        size = config.output_size
        self.output_projection = None if size is None else nn.Linear(width, size, bias=False)
        if self.output_projection is not None:
            nn.init.xavier_uniform_(self.output_projection.weight)
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
            output_attentions: whether to return every layer's outputs of attention.

        Returns:
            Hidden states (B, T, V) and the outputs of L layers in the dtype of the parameters. What stands at
            padded positions has no meaning.

        Raises:
            ValueError: wrong shapes, more tokens than the configuration's `max_tokens`, or token types for an
                encoder that has none. Not checked while exporting.
        """
        if not torch.compiler.is_exporting():
            self._check_inputs(input_ids, attention_mask, token_type_ids)
        hidden_states = embedded = self.embeddings(input_ids, attention_mask, token_type_ids)  # (B, T, D)
        inputs = BatchInputs(attention_mask, self._keep(attention_mask, hidden_states.dtype))
        shared = [part(inputs) for part in self.shared]
        layers: tuple[Outputs, ...] = ()
        for index, number in enumerate(self.shared_of_layer):
            layer = self.layers[index // self.config.times_in_a_row]
            hidden_states, outputs = layer(hidden_states, *shared[number])
            if index == 0 and self.convolution is not None:
                hidden_states = self.convolution(embedded, hidden_states, attention_mask)
            if self.per_layer_input is not None:
                hidden_states = self.per_layer_input(index, embedded, hidden_states)
            if output_attentions:
                layers += (outputs,)
        if self.final_norm is not None:
            hidden_states = self.final_norm(hidden_states)
        if self.output_projection is not None:
            hidden_states = self.output_projection(hidden_states)  # (B, T, V)
        return EncoderOutput(hidden_states, layers, embedded)

    def _keep(self, attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the keep-mask (B, 1, 1, T), or (B, 1, T, T) in a causal encoder."""
        keep = attention_mask.to(dtype)[:, None, None, :]
        if self.config.is_causal:
            keep = keep * causal_keep_mask(self.positions[: attention_mask.shape[1]]).to(dtype)
        return keep

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
        if token_type_ids is not None and not self.config.embeddings.type_vocab_size:
            raise ValueError("token_type_ids were given but type_vocab_size=0: leave them out")


def new_encoder(config: EncoderConfig, seed: int) -> Encoder:
    """Return a fresh encoder in eval mode, fp32; the same seed gives the same weights.

    The global random generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Encoder(config).eval()
