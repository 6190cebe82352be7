"""Checks of banded and block-sparse attention weights that need no reference encoder.

Shape legend: B batch, T tokens, H heads, W stored weights per token.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnlens.patterns import Band, BlockTable, Pattern
from attnlens_export.parity.compare import BoolArray, FloatArray


class PatternErrors(NamedTuple):
    """Deviations of attention weights from their expected values.

    Attributes:
        row_sum: Maximum |sum - 1| of a token's row.
        masked_weight: Maximum weight on padding.
        empty_row_weight: Maximum weight in a text without tokens.
    """

    row_sum: float
    masked_weight: float
    empty_row_weight: float


def pattern_errors(rows: FloatArray, pattern: Pattern, live: BoolArray) -> PatternErrors:
    """Check the dense weights (T, T) of one text and head at a time.

    Args:
        rows: Weights (B, H, T, W).
        pattern: Layout of `rows`.
        live: Mask (B, T), False for padding.
    """
    row_sum = masked = empty = 0.0
    for text, mask in zip(rows, live, strict=True):
        if not mask.any():
            empty = max(empty, float(np.abs(text).max()))
            continue
        length = int(np.flatnonzero(mask)[-1]) + 1
        for head in range(len(text)):
            weights = _dense(text[head : head + 1, :length], pattern, head, mask[:length])[0]
            sums = weights[mask[:length]].sum(axis=-1, dtype=np.float64)
            row_sum = max(row_sum, float(np.abs(sums - 1).max()))
            masked = max(masked, float(np.abs(weights[:, ~mask[:length]]).max(initial=0.0)))
        masked = max(masked, _given_to_padding(text[:, length:], pattern))
    return PatternErrors(row_sum, masked, empty)


def _dense(rows: FloatArray, pattern: Pattern, head: int, mask: BoolArray) -> npt.NDArray[np.floating]:
    if isinstance(pattern, Band):
        return pattern.dense(rows, mask)
    return pattern.of_heads([head]).at(rows.shape[1]).dense(rows)


def _given_to_padding(rows: FloatArray, pattern: Pattern) -> float:
    """Return the maximum weight in the last columns, which store attention from global tokens."""
    number = 2 * pattern.block_size if isinstance(pattern, BlockTable) else pattern.num_global_tokens
    given = rows[..., rows.shape[-1] - number :]
    return float(np.abs(given).max(initial=0.0))
