"""`Encoder`: a transformer encoder such as BERT (Devlin et al. 2018), composed of configurable parts.

`EncoderConfig` selects position embeddings and the embedding projection (embeddings.py), one attention
mechanism or a pattern of mechanisms (attention/), the norm (norm.py) and its placement (layer.py), the
feed-forward network (feed_forward.py), a convolution in parallel to the first layer (convolution.py), weight
sharing and the output projection (this module). A family of published checkpoints is a configuration, not a
class.

The encoder has no pooling, task head or tokenizer. All operations are written so that the exported ONNX graph
is correct on many runtimes; comments explain where the form matters.

Shape legend: B batch, T tokens, D hidden size, V token vector size (V = D without an output projection), H
heads, L layers.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnlens_model.attention.mechanism import ATTENTION_WEIGHTS, BatchInputs, Outputs
from attnlens_model.attention.parts.masks import causal_keep_mask
from attnlens_model.config import EncoderConfig
from attnlens_model.convolution import NeighborConvolution
from attnlens_model.embeddings import Embeddings
from attnlens_model.layer import EncoderLayer
from attnlens_model.norm import has_final_norm, make_norm


class EncoderOutput(NamedTuple):
    """Output of an encoder."""

    last_hidden_state: Tensor
    """(B, T, V), floating point."""
    layers: tuple[Outputs, ...]
    """Attention outputs of each layer, by role. Empty unless `output_attentions` is set."""
    embedded: Tensor
    """(B, T, D): input of the first layer."""

    @property
    def attentions(self) -> tuple[Tensor, ...]:
        """Attention weights of each layer after softmax: L tensors (B, H, T, T)."""
        return tuple(layer[ATTENTION_WEIGHTS] for layer in self.layers)


class Encoder(nn.Module):
    """Embeddings followed by L layers, which may share weights.

    Weights are initialized by the global random generator: embeddings from N(0, 0.02), projections
    Xavier-uniform, biases zero. Use `new_encoder` for a seeded encoder and `load_checkpoint` for published
    weights.
    """

    positions: Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        norm, hidden_size, dropout = config.norm, config.hidden_size, config.hidden_dropout
        self.embeddings = Embeddings(config.embeddings, config.positions, norm, hidden_size, dropout)
        attentions = list(dict.fromkeys(config.layer_attentions))
        self.shared = nn.ModuleList(attention.make_shared(config.sizes) for attention in attentions)
        self.shared_of_layer = [attentions.index(attention) for attention in config.layer_attentions]
        self.layers = nn.ModuleList(
            EncoderLayer(config, index) for index in range(config.num_distinct_layers)
        )
        self.convolution = (
            None
            if config.convolution is None
            else NeighborConvolution(config.convolution, hidden_size, norm.eps, dropout)
        )
        self.final_norm = make_norm(norm, hidden_size) if has_final_norm(norm) else None
        size = config.output_size
        self.output_projection = None if size is None else nn.Linear(hidden_size, size, bias=False)
        if self.output_projection is not None:
            nn.init.xavier_uniform_(self.output_projection.weight)
        if config.is_causal:
            # Allocate on CPU explicitly so the buffer has real values when the model is built on the meta
            # device.
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
            input_ids: (B, T) int64, from 0 to `vocab_size - 1`.
            attention_mask: (B, T) int64, 1 for tokens and 0 for padding on either side.
            token_type_ids: (B, T) int64. Defaults to 0. Ignored if there is only one type.
            output_attentions: Whether to return the attention outputs of all layers.

        Returns:
            Hidden states (B, T, V) and the attention outputs, in the dtype of the parameters. Values at
            padded positions are undefined.

        Raises:
            ValueError: Shapes are inconsistent, there are more tokens than `max_tokens`, or token types are
                given to an encoder without token types. Not checked during export.
        """
        if not torch.compiler.is_exporting():
            self._check_inputs(input_ids, attention_mask, token_type_ids)
        hidden_states = embedded = self.embeddings(input_ids, attention_mask, token_type_ids)  # (B, T, D)
        inputs = BatchInputs(attention_mask, self._keep(attention_mask, hidden_states.dtype))
        shared = [part(inputs) for part in self.shared]
        layers: tuple[Outputs, ...] = ()
        for index, shared_index in enumerate(self.shared_of_layer):
            layer = self.layers[index // self.config.times_in_a_row]
            hidden_states, outputs = layer(hidden_states, *shared[shared_index])
            if index == 0 and self.convolution is not None:
                hidden_states = self.convolution(embedded, hidden_states, attention_mask)
            if output_attentions:
                layers += (outputs,)
        if self.final_norm is not None:
            hidden_states = self.final_norm(hidden_states)
        if self.output_projection is not None:
            hidden_states = self.output_projection(hidden_states)  # (B, T, V)
        return EncoderOutput(hidden_states, layers, embedded)

    def _keep(self, attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the keep mask (B, 1, 1, T), or (B, 1, T, T) in a causal encoder."""
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
            raise ValueError(
                f"{input_ids.shape[1]} tokens are more than max_tokens={limit}: truncate the input"
            )
        if token_type_ids is not None and not self.config.embeddings.type_vocab_size:
            raise ValueError("token_type_ids were passed, but type_vocab_size=0: leave them out")


def new_encoder(config: EncoderConfig, seed: int) -> Encoder:
    """Return a newly initialized fp32 encoder in eval mode, with weights determined by `seed`.

    The state of the global random generator is preserved.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Encoder(config).eval()
