"""What a batch has brought, and each text's part of it.

Letters: B texts, T tokens of a text, T' tokens of a row of the batch, with padding, D hidden size, H heads,
K of them.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from attnlens.pooling import pool
from attnlens_server.bundle import Layout
from attnlens_server.engine.item import HeadSelection, TokenPooling, Wanted


class BatchOutputs(Protocol):
    """The outputs of a batch, wherever they are."""

    def part(self, row: int, num_tokens: int, wanted: Wanted) -> npt.NDArray[np.float32]:
        """Return what is wanted of a text, as `ItemResult.arrays` says. It is no part of a larger array."""


@dataclass(frozen=True, slots=True)
class HostOutputs:
    """Outputs in the memory of the process.

    Attributes:
        arrays: by the graph's names, (B, T', D), (B, T', H) or (B, H, T', T').
    """

    arrays: dict[str, npt.NDArray[np.float32]]

    def part(self, row: int, num_tokens: int, wanted: Wanted) -> npt.NDArray[np.float32]:
        """Return what is wanted of a text.

        It is copied where others share the batch, so that a slow reader of one small text cannot keep the
        outputs of all of them in memory.
        """
        batch = self.arrays[wanted.name]
        if wanted.layout is Layout.DENSE:
            part, head_axis = batch[row, :, :num_tokens, :num_tokens], 0  # (H, T, T)
        else:
            part, head_axis = batch[row, :num_tokens], 1  # (T, D) or (T, H)
        match wanted.keep:
            case TokenPooling(pooling, num_excluded):
                part = pool(part, pooling, num_excluded)  # (D,)
            case HeadSelection(heads, is_mean):
                if heads is not None and heads != tuple(range(part.shape[head_axis])):
                    part = part[list(heads)] if head_axis == 0 else part[:, list(heads)]  # a copy
                if is_mean:
                    part = part.mean(axis=head_axis, keepdims=True)
        whole = part.base
        return part.copy() if isinstance(whole, np.ndarray) and whole.size > part.size else part
