"""Example of a custom mechanism: this module and an entry in `ATTENTION_KINDS`.

Softmax attention whose heads are multiplied by a gate per token. In addition to the weights (B, H, T, T), a
layer returns the gates (B, T, H).

Shape legend: B batch, T tokens, D hidden size, H heads, K head size.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from attnlens_model.attention.heads import HeadProjections
from attnlens_model.attention.mechanism import (
    ATTENTION_WEIGHTS,
    AttentionConfig,
    AttentionOutput,
    EncoderSizes,
    OutputRole,
    Outputs,
)
from attnlens_model.attention.parts.masks import AttentionMask
from attnlens_model.attention.parts.weights import attention_weights

TOY_GATES = OutputRole("head_gates")


@dataclass(frozen=True, kw_only=True)
class ToyAttentionConfig(AttentionConfig):
    """Configuration of gated heads.

    Attributes:
        sharpness: Factor applied to the gates before the sigmoid.
    """

    kind: Literal["toy"] = "toy"
    sharpness: float = 1.0

    @property
    def operators(self) -> frozenset[str]:
        """ONNX operators that the modules use in addition to those of BERT."""
        return frozenset({"Sigmoid"})

    def outputs(self) -> tuple[AttentionOutput, ...]:
        """Return the outputs of a layer: weights and gates."""
        return (*super().outputs(), AttentionOutput(TOY_GATES, "per_token", self.num_heads, "unbounded"))

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a randomly initialized layer module."""
        return ToyAttention(self, sizes)


class ToyAttention(nn.Module):
    """Multi-head attention with a gate per token and head."""

    def __init__(self, config: ToyAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__()
        self.heads = HeadProjections(config, sizes)
        self.gate = nn.Linear(sizes.hidden_size, config.num_heads)
        self.sharpness = config.sharpness

    def forward(self, hidden_states: Tensor, mask: AttentionMask) -> tuple[Tensor, Outputs]:
        """(B, T, D) -> (B, T, D), the weights (B, H, T, T) and the gates (B, T, H)."""
        query, key, value = self.heads.project(hidden_states)  # (B, H, T, K)
        weights = attention_weights(query, key, mask, self.heads.scale)  # (B, H, T, T)
        gates = torch.sigmoid(self.sharpness * self.gate(hidden_states))  # (B, T, H)
        per_head = gates.transpose(1, 2)[..., None]  # (B, H, T, 1)
        gated = per_head * (self.heads.dropout(weights) @ value)  # (B, H, T, K)
        context = self.heads.output(gated.transpose(1, 2).flatten(-2))
        return context, {ATTENTION_WEIGHTS: weights, TOY_GATES: gates}
