"""Which keys a query may attend to, as numbers: a mask is added, never -inf and never a boolean.

These are the arithmetic forms that every ONNX runtime understands.

Letters in shapes: B batch, T tokens, H heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MASKED_SCORE = -(2.0**15)
"""What is added to the score of a masked key, in every dtype; fp16 and bfloat16 hold it exactly.

The exponential of a number below -104 is exactly 0 in fp32: a masked score may be up to 32,664 above the best
live one. In fp16 it may be as low as -32,736 before the sum is infinite. Lower numbers do not help
runtimes that compute in fp16 or bfloat16: in bfloat16 OpenVINO returns wrong numbers at -1e20 and below, and
less accurate ones at -1e9.
"""


class AttentionMask(NamedTuple):
    """A keep-mask in the two forms that attention needs, so that all layers share one computation.

    Both are floating point and broadcast to (B, H, T, T).
    """

    keep: Tensor
    """1 where a query may attend to a key, else 0."""
    bias: Tensor
    """0 where a query may attend to a key, else `MASKED_SCORE`."""


def prepare_mask(keep_mask: Tensor, dtype: torch.dtype) -> AttentionMask:
    """Turn a keep-mask (bool, int or float; True or 1 = may attend) into both forms, in floating `dtype`."""
    keep = keep_mask.to(dtype)
    return AttentionMask(keep, (1.0 - keep) * MASKED_SCORE)


def causal_keep_mask(positions: Tensor) -> Tensor:
    """Return the (T, T) keep-mask in which a token attends to itself and to those before it.

    `positions` is (T,) int64: 0, 1, 2 ... The mask is float32, which counts exactly where fp16 does
    not. Clamping the distance is plain arithmetic, which more ONNX runtimes have than Trilu or a comparison.
    """
    exact = positions.to(torch.float32)
    distance = exact[:, None] - exact[None, :]  # (T, T)
    return (distance + 1.0).clamp(0.0, 1.0)


def window_keep_mask(positions: Tensor, window: int) -> Tensor:
    """Return the (T, T) keep-mask in which a token attends to those at most `window` places away.

    `positions` and the mask are as for `causal_keep_mask`.
    """
    exact = positions.to(torch.float32)
    distance = (exact[:, None] - exact[None, :]).abs()  # (T, T)
    return (window + 1.0 - distance).clamp(0.0, 1.0)
