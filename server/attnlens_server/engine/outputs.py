"""What a batch has brought, and each text's part of it.

Letters: B texts, T tokens of a text, T' tokens of a row of the batch, with padding, D hidden size, H heads,
K of them, W columns of a band or of blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt

from attnlens.explanations import pool_weighted
from attnlens.patterns import Band, Pattern
from attnlens.pooling import pool
from attnlens.reductions import Reduced, reduce
from attnlens_server.bundle import Layout
from attnlens_server.engine.item import (
    HeadSelection,
    Item,
    TokenPooling,
    Wanted,
    WantedReduction,
    WeightedPooling,
)


class BatchOutputs(Protocol):
    """The outputs of a batch, wherever they are."""

    def part(self, row: int, num_tokens: int, wanted: Wanted) -> npt.NDArray[np.float32]:
        """Return what is wanted of a text, as `ItemResult.arrays` says. It is no part of a larger array."""


@dataclass(frozen=True, slots=True)
class HostOutputs:
    """Outputs in the memory of the process.

    Attributes:
        arrays: by the graph's names, (B, T', D), (B, T', H), (B, H, T', T') or (B, H, T', W); of
            contributions (B, T') and (B, ...).
        are_reused: whether the next batch of this thread is written to the same memory.
    """

    arrays: dict[str, npt.NDArray[np.float32]]
    are_reused: bool = False

    def part(self, row: int, num_tokens: int, wanted: Wanted) -> npt.NDArray[np.float32]:
        """Return what is wanted of a text.

        It is copied where the memory is reused, and where others share the batch, so that a slow reader of
        one small text cannot keep the outputs of all of them in memory.
        """
        batch = self.arrays[wanted.name]
        if wanted.layout is Layout.PER_TEXT:
            return np.array(batch[row])
        if wanted.layout is Layout.PER_TOKEN:
            part, head_axis = batch[row, :num_tokens], 1  # (T, D) or (T, H)
        else:
            num_columns = num_tokens if wanted.layout is Layout.DENSE else None
            part, head_axis = batch[row, :, :num_tokens, :num_columns], 0  # (H, T, T) or (H, T, W)
        match wanted.keep:
            case TokenPooling(pooling, num_excluded):
                part = pool(part, pooling, num_excluded)  # (D,)
            case WeightedPooling(pooling, weights):
                part = pool_weighted(part, weights, pooling)  # (D,)
            case HeadSelection(heads, is_mean, is_dense):
                if heads is not None and heads != tuple(range(part.shape[head_axis])):
                    part = part[list(heads)] if head_axis == 0 else part[:, list(heads)]  # a copy
                if is_dense and wanted.pattern is not None:
                    part = put_together(part, wanted.pattern, heads)
                if is_mean:
                    part = part.mean(axis=head_axis, keepdims=True)
        whole = part.base
        is_shared = isinstance(whole, np.ndarray) and (self.are_reused or whole.size > part.size)
        return part.copy() if is_shared or part is batch else part


def put_together(
    rows: npt.NDArray[np.float32], pattern: Pattern, heads: tuple[int, ...] | None
) -> npt.NDArray[np.float32]:
    """Return the weights (K, T, T) behind the rows (K, T, W) of a text's band or blocks.

    Args:
        rows: of the heads that are wanted.
        pattern: of all heads.
        heads: their numbers; None: all.
    """
    if isinstance(pattern, Band):
        return pattern.dense(rows)
    table = pattern if heads is None else pattern.of_heads(heads)
    return table.at(rows.shape[1]).dense(rows)


def reductions(outputs: BatchOutputs, row: int, item: Item) -> tuple[Reduced, ...]:
    """Return the reductions of an item. Equal ones are computed once and share their result."""
    results: dict[WantedReduction, Reduced] = {}
    for wanted in item.reductions:
        if wanted not in results:
            results[wanted] = reduced(outputs, row, item.num_tokens, wanted)
    return tuple(results[wanted] for wanted in item.reductions)


def reduced(outputs: BatchOutputs, row: int, num_tokens: int, wanted: WantedReduction) -> Reduced:
    """Return what becomes of weights of a text; one of its layers at a time is taken out of the batch."""
    layers = _Layers(outputs, row, num_tokens, wanted.layers)
    [result] = reduce(layers, wanted.reduction, wanted.units, is_mean_of_heads=wanted.is_mean_of_heads)
    return result


class _Layers(Sequence[npt.NDArray[np.float32]]):
    """The weights (K, T, T) of some layers of a text, each made when it is looked at."""

    def __init__(self, outputs: BatchOutputs, row: int, num_tokens: int, wanted: tuple[Wanted, ...]) -> None:
        self._outputs = outputs
        self._row = row
        self._num_tokens = num_tokens
        self._wanted = wanted

    def __len__(self) -> int:
        return len(self._wanted)

    @overload
    def __getitem__(self, index: int) -> npt.NDArray[np.float32]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[npt.NDArray[np.float32]]: ...
    def __getitem__(self, index: int | slice) -> npt.NDArray[np.float32] | Sequence[npt.NDArray[np.float32]]:
        if isinstance(index, slice):
            return _Layers(self._outputs, self._row, self._num_tokens, self._wanted[index])
        return self._outputs.part(self._row, self._num_tokens, self._wanted[index])
