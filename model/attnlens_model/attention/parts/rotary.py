"""Rotary position embedding: queries and keys are turned by angles that grow with their position.

Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2. Component i of a
head is paired with component i + K/2, as in the published checkpoints of every family here, not with its
neighbour as in the paper; the two differ by a permutation that training absorbs.

The dot product of a turned query and a turned key depends on their distance alone.

Letters in shapes: B batch, H heads, T tokens, K head width, M the longest input.
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
    """Slower rotation of the pairs whose wavelength does not fit the length of training, as in Llama 3.1.

    A pair that turns `high_freq_factor` times or more within `original_max_position_embeddings` tokens keeps
    its frequency; one that turns `low_freq_factor` times or less has it divided by `factor`; between the two
    it goes from one to the other, linearly in the number of turns (Llama Team 2024,
    https://arxiv.org/abs/2407.21783; the formula is that of the published implementation).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def _check(self) -> None:
        for name in ("factor", "low_freq_factor", "original_max_position_embeddings"):
            self.require(name, is_positive(getattr(self, name)), "must be greater than 0")
        is_usable = self.low_freq_factor < self.high_freq_factor and is_positive(self.high_freq_factor)
        limit = f"must be greater than low_freq_factor={self.low_freq_factor}"
        self.require("high_freq_factor", is_usable, limit)

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Return the frequencies (K/2,), radians for each position, as this scaling has them."""
        turns = frequencies * (self.original_max_position_embeddings / (2 * math.pi))
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = share.clamp(0.0, 1.0)  # 0: divided by the factor, 1: as it was
        return frequencies * (kept + (1.0 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(ConfigPart, path="attention.rotary"):
    """By which angles queries and keys are turned.

    Attributes:
        theta: pair i of K/2 turns by theta^(-2i/K) / divisor radians from one position to the next.
        divisor: see `theta`; 1 is the paper's.
        scaling: changes some of these frequencies; None means none.
    """

    theta: float
    divisor: float = 1.0
    scaling: FrequencyScalingConfig | None = None

    def _check(self) -> None:
        for name in ("theta", "divisor"):
            self.require(name, is_positive(getattr(self, name)), "must be greater than 0")


class Rotation(NamedTuple):
    """Cosines and sines for the T positions of an input, so that all layers share one lookup.

    Both are (T, K); the first half of the sines is negated.
    """

    cosines: Tensor
    sines: Tensor


def rotate(vectors: Tensor, rotation: Rotation) -> Tensor:
    """Turn queries or keys (B, H, T, K), each by the angles of its position."""
    half = vectors.shape[-1] // 2
    # The paper's minus sign is in the table, which saves an operator in every layer of the graph.
    swapped = torch.cat([vectors[..., half:], vectors[..., :half]], dim=-1)
    return vectors * rotation.cosines + swapped * rotation.sines


class RotaryTables(nn.Module):
    """The cosines and sines of all positions, computed in float64 and rounded once."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: RotaryConfig, head_dim: int, max_tokens: int) -> None:
        """Compute the tables for M = `max_tokens` and K = `head_dim`, which is even."""
        super().__init__()
        self._sizes = (config, head_dim, max_tokens)
        dtype = torch.get_default_dtype()
        for name, exact in zip(("cosines", "sines"), _exact_tables(*self._sizes), strict=True):
            self.register_buffer(name, exact.to(dtype), persistent=False)

    def forward(self, num_tokens: int) -> Rotation:
        """Return the rows of the first `num_tokens` positions."""
        return Rotation(self.cosines[:num_tokens], self.sines[:num_tokens])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the module to another dtype or device, each value rounded from float64.

        A cast from fp32 to float64 would keep the rounding of fp32, and with it a float64 reference.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, exact in zip(("cosines", "sines"), _exact_tables(*self._sizes), strict=True):
            setattr(self, name, exact.to(getattr(self, name)))
        return self


def _exact_tables(config: RotaryConfig, head_dim: int, max_tokens: int) -> tuple[Tensor, Tensor]:
    # The device is named so that the values exist even when the rest is built without storage.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim  # (K/2,)
    positions = torch.arange(max_tokens, dtype=torch.float64, device="cpu")  # (M,)
    frequencies = config.theta**-exponents / config.divisor  # (K/2,)
    if config.scaling is not None:
        frequencies = config.scaling.scaled(frequencies)
    angles = positions[:, None] * frequencies  # (M, K/2)
    sines = angles.sin()
    return torch.cat([angles.cos()] * 2, dim=-1), torch.cat([-sines, sines], dim=-1)  # (M, K)
