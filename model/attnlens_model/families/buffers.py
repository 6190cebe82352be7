"""Checks of stored buffers against the values that the encoder computes.

Shape legend: M positions, K head size.
"""

import torch
from torch import Tensor

from attnlens_model.attention.mechanism import AttentionConfig, EncoderSizes

# Rounding error of a table computed in fp32. Narrower dtypes add their own.
_TOLERANCE = 1e-6

_MAX_MASKING_SCORE = -1e4


def holds_indices(_sizes: EncoderSizes, _attention: AttentionConfig, stored: Tensor) -> bool:
    """Return whether `stored` is 0, 1, 2, ... along the last axis."""
    return bool((stored == torch.arange(stored.shape[-1]).to(stored.dtype)).all())


def holds_zeros(_sizes: EncoderSizes, _attention: AttentionConfig, stored: Tensor) -> bool:
    """Return whether all values are 0."""
    return not stored.any()


def holds_causal_mask(_sizes: EncoderSizes, _attention: AttentionConfig, stored: Tensor) -> bool:
    """Return whether `stored`, query by key (..., M, M), is 1 up to the diagonal and 0 above it."""
    if stored.ndim < 2:  # noqa: PLR2004 - query by key
        return False
    expected = torch.ones(stored.shape[-2:], dtype=torch.bool).tril()
    return bool((stored == expected.to(stored.dtype)).all())


def holds_masking_score(_sizes: EncoderSizes, _attention: AttentionConfig, stored: Tensor) -> bool:
    """Return whether `stored` is a single score that masks a key: -1e4 or less."""
    return stored.numel() == 1 and stored.item() <= _MAX_MASKING_SCORE


def holds_sines_and_cosines(sizes: EncoderSizes, attention: AttentionConfig, stored: Tensor) -> bool:
    """Return whether each row of `stored` (M, K) has the K/2 sines, then the K/2 cosines of its position."""
    num_positions, head_dim = sizes.max_tokens, attention.head_dim(sizes.hidden_size)
    if stored.shape != (num_positions, head_dim):
        return False
    positions = torch.arange(num_positions, dtype=torch.float64)[:, None]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = positions * 10_000.0**-exponents  # (M, K/2)
    expected = torch.cat([angles.sin(), angles.cos()], dim=-1)
    tolerance = max(_TOLERANCE, torch.finfo(stored.dtype).eps)
    return torch.allclose(stored.double(), expected, rtol=0.0, atol=tolerance)
