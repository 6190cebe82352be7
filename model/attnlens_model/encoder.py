"""A transformer encoder of the BERT kind (Devlin et al. 2018) and its successors, composed of parts.

`EncoderConfig` chooses among the parts: which position embedding a token gets and whether embeddings are
projected (embeddings.py), a bias on scores by distance (relative_bias.py), vectors of the distances
(disentangled.py) or a rotation by position (rotary.py), which keys a layer sees and whether layers share
their weights (here), the norm (norm.py) and its place, the feed-forward (layer.py) and its activation
(activations.py), heads that share keys and values (attention.py), a convolution beside the first layer
(convolution.py). A family of published checkpoints is such a choice, not a class.

It is the body only: no pooling, no task head, no tokenizer. Everything is written in the forms that survive
ONNX export unchanged in meaning on many runtimes; where a form matters, a comment says so.

Letters in shapes: B batch, T tokens, D width, H heads, L layers.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnlens_model.attention.disentangled import DistanceEmbeddings
from attnlens_model.attention.masks import AttentionMask, causal_keep_mask, prepare_mask, window_keep_mask
from attnlens_model.attention.relative_bias import RelativePositionBias
from attnlens_model.attention.rotary import RotaryTables, Rotation
from attnlens_model.config import EncoderConfig
from attnlens_model.convolution import NeighbourConvolution
from attnlens_model.embeddings import Embeddings
from attnlens_model.layer import EncoderLayer
from attnlens_model.norm import make_norm


class EncoderOutput(NamedTuple):
    """What an encoder returns."""

    last_hidden_state: Tensor
    """(B, T, D), floating point."""
    attentions: tuple[Tensor, ...]
    """L tensors (B, H, T, T): every layer's weights after softmax. Empty when not asked for."""


class _Pattern(NamedTuple):
    """Which keys a layer's tokens see, and how queries and keys are turned."""

    mask: AttentionMask
    rotation: Rotation | None


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
        is_disentangled = config.disentangled_attention != "none"
        self.distances = DistanceEmbeddings(config) if is_disentangled else None
        self.layers = nn.ModuleList(
            EncoderLayer(config, index) for index in range(config.num_distinct_layers)
        )
        self.convolution = NeighbourConvolution(config) if config.conv_kernel_size else None
        self.final_norm = make_norm(config, config.hidden_size) if config.norm_placement == "pre" else None
        self.rotary = _make_rotary(config, config.rotary_theta, config.rotary_divisor)
        self.local_rotary = _make_rotary(config, config.local_rotary_theta, 1.0)
        if config.is_causal or config.local_window is not None:
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
        patterns = self._attention_patterns(attention_mask, hidden_states.dtype)
        position_part = self.relative_bias or self.distances
        bias = None if position_part is None else position_part(input_ids.shape[1])
        attentions: tuple[Tensor, ...] = ()
        times_in_a_row = self.config.num_layers // len(self.layers)
        for index in range(self.config.num_layers):
            mask, rotation = patterns[self.config.is_local(index)]
            layer = self.layers[index // times_in_a_row]
            embedded, (hidden_states, weights) = hidden_states, layer(hidden_states, mask, bias, rotation)
            if index == 0 and self.convolution is not None:
                hidden_states = self.convolution(embedded, hidden_states, attention_mask)
            if output_attentions:
                attentions += (weights,)
        if self.final_norm is not None:
            hidden_states = self.final_norm(hidden_states)
        return EncoderOutput(hidden_states, attentions)

    def _attention_patterns(self, attention_mask: Tensor, dtype: torch.dtype) -> dict[bool, _Pattern]:
        """Return what layers see, by whether they are local."""
        num_tokens = attention_mask.shape[1]
        keep = attention_mask.to(dtype)[:, None, None, :]  # (B, 1, 1, T)
        if self.config.is_causal:
            keep = keep * causal_keep_mask(self.positions[:num_tokens]).to(dtype)  # (B, 1, T, T)
        rotation = None if self.rotary is None else self.rotary(num_tokens)
        patterns = {False: _Pattern(prepare_mask(keep, dtype), rotation)}
        if self.config.local_window is not None:
            window = window_keep_mask(self.positions[:num_tokens], self.config.local_window)
            local_rotation = rotation if self.local_rotary is None else self.local_rotary(num_tokens)
            patterns[True] = _Pattern(prepare_mask(keep * window.to(dtype), dtype), local_rotation)
        return patterns

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


def _make_rotary(config: EncoderConfig, theta: float | None, divisor: float) -> RotaryTables | None:
    return None if theta is None else RotaryTables(config.head_dim, config.max_tokens, theta, divisor)


def new_encoder(config: EncoderConfig, seed: int) -> Encoder:
    """Return a fresh encoder in eval mode, fp32; the same seed gives the same weights.

    The global random generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Encoder(config).eval()
