"""Attention whose heads overlap: each head also sees some components of its two neighbours.

Zhang et al. 2024, "Improving Vision Transformers by Overlapping Heads in Multi-Head Self-Attention"
(https://arxiv.org/abs/2410.14874). The queries, keys and values of all heads lie side by side. Head h takes
its own K components of each, the last o of head h - 1 and the first o of head h + 1; where there is no
neighbour, zeros. Scores are scaled by 1 / sqrt(K), not by the width K + 2 o.

It is plain attention with heads of width K + 2 o whose projections repeat rows of smaller ones.

Letters in shapes: B batch, T tokens, D width, H heads, K head width (D = H * K), O width with both overlaps
(O = K + 2 o), L layers.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from attnlens_model.attention.mechanism import ATTENTION_WEIGHTS, AttentionConfig, EncoderSizes, Outputs
from attnlens_model.attention.parts.heads import HeadProjections
from attnlens_model.attention.parts.masks import AttentionMask
from attnlens_model.attention.parts.weights import attention_weights

OverlapPattern = Literal["depth", "depth + 1", "half depth", "half depth + 1"]
"""How the overlap grows with the depth of a layer, which is counted from 0."""


@dataclass(frozen=True, kw_only=True)
class OverlappingAttentionConfig(AttentionConfig):
    """Heads that share components with their neighbours.

    Attributes:
        overlap: o, how many components of each neighbour a head sees; at most the width of a head.
        bias: whether the projections to queries, keys, values and output have biases.
    """

    kind: Literal["overlapping"] = "overlapping"
    overlap: int
    bias: bool = True

    def _check(self) -> None:
        super()._check()
        self.require("overlap", self.overlap >= 0, "must be at least 0")

    def check_sizes(self, sizes: EncoderSizes) -> None:
        """Check what depends on the encoder: that heads divide its width, and that neighbours are enough."""
        super().check_sizes(sizes)
        width = self.head_dim(sizes.hidden_size)
        limit = f"must be at most {width}, the width of a head: a head overlaps with its neighbours alone"
        self.require("overlap", self.overlap <= width, limit)

    @property
    def operators(self) -> frozenset[str]:
        """The operators of ONNX that the modules need beside those of BERT."""
        return frozenset({"Concat"} if self.overlap else ())

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a fresh module of one layer."""
        return OverlappingSelfAttention(self, sizes)


def layer_overlaps(pattern: OverlapPattern, num_layers: int, *, reverse: bool = False) -> tuple[int, ...]:
    """Return the overlap of each layer in one of the published patterns.

    With l the layer's number from 0, "depth" is l, "depth + 1" is l + 1, "half depth" is l // 2 and
    "half depth + 1" is l // 2 + 1; `reverse` takes L - 1 - l for l. The authors' code
    (https://github.com/ZTX-100/MOHSA) has "depth" as its default. `attention` of a configuration is then

        [{"kind": "overlapping", "num_heads": H, "overlap": overlap} for overlap in layer_overlaps(...)]

    Raises:
        ValueError: there is no such pattern.
    """
    divisor_and_start = {
        "depth": (1, 0),
        "depth + 1": (1, 1),
        "half depth": (2, 0),
        "half depth + 1": (2, 1),
    }
    if pattern not in divisor_and_start:
        raise ValueError(f"pattern={pattern!r} is unknown: choose one of {', '.join(divisor_and_start)}")
    divisor, start = divisor_and_start[pattern]
    overlaps = [layer // divisor + start for layer in range(num_layers)]
    return tuple(overlaps[::-1] if reverse else overlaps)


class OverlappingSelfAttention(HeadProjections):
    """Self-attention with H heads that overlap; only the projection to the output has more weights for it."""

    def __init__(self, config: OverlappingAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__(sizes.hidden_size, config.num_heads, config.dropout, bias=config.bias)
        self.overlap = config.overlap
        width = config.num_heads * (self.head_dim + 2 * self.overlap)
        self.output = nn.Linear(width, sizes.hidden_size, bias=config.bias)
        self.reset_parameters()

    def forward(self, hidden_states: Tensor, mask: AttentionMask) -> tuple[Tensor, Outputs]:
        """Attend.

        Args:
            hidden_states: (B, T, D), floating point.
            mask: which keys each query may attend to.

        Returns:
            The context (B, T, D), and the weights (B, H, T, T) as they are before dropout.
        """
        query, key, value = (
            self.overlapping_heads(projection(hidden_states))  # (B, H, T, O)
            for projection in (self.query, self.key, self.value)
        )
        weights = attention_weights(query, key, mask, self.scale)  # (B, H, T, T)
        return self.combine(weights, value), {ATTENTION_WEIGHTS: weights}

    def overlapping_heads(self, projected: Tensor) -> Tensor:
        """(B, T, D) -> (B, H, T, O)."""
        own = torch.unflatten(projected, -1, (self.num_heads, self.head_dim))  # (B, T, H, K)
        if not self.overlap:
            return own.transpose(1, 2)
        # A product, since ONNX has no other zeros of this shape without arithmetic on shapes.
        nothing = own[:, :, :1, : self.overlap] * 0.0  # (B, T, 1, o)
        before = torch.cat([nothing, own[:, :, :-1, self.head_dim - self.overlap :]], dim=2)  # (B, T, H, o)
        after = torch.cat([own[:, :, 1:, : self.overlap], nothing], dim=2)
        return torch.cat([before, own, after], dim=-1).transpose(1, 2)
