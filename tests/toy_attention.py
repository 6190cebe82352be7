"""A mechanism as somebody would add it: this file, and a line in the table of kinds.

Heads attend as usual, and each token decides by a gate how much it takes from each head. Beside the weights a
layer returns the gates, which are not heads x tokens x tokens.

B batch, T tokens, D width, H heads, K head width.
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
    """Heads with gates.

    Attributes:
        sharpness: what gates are multiplied by before the sigmoid.
    """

    kind: Literal["toy"] = "toy"
    sharpness: float = 1.0

    @property
    def operators(self) -> frozenset[str]:
        """The operators of ONNX that the modules need beside those of BERT."""
        return frozenset({"Sigmoid"})

    def outputs(self) -> tuple[AttentionOutput, ...]:
        """Return what a layer returns, in order."""
        return (*super().outputs(), AttentionOutput(TOY_GATES, "per_token", self.num_heads, "unbounded"))

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a fresh module of one layer."""
        return ToyAttention(self, sizes)


class ToyAttention(nn.Module):
    """Multi-head attention with a gate for each token and head."""

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
