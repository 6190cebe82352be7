"""Attention masks as additive biases.

A mask is a finite number added to the score, not -inf or a boolean, because every ONNX runtime supports that.

Shape legend: B batch, T tokens, H heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MASKED_SCORE = -(2.0**15)
"""Bias added to the score of a masked key. Exact in fp32, fp16 and bfloat16.

The fp32 exponential of a number below -104 is exactly 0, so a masked key gets no weight unless its score
exceeds the best unmasked score by more than 32,664. In fp16, scores down to -32,736 remain finite when the
bias is added. Larger magnitudes are worse for runtimes that compute in fp16 or bfloat16: in bfloat16,
OpenVINO returns wrong results at -1e20 and less accurate ones at -1e9.
"""


class AttentionMask(NamedTuple):
    """A keep-mask in the two forms that attention needs, computed once for all layers.

    Both are floating point and broadcastable to (B, H, T, T).
    """

    keep: Tensor
    """1 if the query may attend to the key, otherwise 0."""
    bias: Tensor
    """0 if the query may attend to the key, otherwise `MASKED_SCORE`."""


def prepare_mask(keep_mask: Tensor, dtype: torch.dtype) -> AttentionMask:
    """Convert a bool, integer or float keep-mask (True or 1: may attend) to both forms in `dtype`."""
    keep = keep_mask.to(dtype)
    return AttentionMask(keep, (1.0 - keep) * MASKED_SCORE)


def causal_keep_mask(positions: Tensor) -> Tensor:
    """Return the (T, T) keep-mask in which each token attends to itself and all previous tokens.

    Clamped distances need only basic arithmetic, which more ONNX runtimes support than Trilu or comparisons.

    Args:
        positions: (T,) int64, the numbers 0 to T - 1.

    Returns:
        (T, T) float32, because fp16 cannot represent all positions.
    """
    exact = positions.to(torch.float32)
    distance = exact[:, None] - exact[None, :]  # (T, T)
    return (distance + 1.0).clamp(0.0, 1.0)


def window_keep_mask(positions: Tensor, window: int) -> Tensor:
    """Return the (T, T) keep-mask in which each token attends to tokens up to `window` positions away.

    For the argument and result, see `causal_keep_mask`.
    """
    exact = positions.to(torch.float32)
    distance = (exact[:, None] - exact[None, :]).abs()  # (T, T)
    return (window + 1.0 - distance).clamp(0.0, 1.0)
