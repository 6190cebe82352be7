"""Per-layer inputs: a gated view of the token embeddings that every layer adds to its output.

Gemma Team, Gemma 3n and EmbeddingGemma 2, as published in transformers (models/embedding_gemma2). With the
token embeddings e and the output h of layer i,

    input  = norm(input_projection[i] e / sqrt(D))
    output = scale[i] * (h + output_norm[i](projection[i] (activation(gate[i] h) * input)))

All layers share the weight of the input norm. Per-layer embedding tables are not supported.

Shape legend: B batch, T tokens, D hidden size, P size of a per-layer input, L layers.
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
    """Settings of per-layer inputs.

    Attributes:
        size: Size P of the input of a layer.
        activation: Activation of the gate.
    """

    size: int
    activation: Activation = "gelu_tanh"

    def _check(self) -> None:
        self.require("size", self.size >= 1, "must be at least 1")


class PerLayerInputs(nn.Module):
    """Per-layer inputs of all layers."""

    def __init__(
        self, config: PerLayerInputConfig, norm: NormConfig, hidden_size: int, num_layers: int
    ) -> None:
        super().__init__()
        self.norm = make_norm(norm, config.size)
        self.layers = nn.ModuleList(PerLayerInput(config, norm, hidden_size) for _ in range(num_layers))

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
    """Input of one layer: projected from the embeddings, gated, projected back and scaled."""

    def __init__(self, config: PerLayerInputConfig, norm: NormConfig, hidden_size: int) -> None:
        super().__init__()
        # One projection per layer instead of slices of a fused one, whose gradients would have the size of
        # all layers together.
        self.input_projection = nn.Linear(hidden_size, config.size, bias=False)
        self.gate = nn.Linear(hidden_size, config.size, bias=False)
        self.projection = nn.Linear(config.size, hidden_size, bias=False)
        self.output_norm = make_norm(norm, hidden_size)
        self.scale = nn.Parameter(torch.ones(1))
        self.activation = GATE_ACTIVATIONS[config.activation]
        self.input_scale = 1.0 / math.sqrt(hidden_size)
        for linear in (self.input_projection, self.gate, self.projection):
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, embedded: Tensor, hidden_states: Tensor, input_norm: nn.Module) -> Tensor:
        """Map embeddings and hidden states, both (B, T, D), to (B, T, D)."""
        layer_input = input_norm(self.input_projection(embedded) * self.input_scale)  # (B, T, P)
        gated = self.activation(self.gate(hidden_states)) * layer_input  # (B, T, P)
        output: Tensor = hidden_states + self.output_norm(self.projection(gated))
        return output * self.scale
