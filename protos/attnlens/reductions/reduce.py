"""Runs the steps of a reduction, in the order defined by `attnlens.v1.AttentionReduction`.

Dimension names: H heads, h is 1 if heads are averaged and H otherwise, T tokens, U units, R rows.
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
from attnlens.reductions.forms import (
    RowStatistics,
    SparseWeights,
    TopKWeights,
    entropy,
    received,
    to_levels,
    top_weights,
    weights_from,
)
from attnlens.reductions.maps import (
    FloatArray,
    drop_units,
    mean_of_heads,
    mean_of_layers,
    mean_of_rollout,
    mean_over_rows,
    rollout,
    word_level,
)
from attnlens.reductions.units import TextUnits, Units

Data: TypeAlias = FloatArray | npt.NDArray[np.uint8] | TopKWeights | SparseWeights | RowStatistics


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """Result of a reduction for one layer, or for all combined layers.

    Attributes:
        data: Weights (h, R, U) in fp32 or 8 bits, or another form without a layer axis.
        special_token_mass: (h, R): Weight that each row assigned to dropped special tokens. None if they were
            kept.
        unit_ids: (T,) int32, see `Units.of_token`. None if the units are the tokens.
    """

    data: Data
    special_token_mass: FloatArray | None
    unit_ids: npt.NDArray[np.int32] | None

    @property
    def size_bytes(self) -> int:
        """Total size of `data` and `special_token_mass`."""
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
    """Reduce the maps (H, T, T) of a text's layers.

    Args:
        layers: Maps of each layer, in ascending order of layers for a rollout. They are read once, one at a
            time.
        reduction: Reduction to apply.
        text: Words and special tokens of the text, or None if unknown.
        is_mean_of_heads: Whether to average heads. A rollout always does.

    Returns:
        One result per layer, or a single result if layers are combined.

    Raises:
        ValueError: Words or special tokens are needed but unknown, or `layers` is empty but must be combined.
        IndexError: A selected row does not exist.
    """
    steps = _Steps(reduction, text, is_mean_of_heads=is_mean_of_heads or reduction.layers == "rollout")
    if reduction.joins_layers:
        return [steps.combine(layers)]
    return [steps.finish(*steps.prepare(maps)) for maps in layers]


class _Steps:
    def __init__(
        self, reduction: AttentionReduction, text: TextUnits | None, *, is_mean_of_heads: bool
    ) -> None:
        self._reduction = reduction
        self._text = text
        self._is_mean_of_heads = is_mean_of_heads
        self._masses: list[FloatArray] = []  # special token mass of each combined layer
        self._num_tokens = 0  # tokens in the combined layers

    def prepare(self, maps: FloatArray) -> tuple[FloatArray, FloatArray | None, Units]:
        """Reduce one layer to maps (h, U, U).

        Returns:
            The maps, their special token mass (h, U) or None, and the units.
        """
        units = Units.of(self._reduction, self._text, maps.shape[-1])
        mass: FloatArray | None = None
        if units.words is not None:
            maps = word_level(maps, units.words)
        if units.dropped is not None:
            maps, mass = drop_units(maps, units.dropped)
        if self._is_mean_of_heads:
            maps, mass = mean_of_heads(maps), None if mass is None else mean_of_heads(mass)
        return maps, mass, units

    def combine(self, layers: Sequence[FloatArray]) -> Reduced:
        """Return the mean or rollout of all layers."""
        reduction, self._masses = self._reduction, []
        if reduction.layers == "mean":
            maps = mean_of_layers(self._prepare_all(layers))
        elif reduction.mean_over_rows:
            maps = mean_of_rollout(self._prepare_all(reversed(layers)), reduction.residual)
        else:
            maps = rollout(self._prepare_all(layers), reduction.residual)
        mass = mean_of_layers(self._masses) if self._masses else None
        return self.finish(maps, mass, Units.of(reduction, self._text, self._num_tokens))

    def _prepare_all(self, layers: Iterable[FloatArray]) -> Iterator[FloatArray]:
        for maps in layers:
            self._num_tokens = maps.shape[-1]
            prepared, mass, _ = self.prepare(maps)
            if mass is not None:
                self._masses.append(mass)
            yield prepared

    def finish(self, maps: FloatArray, mass: FloatArray | None, units: Units) -> Reduced:
        """Average and select rows of maps (h, U, U), and convert them to the requested form."""
        reduction = self._reduction
        if reduction.mean_over_rows:
            maps = maps if reduction.layers == "rollout" else mean_over_rows(maps)  # (h, 1, U)
            if mass is not None:
                mass = mean_over_rows(mass[:, :, np.newaxis])[:, :, 0]  # (h, 1)
        data: Data
        rows = list(resolve_rows(reduction.rows, units.num_units)) if reduction.rows else None
        selected = maps if rows is None else maps[:, rows]  # (h, R, U)
        if mass is not None and rows is not None:
            mass = mass[:, rows]
        match reduction.form:
            case Statistics() as form:
                data = RowStatistics(
                    received(maps, None if form.all_rows else units.is_special) if form.received else None,
                    entropy(selected) if form.entropy else None,
                )
            case TopK(k):
                data = top_weights(selected, k)
            case Threshold(threshold):
                data = weights_from(selected, threshold)
            case SqrtUint8():
                data = to_levels(selected)
            case None:
                data = selected
        return Reduced(data, mass, units.of_token)


def _arrays(data: Data) -> "tuple[npt.NDArray[np.generic] | None, ...]":
    match data:
        case TopKWeights():
            return data.indices, data.values, data.remaining_mass
        case SparseWeights():
            return data.indptr, data.indices, data.values, data.kept_mass
        case RowStatistics():
            return data.received, data.entropy
    return (data,)
