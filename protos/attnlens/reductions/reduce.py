"""All steps of a reduction, in their order; see `attnlens.v1.AttentionReduction`.

Letters: H heads, h 1 where heads are averaged, else H, T tokens, U units, R rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from attnlens.reductions.choices import (
    AttentionReduction,
    SqrtUint8,
    Statistics,
    Threshold,
    TopK,
    resolve_rows,
)
from attnlens.reductions.maps import (
    FloatArray,
    mean_of_heads,
    mean_of_layers,
    mean_of_rollout,
    mean_over_rows,
    rollout,
    without,
    word_level,
)
from attnlens.reductions.sparse import SparseWeights, TopKWeights, top_weights, weights_from
from attnlens.reductions.sqrt_uint8 import to_levels
from attnlens.reductions.statistics import RowStatistics, entropy, received
from attnlens.reductions.units import TextUnits, Units

Data: TypeAlias = FloatArray | npt.NDArray[np.uint8] | TopKWeights | SparseWeights | RowStatistics


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """What came of a layer, or of several together.

    Attributes:
        data: weights (h, R, U), fp32 or in 8 bits, or what else was asked for, without an axis of layers.
        special_token_mass: (h, R): what each row gave to special tokens; None: they were not dropped.
        unit_ids: (T,) int32, see `Units.of_token`; None: tokens are the units.
    """

    data: Data
    special_token_mass: FloatArray | None
    unit_ids: npt.NDArray[np.int32] | None

    @property
    def size_bytes(self) -> int:
        """What its arrays take in memory."""
        return sum(
            array.nbytes for array in (*_arrays(self.data), self.special_token_mass) if array is not None
        )


def reduce(
    layers: Sequence[FloatArray],
    reduction: AttentionReduction,
    text: TextUnits | None,
    *,
    is_mean_of_heads: bool,
) -> list[Reduced]:
    """Reduce the maps (H, T, T) of some layers of a text: one result each, or one of all of them.

    Args:
        layers: in ascending order of their numbers for a rollout. Each is looked at once, and one at a time.
        reduction: what to do.
        text: what is known of the tokens; None: nothing.
        is_mean_of_heads: average heads; a rollout always does.

    Raises:
        ValueError: the words or special tokens are needed and not known, or there are no layers to join.
        IndexError: a row is asked for that the text has not.
    """
    steps = _Steps(reduction, text, is_mean_of_heads=is_mean_of_heads or reduction.layers == "rollout")
    if reduction.joins_layers:
        return [steps.joined(layers)]
    return [steps.finished(*steps.prepared(maps)) for maps in layers]


class _Steps:
    def __init__(
        self, reduction: AttentionReduction, text: TextUnits | None, *, is_mean_of_heads: bool
    ) -> None:
        self._reduction = reduction
        self._text = text
        self._is_mean_of_heads = is_mean_of_heads
        self._lost: list[FloatArray] = []  # of each layer that is joined
        self._num_tokens = 0  # of the layers that are joined

    def prepared(self, maps: FloatArray) -> tuple[FloatArray, FloatArray | None, Units]:
        """Return the maps (h, U, U) of a layer, what rows have lost, (h, U) or None, and the units."""
        units = Units.of(self._reduction, self._text, maps.shape[-1])
        lost: FloatArray | None = None
        if units.words is not None:
            maps = word_level(maps, units.words)
        if units.dropped is not None:
            maps, lost = without(maps, units.dropped)
        if self._is_mean_of_heads:
            maps, lost = mean_of_heads(maps), None if lost is None else mean_of_heads(lost)
        return maps, lost, units

    def joined(self, layers: Sequence[FloatArray]) -> Reduced:
        """Return what becomes of all layers together."""
        reduction, self._lost = self._reduction, []
        if reduction.layers == "mean":
            maps = mean_of_layers(self._noted(layers))
        elif reduction.mean_over_rows:
            maps = mean_of_rollout(self._noted(reversed(layers)), reduction.residual)
        else:
            maps = rollout(self._noted(layers), reduction.residual)
        lost = mean_of_layers(self._lost) if self._lost else None
        return self.finished(maps, lost, Units.of(reduction, self._text, self._num_tokens))

    def _noted(self, layers: Iterable[FloatArray]) -> Iterator[FloatArray]:
        for maps in layers:
            self._num_tokens = maps.shape[-1]
            prepared, lost, _ = self.prepared(maps)
            if lost is not None:
                self._lost.append(lost)
            yield prepared

    def finished(self, maps: FloatArray, lost: FloatArray | None, units: Units) -> Reduced:
        """Take the steps after those that make maps (h, U, U) of maps."""
        reduction = self._reduction
        if reduction.mean_over_rows:
            maps = maps if reduction.layers == "rollout" else mean_over_rows(maps)  # (h, 1, U)
            if lost is not None:
                lost = mean_over_rows(lost[:, :, np.newaxis])[:, :, 0]  # (h, 1)
        data: Data
        rows = list(resolve_rows(reduction.rows, units.num_units)) if reduction.rows else None
        chosen = maps if rows is None else maps[:, rows]  # (h, R, U)
        if lost is not None and rows is not None:
            lost = lost[:, rows]
        match reduction.form:
            case Statistics() as asked:
                data = RowStatistics(
                    received(maps, None if asked.all_rows else units.is_special) if asked.received else None,
                    entropy(chosen) if asked.entropy else None,
                )
            case TopK(k):
                data = top_weights(chosen, k)
            case Threshold(threshold):
                data = weights_from(chosen, threshold)
            case SqrtUint8():
                data = to_levels(chosen)
            case None:
                data = chosen
        return Reduced(data, lost, units.of_token)


def _arrays(data: Data) -> "tuple[npt.NDArray[np.generic] | None, ...]":
    match data:
        case TopKWeights():
            return data.indices, data.values, data.remaining_mass
        case SparseWeights():
            return data.indptr, data.indices, data.values, data.kept_mass
        case RowStatistics():
            return data.received, data.entropy
    return (data,)
