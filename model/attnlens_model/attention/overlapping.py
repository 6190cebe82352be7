"""Overlapping heads: each head also uses some components of its two neighbors.

Zhang et al. 2024, "Improving Vision Transformers by Overlapping Heads in Multi-Head Self-Attention"
(https://arxiv.org/abs/2410.14874). With the projected query of all heads concatenated, head h uses

    (last o components of head h - 1, K components of head h, first o components of head h + 1)

and likewise for keys and values. The first and the last head are padded with zeros. Scores are scaled by
1 / sqrt(K), not by the overlapping head size K + 2 o. This is equivalent to multi-head attention with heads
of size K + 2 o whose projections share rows.

Shape legend: B batch, T tokens, D hidden size, H heads, K head size (D = H * K), O overlapping head size
(O = K + 2 o), L layers.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from attnlens_model.attention.heads import HeadProjections
from attnlens_model.attention.mechanism import ATTENTION_WEIGHTS, AttentionConfig, EncoderSizes, Outputs
from attnlens_model.attention.parts.masks import AttentionMask
from attnlens_model.attention.parts.weights import attention_weights

OverlapPattern = Literal["depth", "depth + 1", "half depth", "half depth + 1"]
"""Overlap as a function of the layer index, which starts at 0."""


@dataclass(frozen=True, kw_only=True)
class OverlappingAttentionConfig(AttentionConfig):
    """Configuration of attention with overlapping heads.

    Attributes:
        overlap: Number of components o used from each neighbor. At most the head size.
        bias: Whether the query, key, value and output projections have biases.
    """

    kind: Literal["overlapping"] = "overlapping"
    overlap: int
    bias: bool = True

    def _check(self) -> None:
        super()._check()
        self.require("overlap", self.overlap >= 0, "must be at least 0")

    def check_sizes(self, sizes: EncoderSizes) -> None:
        """Validate the number of heads and the overlap."""
        super().check_sizes(sizes)
        head_dim = self.head_dim(sizes.hidden_size)
        limit = f"must be at most {head_dim}, the head size: a head overlaps only with its direct neighbors"
        self.require("overlap", self.overlap <= head_dim, limit)

    @property
    def operators(self) -> frozenset[str]:
        """ONNX operators that the modules use in addition to those of BERT."""
        return frozenset({"Concat"} if self.overlap else ())

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a randomly initialized layer module."""
        return OverlappingSelfAttention(self, sizes)


def layer_overlaps(pattern: OverlapPattern, num_layers: int, *, reverse: bool = False) -> tuple[int, ...]:
    """Return the overlap of each layer for a published pattern.

    For layer index l, "depth" is l, "depth + 1" is l + 1, "half depth" is l // 2 and "half depth + 1" is
    l // 2 + 1. The authors' code (https://github.com/ZTX-100/MOHSA) defaults to "depth". To use a pattern,
    set `attention` of an encoder configuration to

        [{"kind": "overlapping", "num_heads": H, "overlap": overlap} for overlap in layer_overlaps(...)]

    Args:
        pattern: Name of the pattern.
        num_layers: L.
        reverse: Whether to replace l by L - 1 - l.

    Raises:
        ValueError: The pattern is unknown.
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
    """Multi-head self-attention with overlapping heads. Only the output projection is larger."""

    def __init__(self, config: OverlappingAttentionConfig, sizes: EncoderSizes) -> None:
        super().__init__(config, sizes, bias=config.bias)
        self.overlap = config.overlap
        width = config.num_heads * (self.head_dim + 2 * self.overlap)
        self.output = nn.Linear(width, sizes.hidden_size, bias=config.bias)
        self.reset_parameters()

    def forward(self, hidden_states: Tensor, mask: AttentionMask) -> tuple[Tensor, Outputs]:
        """Compute the attention of one layer.

        Args:
            hidden_states: (B, T, D), floating point.
            mask: Keys that each query may attend to.

        Returns:
            The context (B, T, D), and the weights (B, H, T, T) before dropout.
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
        # A product, because other ways to create zeros of this shape in ONNX need arithmetic on shapes.
        zeros = own[:, :, :1, : self.overlap] * 0.0  # (B, T, 1, o)
        previous = torch.cat([zeros, own[:, :, :-1, self.head_dim - self.overlap :]], dim=2)  # (B, T, H, o)
        following = torch.cat([own[:, :, 1:, : self.overlap], zeros], dim=2)
        return torch.cat([previous, own, following], dim=-1).transpose(1, 2)
