"""Rotary position embedding (RoPE): queries and keys are rotated by angles proportional to their position.

    pair i at position p is rotated by p * theta^(-2i/K) / divisor radians

The dot product of a rotated query and key depends only on their relative position.

Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2
(https://arxiv.org/abs/2104.09864). Component i of a head is paired with component i + K/2, as in the
published checkpoints, whereas the paper pairs adjacent components. The two are equivalent up to a permutation
of the weights.

Shape legend: B batch, H heads, T tokens, K head size, M maximum input length.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from attnlens_model.config_part import ConfigPart, is_positive


@dataclass(frozen=True, kw_only=True)
class FrequencyScalingConfig(ConfigPart, path="attention.rotary.scaling"):
    """Frequency scaling of Llama 3.1, for inputs longer than the original context length.

    Within the original context, a pair with at least `high_freq_factor` rotations keeps its frequency, and
    the frequency of a pair with at most `low_freq_factor` rotations is divided by `factor`. In between, the
    two are interpolated linearly in the number of rotations (Llama Team 2024,
    https://arxiv.org/abs/2407.21783, with the formula of the published implementation).

    Attributes:
        factor: Divisor of low frequencies.
        low_freq_factor: Number of rotations up to which a frequency is low.
        high_freq_factor: Number of rotations from which a frequency is high.
        original_max_position_embeddings: Original context length in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def _check(self) -> None:
        for name in ("factor", "low_freq_factor", "original_max_position_embeddings"):
            self.require(name, is_positive(getattr(self, name)), "must be greater than 0")
        is_valid = self.low_freq_factor < self.high_freq_factor and is_positive(self.high_freq_factor)
        limit = f"must be greater than low_freq_factor={self.low_freq_factor}"
        self.require("high_freq_factor", is_valid, limit)

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies (K/2,), in radians per position."""
        rotations = frequencies * (self.original_max_position_embeddings / (2 * math.pi))
        share = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = share.clamp(0.0, 1.0)  # 0 for low frequencies, 1 for high ones
        return frequencies * (kept + (1.0 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(ConfigPart, path="attention.rotary"):
    """Rotation frequencies.

    Attributes:
        theta: Base of the frequencies: pair i of K/2 rotates by theta^(-2i/K) / divisor radians per position.
        divisor: Linear scaling of the frequencies, 1 in the paper.
        scaling: Scaling of low frequencies. If None, they are not scaled.
    """

    theta: float
    divisor: float = 1.0
    scaling: FrequencyScalingConfig | None = None

    def _check(self) -> None:
        for name in ("theta", "divisor"):
            self.require(name, is_positive(getattr(self, name)), "must be greater than 0")


class Rotation(NamedTuple):
    """Cosines and sines (T, K) for the positions of an input, shared by all layers.

    The first half of the sines is negated.
    """

    cosines: Tensor
    sines: Tensor


def rotate(vectors: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys (B, H, T, K) by the angles for their positions."""
    half = vectors.shape[-1] // 2
    # The sign is in the table, which saves one ONNX operator per layer.
    swapped = torch.cat([vectors[..., half:], vectors[..., :half]], dim=-1)
    return vectors * rotation.cosines + swapped * rotation.sines


class RotaryTables(nn.Module):
    """Cosines and sines for all positions, computed in float64 and rounded once."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: RotaryConfig, head_dim: int, max_tokens: int) -> None:
        """Compute the tables for M = `max_tokens` and an even K = `head_dim`."""
        super().__init__()
        self._sizes = (config, head_dim, max_tokens)
        dtype = torch.get_default_dtype()
        for name, exact in zip(("cosines", "sines"), _compute_tables(*self._sizes), strict=True):
            self.register_buffer(name, exact.to(dtype), persistent=False)

    def forward(self, num_tokens: int) -> Rotation:
        """Return the rows for positions 0 to `num_tokens` - 1."""
        return Rotation(self.cosines[:num_tokens], self.sines[:num_tokens])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the module to another dtype or device, rounding each value from float64.

        Casting fp32 tables to float64 would keep the fp32 rounding errors, and a float64 reference would have
        them.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, exact in zip(("cosines", "sines"), _compute_tables(*self._sizes), strict=True):
            setattr(self, name, exact.to(getattr(self, name)))
        return self


def _compute_tables(config: RotaryConfig, head_dim: int, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines, (M, K) float64."""
    # Allocate on CPU explicitly so the tables have values when the model is built on the meta device.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim  # (K/2,)
    positions = torch.arange(max_tokens, dtype=torch.float64, device="cpu")  # (M,)
    frequencies = config.theta**-exponents / config.divisor  # (K/2,)
    if config.scaling is not None:
        frequencies = config.scaling.scaled(frequencies)
    angles = positions[:, None] * frequencies  # (M, K/2)
    sines = angles.sin()
    return torch.cat([angles.cos()] * 2, dim=-1), torch.cat([-sines, sines], dim=-1)  # (M, K)
