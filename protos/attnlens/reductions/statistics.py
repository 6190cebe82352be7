"""Numbers for each row and column of maps. Letters: H heads, R rows, U units. Sums are made in float64."""

from dataclasses import dataclass

import numpy as np

from attnlens.reductions.maps import FloatArray, shown
from attnlens.reductions.units import BoolArray


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RowStatistics:
    """What is known of maps; None: not asked for.

    Attributes:
        received: (..., U): what each unit is given.
        entropy: (..., R): of each row, in nats.
    """

    received: FloatArray | None = None
    entropy: FloatArray | None = None

    def __repr__(self) -> str:
        return f"RowStatistics({shown(received=self.received, entropy=self.entropy)})"


def received(maps: FloatArray, is_special: BoolArray | None) -> FloatArray:
    """Return what each unit is given, (H, U): the sum over the rows of maps (H, U, U).

    Args:
        maps: (H, U, U).
        is_special: (U,): rows that do not count; None: all count.
    """
    rows = maps if is_special is None else maps[:, ~is_special]
    sums: FloatArray = rows.sum(axis=1, dtype=np.float64).astype(np.float32)
    return sums


def entropy(maps: FloatArray) -> FloatArray:
    """Return the entropy of each row of maps (H, R, U) in nats, (H, R): - sum A ln A, where 0 ln 0 = 0."""
    sums = np.zeros(maps.shape[:-1], dtype=np.float32)
    for head, rows in enumerate(maps):
        logs = np.zeros_like(rows)
        np.log(rows, out=logs, where=rows > 0)
        logs *= rows
        sums[head] = -logs.sum(axis=-1, dtype=np.float64)
    sums += np.float32(0)  # -0.0 is 0
    return sums
