"""Attention with linear biases (ALiBi): a penalty on scores, proportional to the distance of query and key.

    score[h, i, j] = query[h, i] . key[h, j] * scale - slope[h] * |i - j|

Press et al. 2021, "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
section 3 (https://arxiv.org/abs/2108.12409). The paper defines it for causal decoders. Bidirectional encoders
use the absolute distance (Günther et al. 2023, "Jina Embeddings 2", section 3,
https://arxiv.org/abs/2310.19923), which is equivalent in a causal encoder.

Shape legend: T tokens, H heads.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of each head.

    If the number of heads n is a power of two, the slopes are 2^(-8/n), 2^(-16/n), ..., 2^-8. Otherwise, as
    in the authors' implementation, the slopes for the next lower power of two are followed by every other
    slope for the next higher one.
    """
    below = 2 ** (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * head / below) for head in range(1, below + 1)]
    between = [2.0 ** (-4 * head / below) for head in range(1, 2 * below, 2)]
    return slopes + between[: num_heads - below]


class AlibiBias(nn.Module):
    """Computes the bias of all heads. It has no parameters."""

    positions: Tensor
    slopes: Tensor

    def __init__(self, num_heads: int, max_tokens: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        # Allocate on CPU explicitly so the buffers have values when the model is built on the meta device.
        self.register_buffer("positions", torch.arange(max_tokens, device="cpu"), persistent=False)
        slopes = _negative_slopes(num_heads).to(torch.get_default_dtype())
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, num_tokens: int) -> Tensor:
        """Return the bias (1, H, T, T), query by key, for T = `num_tokens`."""
        positions = self.positions[:num_tokens]
        # Subtract as integers: fp16 cannot represent all positions above 2,048, but small distances must be
        # exact.
        distances = (positions[:, None] - positions[None, :]).to(self.slopes.dtype).abs()  # (T, T)
        return distances * self.slopes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the module to another dtype or device, rounding each slope from float64."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.slopes = _negative_slopes(self.num_heads).to(self.slopes)
        return self


def _negative_slopes(num_heads: int) -> Tensor:
    """Return the bias per token of distance, (1, H, 1, 1) float64."""
    slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float64, device="cpu")
    return -slopes[None, :, None, None]
