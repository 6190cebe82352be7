"""What a reduction brings, checked.

Letters: T tokens of a text, L' and H' the layers and heads of a result, R rows, U units, n entries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attnlens.reductions import (
    AttentionReduction,
    RowStatistics,
    SparseWeights,
    SqrtUint8,
    Statistics,
    TextUnits,
    Threshold,
    TopK,
    TopKWeights,
    Units,
)
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.tensor_pb2 import DataType, Tensor
from attnlens_client.core.checks import check_finite, checked_array, wrong_reply, wrong_text
from attnlens_client.results import Array, ReducedData, Token

_INT32 = DataType.DATA_TYPE_INT32
_DATA = {Statistics: "statistics", TopK: "top_k", Threshold: "sparse", SqrtUint8: "sqrt_uint8"}


class Reading(NamedTuple):
    """The parts of an `Attention` that come of a reduction."""

    weights: Array
    reduced: ReducedData | None
    special_token_mass: Array | None
    unit_ids: Array | None


class ReductionReader:
    """Reads the results of a reduction.

    Args:
        reduction: what was asked for.
        data_type: of the arrays.
        name: of the query, for errors.
    """

    def __init__(self, reduction: AttentionReduction, data_type: DataType.ValueType, name: str) -> None:
        self._reduction = reduction
        self._data_type = data_type
        self._name = name

    def read(
        self, index: int, tokens: Sequence[Token], sizes: tuple[int, int], message: pb.AttentionResult
    ) -> Reading:
        """Read a result of text number `index`.

        Args:
            index: of the text.
            tokens: of the text.
            sizes: L' and H'.
            message: what came.

        Raises:
            BadReplyError: it is not what was asked for.
        """
        reduction, what = self._reduction, f"{self._name} of texts[{index}]"
        wanted = _DATA.get(type(reduction.form), "dense")
        found = message.WhichOneof("data")
        if found != wanted:
            raise wrong_reply(
                f"{what} is {found} instead of {wanted}: a server of an older attnlens can't reduce"
            )
        units = self._units(index, tokens, message)
        num_rows = 1 if reduction.mean_over_rows else len(reduction.rows) or units.num_units
        shape = (*sizes, num_rows)
        special_token_mass = None
        if message.HasField("special_token_mass") != (reduction.special_tokens == "drop"):
            raise wrong_text(
                index, f"has {self._name} with special tokens kept or dropped against the request"
            )
        if message.HasField("special_token_mass"):
            special_token_mass = self._array(
                message.special_token_mass, shape, f"special token mass in {what}", index
            )
        weights: Array = np.empty(0, np.float32)
        reduced: ReducedData | None = None
        match wanted:
            case "dense":
                weights = self._array(message.dense, (*shape, units.num_units), f"weights in {what}", index)
            case "sqrt_uint8":
                levels = (*shape, units.num_units)
                weights = checked_array(
                    message.sqrt_uint8, DataType.DATA_TYPE_UINT8, levels, f"levels in {what}"
                )
            case "top_k":
                reduced = self._top(message.top_k, shape, units.num_units, what, index)
            case "sparse":
                reduced = self._sparse(message.sparse, shape, units.num_units, what, index)
            case "statistics":
                reduced = self._statistics(message.statistics, shape, units.num_units, what, index)
        return Reading(weights, reduced, special_token_mass, units.of_token)

    def _units(self, index: int, tokens: Sequence[Token], message: pb.AttentionResult) -> Units:
        """Return what the tokens became, which must be what the reply says."""
        text = None
        if self._reduction.needs_text:
            text = TextUnits.of(
                [token.word_index for token in tokens],
                [token.is_special for token in tokens],
                [token.source == "second_text" for token in tokens],
            )
        units = Units.of(self._reduction, text, len(tokens))
        expected = [] if units.of_token is None else units.of_token.tolist()
        if list(message.unit_ids) != expected:
            raise wrong_text(index, f"has units in {self._name} that are not those of its tokens")
        return units

    def _array(self, tensor: Tensor, shape: tuple[int, ...], what: str, index: int) -> Array:
        array = checked_array(tensor, self._data_type, shape, what)
        check_finite(array, self._name, index)
        return array

    def _top(
        self, message: pb.TopKWeights, shape: tuple[int, ...], num_units: int, what: str, index: int
    ) -> TopKWeights:
        form = self._reduction.form
        k = min(form.k, num_units) if isinstance(form, TopK) else 0
        indices = checked_array(message.indices, _INT32, (*shape, k), f"indices in {what}")
        values = self._array(message.values, (*shape, k), f"values in {what}", index)
        remaining_mass = self._array(message.remaining_mass, shape, f"remaining mass in {what}", index)
        _check_columns(indices, num_units, what)
        if (np.diff(values, axis=-1) > 0).any() or (np.diff(np.sort(indices, axis=-1), axis=-1) == 0).any():
            raise wrong_reply(f"the weights in {what} are not in descending order, or of one column twice")
        return TopKWeights(indices, values, remaining_mass)

    def _sparse(
        self, message: pb.SparseWeights, shape: tuple[int, ...], num_units: int, what: str, index: int
    ) -> SparseWeights:
        num_rows = int(np.prod(shape))
        indptr = checked_array(message.indptr, _INT32, (num_rows + 1,), f"row starts in {what}")
        indices = checked_array(message.indices, _INT32, (None,), f"indices in {what}")
        values = self._array(message.values, indices.shape, f"values in {what}", index)
        kept_mass = self._array(message.kept_mass, shape, f"kept mass in {what}", index)
        if indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
            raise wrong_reply(f"the row starts in {what} do not fit its {len(indices)} entries")
        _check_columns(indices, num_units, what)
        in_row = np.ones(max(0, len(indices) - 1), dtype=np.bool_)  # both of two entries are
        starts = indptr[1:-1]
        in_row[starts[(starts > 0) & (starts < len(indices))] - 1] = False
        if (np.diff(indices)[in_row] <= 0).any():
            raise wrong_reply(f"the columns in {what} are not in ascending order")
        return SparseWeights(indptr, indices, values, kept_mass)

    def _statistics(
        self, message: pb.AttentionStatistics, shape: tuple[int, ...], num_units: int, what: str, index: int
    ) -> RowStatistics:
        form = self._reduction.form
        asked = form if isinstance(form, Statistics) else Statistics()
        if (message.HasField("received"), message.HasField("entropy")) != (asked.received, asked.entropy):
            raise wrong_text(index, f"has other statistics in {self._name} than those asked for")
        received = entropy = None
        if asked.received:
            received = self._array(message.received, (*shape[:2], num_units), f"received in {what}", index)
        if asked.entropy:
            entropy = self._array(message.entropy, shape, f"entropy in {what}", index)
        return RowStatistics(received, entropy)


def _check_columns(indices: Array, num_units: int, what: str) -> None:
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < num_units:
        raise wrong_reply(f"{what} has {num_units} columns and names others")


def without_layers(data: ReducedData | None) -> ReducedData | None:
    """Return the data of a result of one layer without the axis of layers."""
    match data:
        case TopKWeights():
            return TopKWeights(data.indices[0], data.values[0], data.remaining_mass[0])
        case SparseWeights():
            return SparseWeights(data.indptr, data.indices, data.values, data.kept_mass[0])
        case RowStatistics():
            return RowStatistics(
                None if data.received is None else data.received[0],
                None if data.entropy is None else data.entropy[0],
            )
    return None


def with_layers(parts: Sequence[ReducedData | None]) -> ReducedData | None:
    """Return the data of several layers with an axis of layers; the arrays are read-only."""
    data: ReducedData | None = None
    if tops := [part for part in parts if isinstance(part, TopKWeights)]:
        data = TopKWeights(
            stacked([top.indices for top in tops]),
            stacked([top.values for top in tops]),
            stacked([top.remaining_mass for top in tops]),
        )
    elif rows := [part for part in parts if isinstance(part, SparseWeights)]:
        data = SparseWeights.joined(rows)
        for array in (data.indptr, data.indices, data.values, data.kept_mass):
            array.flags.writeable = False
    elif found := [part for part in parts if isinstance(part, RowStatistics)]:
        received = [each.received for each in found if each.received is not None]
        entropy = [each.entropy for each in found if each.entropy is not None]
        data = RowStatistics(stacked(received) if received else None, stacked(entropy) if entropy else None)
    return data


def stacked(arrays: Sequence[Array]) -> Array:
    """Return arrays with an axis of layers first, read-only as those of `encode` are."""
    array: Array = np.stack(arrays)
    array.flags.writeable = False
    return array
