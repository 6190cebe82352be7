"""What must hold of the weights of a band or of blocks, whatever the encoder.

B batch, T tokens, H heads, W columns of a row.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnlens.patterns import Band, BlockTable, Pattern
from attnlens_export.parity.compare import BoolArray, FloatArray


class PatternErrors(NamedTuple):
    """How far weights are from what they must be.

    Attributes:
        row_sum: the largest |sum - 1| of a token's row.
        masked_weight: the largest weight of padding.
        empty_row_weight: the largest weight of a text without tokens.
    """

    row_sum: float
    masked_weight: float
    empty_row_weight: float


def pattern_errors(rows: FloatArray, pattern: Pattern, live: BoolArray) -> PatternErrors:
    """Put the weights (T, T) of each text and head together, one at a time, and look at them.

    Args:
        rows: (B, H, T, W).
        pattern: what they are laid out by.
        live: (B, T), False for padding.
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
    """Return the largest weight in the last columns, which say what tokens that see everything give."""
    number = 2 * pattern.block_size if isinstance(pattern, BlockTable) else pattern.num_global_tokens
    given = rows[..., rows.shape[-1] - number :]
    return float(np.abs(given).max(initial=0.0))
