"""A bias on attention scores that grows with the distance of two tokens, at a rate of each head's own.

Press et al. 2021, "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
section 3 (https://arxiv.org/abs/2108.12409): head h takes slope[h] * distance off the score. The paper's
decoders see earlier tokens alone; encoders take the distance to either side (Günther et al. 2023, "Jina
Embeddings 2", section 3, https://arxiv.org/abs/2310.19923), which in a causal encoder is the paper's.

Letters in shapes: T tokens, H heads, M the longest input.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of each head.

    For n heads, a power of two, they are 2^(-8/n), 2^(-16/n) ... 2^-8. Otherwise, as in the authors'
    implementation: those of the power of two below, then every other one of the power of two above.
    """
    below = 2 ** (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * head / below) for head in range(1, below + 1)]
    between = [2.0 ** (-4 * head / below) for head in range(1, 2 * below, 2)]
    return slopes + between[: num_heads - below]


class AlibiBias(nn.Module):
    """The bias of all heads, which has no parameters."""

    positions: Tensor
    slopes: Tensor

    def __init__(self, num_heads: int, max_tokens: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        # The devices are named so that the values exist even when the rest is built without storage.
        self.register_buffer("positions", torch.arange(max_tokens, device="cpu"), persistent=False)
        slopes = _exact_slopes(num_heads).to(torch.get_default_dtype())
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, num_tokens: int) -> Tensor:
        """Return the bias (1, H, T, T), query by key, for T = `num_tokens`."""
        positions = self.positions[:num_tokens]
        # Subtracted as integers: in fp16, positions beyond 2,048 are not exact, and near distances must be.
        distances = (positions[:, None] - positions[None, :]).to(self.slopes.dtype).abs()  # (T, T)
        return distances * self.slopes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the module to another dtype or device, each value rounded from float64."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.slopes = _exact_slopes(self.num_heads).to(self.slopes)
        return self


def _exact_slopes(num_heads: int) -> Tensor:
    """Return what a distance of one adds to scores: (1, H, 1, 1) float64."""
    slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float64, device="cpu")
    return -slopes[None, :, None, None]
