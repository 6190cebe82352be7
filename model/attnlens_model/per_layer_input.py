"""Per-layer inputs: a gated view of the token embeddings that every layer adds to its output.

Gemma Team, Gemma 3n and EmbeddingGemma 2, as published in transformers (models/embedding_gemma2). With
the token embeddings e, which the first layer reads, and the output h of layer i,

    input  = norm(input_projection[i] e / sqrt(D))
    output = scale[i] * (h + output_norm[i](projection[i] (activation(gate[i] h) * input)))

The norm of the inputs has one weight for all layers. There is no table of embeddings for each layer.

Letters in shapes: B batch, T tokens, D width, P width of a per-layer input, L layers.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnlens_model.activations import GATE_ACTIVATIONS, Activation
from attnlens_model.config_part import ConfigPart
from attnlens_model.norm import NormConfig, make_norm


@dataclass(frozen=True, kw_only=True)
class PerLayerInputConfig(ConfigPart, path="per_layer_input"):
    """The input that each layer has in addition to the output of the layer before it.

    Attributes:
        size: P, the width of a layer's input.
        activation: of the gate, as that of the feed-forward part.
    """

    size: int
    activation: Activation = "gelu_tanh"

    def _check(self) -> None:
        self.require("size", self.size >= 1, "must be at least 1")


class PerLayerInputs(nn.Module):
    """The per-layer inputs of all layers."""

    def __init__(self, config: PerLayerInputConfig, norm: NormConfig, width: int, num_layers: int) -> None:
        super().__init__()
        self.norm = make_norm(norm, config.size)
        self.layers = nn.ModuleList(PerLayerInput(config, norm, width) for _ in range(num_layers))

    def forward(self, layer: int, embedded: Tensor, hidden_states: Tensor) -> Tensor:
        """Add the input of one layer to its output.

        Args:
            layer: Layer index.
            embedded: Token embeddings, (B, T, D), as the first layer reads them.
            hidden_states: Output of the layer, (B, T, D).

        Returns:
            (B, T, D).
        """
        output: Tensor = self.layers[layer](embedded, hidden_states, self.norm)
        return output


class PerLayerInput(nn.Module):
    """The input of one layer: projected from the embeddings, gated, projected back and scaled."""

    def __init__(self, config: PerLayerInputConfig, norm: NormConfig, width: int) -> None:
        super().__init__()
        # One projection for each layer rather than slices of a wide one: the gradient of a slice would be as
        # wide as all layers together.
        self.input_projection = nn.Linear(width, config.size, bias=False)
        self.gate = nn.Linear(width, config.size, bias=False)
        self.projection = nn.Linear(config.size, width, bias=False)
        self.output_norm = make_norm(norm, width)
        self.scale = nn.Parameter(torch.ones(1))
        self.activation = GATE_ACTIVATIONS[config.activation]
        self.input_scale = 1.0 / math.sqrt(width)
        for linear in (self.input_projection, self.gate, self.projection):
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, embedded: Tensor, hidden_states: Tensor, input_norm: nn.Module) -> Tensor:
        """(B, T, D) twice -> (B, T, D)."""
        layer_input = input_norm(self.input_projection(embedded) * self.input_scale)  # (B, T, P)
        gated = self.activation(self.gate(hidden_states)) * layer_input  # (B, T, P)
        output: Tensor = hidden_states + self.output_norm(self.projection(gated))
        return output * self.scale
