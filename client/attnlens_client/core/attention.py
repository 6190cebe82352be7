"""Conversion of attention results to arrays.

Shapes: T tokens, L' and H' requested layers and heads, R rows, U units, C blocks of a text, S slots of a
    block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attnlens.patterns import Band, Blocks
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
from attnlens.v1.manifest_pb2 import OutputRole, RowSum
from attnlens.v1.tensor_pb2 import DataType, Tensor
from attnlens_client.arguments import AttentionQuery
from attnlens_client.core.replies import Consistency, check_finite, checked_array, invalid_reply, invalid_text
from attnlens_client.core.requests import name_of
from attnlens_client.results import Array, Attention, LayerPattern, ReducedData, Token

MAX_SIZE = 1 << 24


def read_patterns(
    message: pb.AttentionResult, sizes: tuple[int, int, int], name: str
) -> tuple[LayerPattern, ...]:
    """Return the pattern of each layer of a band or of blocks.

    Args:
        message: Result with a band or blocks.
        sizes: Numbers of layers, heads and tokens.
        name: Name of the result in errors.

    Raises:
        BadReplyError: The pattern is invalid.
    """
    num_layers, num_heads, num_tokens = sizes
    if message.WhichOneof("data") == "band":
        band = message.band_pattern
        if not 0 <= band.window_radius <= MAX_SIZE or not 0 <= band.num_global_tokens <= MAX_SIZE:
            raise invalid_reply(
                f"{name} has a window radius of {band.window_radius}, {band.num_global_tokens} global tokens"
            )
        return (Band(band.window_radius, band.num_global_tokens),) * num_layers
    size = message.block_pattern.block_size
    if size < 1:
        raise invalid_reply(f"{name} has blocks of {size} tokens")
    num_blocks = -(-num_tokens // size)
    key_blocks = checked_array(
        message.block_pattern.key_blocks,
        DataType.DATA_TYPE_INT32,
        (num_layers, num_heads, num_blocks, None),
        f"key blocks of {name}",
    )
    if key_blocks.size and not -1 <= int(key_blocks.min()) <= int(key_blocks.max()) < num_blocks:
        raise invalid_reply(f"{name} has {num_blocks} blocks, but key blocks out of range")
    return tuple(Blocks(size, layer) for layer in key_blocks)


_INT32 = DataType.DATA_TYPE_INT32
_DATA = {Statistics: "statistics", TopK: "top_k", Threshold: "sparse", SqrtUint8: "sqrt_uint8"}


class Reading(NamedTuple):
    """Fields of `Attention` with a reduction."""

    weights: Array
    reduced: ReducedData | None
    special_token_mass: Array | None
    unit_ids: Array | None


class ReductionReader:
    """Reads the results of a reduction.

    Args:
        reduction: Requested reduction.
        data_type: Data type of the arrays.
        name: Name of the query in errors.
    """

    def __init__(self, reduction: AttentionReduction, data_type: DataType.ValueType, name: str) -> None:
        self._reduction = reduction
        self._data_type = data_type
        self._name = name

    def read(
        self, index: int, tokens: Sequence[Token], sizes: tuple[int, int], message: pb.AttentionResult
    ) -> Reading:
        """Return the result for a text.

        Args:
            index: Index of the text.
            tokens: Tokens of the text.
            sizes: L' and H'.
            message: Result.

        Raises:
            BadReplyError: The result is invalid.
        """
        reduction, name = self._reduction, f"{self._name} of texts[{index}]"
        expected = _DATA.get(type(reduction.form), "dense")
        actual = message.WhichOneof("data")
        if actual != expected:
            raise invalid_reply(
                f"{name} is {actual}, expected {expected}: the server may be too old for reductions"
            )
        units = self._units(index, tokens, message)
        num_rows = 1 if reduction.mean_over_rows else len(reduction.rows) or units.num_units
        shape = (*sizes, num_rows)
        special_token_mass = None
        if message.HasField("special_token_mass") != (reduction.special_tokens == "drop"):
            raise invalid_text(
                index,
                f"has {self._name} with special tokens that are kept or dropped contrary to the request",
            )
        if message.HasField("special_token_mass"):
            special_token_mass = self._array(
                message.special_token_mass, shape, f"special token mass of {name}", index
            )
        weights: Array = np.empty(0, np.float32)
        reduced: ReducedData | None = None
        match expected:
            case "dense":
                weights = self._array(message.dense, (*shape, units.num_units), f"weights of {name}", index)
            case "sqrt_uint8":
                levels = (*shape, units.num_units)
                weights = checked_array(
                    message.sqrt_uint8, DataType.DATA_TYPE_UINT8, levels, f"levels of {name}"
                )
            case "top_k":
                reduced = self._top_k(message.top_k, shape, units.num_units, name, index)
            case "sparse":
                reduced = self._sparse(message.sparse, shape, units.num_units, name, index)
            case "statistics":
                reduced = self._statistics(message.statistics, shape, units.num_units, name, index)
        return Reading(weights, reduced, special_token_mass, units.of_token)

    def _units(self, index: int, tokens: Sequence[Token], message: pb.AttentionResult) -> Units:
        """Return the units of the tokens, which must equal the reply's units."""
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
            raise invalid_text(index, f"has unit ids in {self._name} that do not match its tokens")
        return units

    def _array(self, tensor: Tensor, shape: tuple[int, ...], name: str, index: int) -> Array:
        array = checked_array(tensor, self._data_type, shape, name)
        check_finite(array, self._name, index)
        return array

    def _top_k(
        self, message: pb.TopKWeights, shape: tuple[int, ...], num_units: int, name: str, index: int
    ) -> TopKWeights:
        form = self._reduction.form
        k = min(form.k, num_units) if isinstance(form, TopK) else 0
        indices = checked_array(message.indices, _INT32, (*shape, k), f"indices of {name}")
        values = self._array(message.values, (*shape, k), f"values of {name}", index)
        remaining_mass = self._array(message.remaining_mass, shape, f"remaining mass of {name}", index)
        _check_columns(indices, num_units, name)
        if (np.diff(values, axis=-1) > 0).any() or (np.diff(np.sort(indices, axis=-1), axis=-1) == 0).any():
            raise invalid_reply(
                f"the weights of {name} are not in descending order, or have repeated columns"
            )
        return TopKWeights(indices, values, remaining_mass)

    def _sparse(
        self, message: pb.SparseWeights, shape: tuple[int, ...], num_units: int, name: str, index: int
    ) -> SparseWeights:
        num_rows = int(np.prod(shape))
        indptr = checked_array(message.indptr, _INT32, (num_rows + 1,), f"indptr of {name}")
        indices = checked_array(message.indices, _INT32, (None,), f"indices of {name}")
        values = self._array(message.values, indices.shape, f"values of {name}", index)
        kept_mass = self._array(message.kept_mass, shape, f"kept mass of {name}", index)
        if indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
            raise invalid_reply(f"indptr of {name} does not fit its {len(indices)} entries")
        _check_columns(indices, num_units, name)
        same_row = np.ones(
            max(0, len(indices) - 1), dtype=np.bool_
        )  # whether consecutive entries are in the same row
        starts = indptr[1:-1]
        same_row[starts[(starts > 0) & (starts < len(indices))] - 1] = False
        if (np.diff(indices)[same_row] <= 0).any():
            raise invalid_reply(f"the columns of {name} are not in ascending order")
        return SparseWeights(indptr, indices, values, kept_mass)

    def _statistics(
        self, message: pb.AttentionStatistics, shape: tuple[int, ...], num_units: int, name: str, index: int
    ) -> RowStatistics:
        form = self._reduction.form
        requested = form if isinstance(form, Statistics) else Statistics()
        present = (message.HasField("received"), message.HasField("entropy"))
        if present != (requested.received, requested.entropy):
            raise invalid_text(index, f"has statistics in {self._name} that differ from the request")
        received = entropy = None
        if requested.received:
            received = self._array(message.received, (*shape[:2], num_units), f"received of {name}", index)
        if requested.entropy:
            entropy = self._array(message.entropy, shape, f"entropy of {name}", index)
        return RowStatistics(received, entropy)


def _check_columns(indices: Array, num_units: int, name: str) -> None:
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < num_units:
        raise invalid_reply(f"{name} has {num_units} columns, but indices out of range")


def without_layers(data: ReducedData | None) -> ReducedData | None:
    """Return the data of one layer without the axis of layers."""
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
    """Return the data of several layers with an axis of layers. Arrays are read-only."""
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
    """Return arrays stacked along a new first axis, read-only like all arrays of `encode`."""
    array: Array = np.stack(arrays)
    array.flags.writeable = False
    return array


class QueryReader:
    """Reads the results of one query.

    Args:
        number: Index of the query in the request.
        query: Requested query.
        data_type: Data type of the arrays.
        consistency: Consistency checks of the method.
    """

    def __init__(
        self, number: int, query: AttentionQuery, data_type: DataType.ValueType, consistency: Consistency
    ) -> None:
        self.query = query
        self._number = number
        self._name = f"attention[{number}]"
        self._data_type = data_type
        self._consistency = consistency
        self._reduction = (
            None if query.reduction is None else ReductionReader(query.reduction, data_type, self._name)
        )

    @property
    def joins_layers(self) -> bool:
        """Whether the reduction joins all layers."""
        return self.query.reduction is not None and self.query.reduction.joins_layers

    def read(self, index: int, tokens: Sequence[Token], message: pb.AttentionResult) -> Attention:
        """Return the result for a text. Its layers are not checked.

        Raises:
            BadReplyError: The result is invalid.
        """
        role = name_of(OutputRole.DESCRIPTOR, message.role)
        view = name_of(pb.AttentionView.DESCRIPTOR, message.view)
        if (message.query_index, role, view) != (self._number, self.query.role, self.query.view):
            raise invalid_text(
                index, f"has {role}, {view}, of query {message.query_index}, expected {self._name}"
            )
        self._check_heads(index, message.heads)
        name = f"{self._name} of texts[{index}]"
        row_sum = name_of(RowSum.DESCRIPTOR, message.row_sum)
        self._consistency.check(f"row sum of {self._name}", row_sum, f"texts[{index}]")
        num_tokens, num_layers = len(tokens), 1 if self.joins_layers else len(message.layers)
        num_heads = 1 if self.query.view == "head_mean" else len(message.heads)
        if self._reduction is not None:
            reading = self._reduction.read(index, tokens, (num_layers, num_heads), message)
            return Attention(
                query=self.query,
                layers=tuple(message.layers),
                heads=tuple(message.heads),
                layout=message.WhichOneof("data") or "",
                row_sum=row_sum,
                weights=reading.weights,
                reduced=reading.reduced,
                special_token_mass=reading.special_token_mass,
                unit_ids=reading.unit_ids,
            )
        layout = message.WhichOneof("data")
        patterns: tuple[LayerPattern, ...] = ()
        if layout == "dense":
            shape = (num_layers, num_heads, num_tokens, num_tokens)
            weights = checked_array(message.dense, self._data_type, shape, f"weights of {name}")
        elif layout == "per_token":
            shape_per_token = (num_layers, num_tokens, num_heads)
            weights = checked_array(message.per_token, self._data_type, shape_per_token, f"rows of {name}")
        elif layout is not None:
            sizes = (num_layers, num_heads, num_tokens)
            patterns = read_patterns(message, sizes, name)
            tensor, width = getattr(message, layout), patterns[0].width if patterns else None
            weights = checked_array(tensor, self._data_type, (*sizes, width), f"rows of {name}")
        else:
            raise invalid_reply(f"{name} has an unknown layout: upgrade the client")
        self._consistency.check(f"layout of {self._name}", layout, f"texts[{index}]")
        check_finite(weights, self._name, index)
        return Attention(
            query=self.query,
            layers=tuple(message.layers),
            heads=tuple(message.heads),
            layout=layout,
            row_sum=row_sum,
            weights=weights,
            patterns=patterns,
        )

    def check_layer(self, index: int, place: int, layer: int, previous: int) -> None:
        """Check the layer at `place`. `previous` is the layer before it, or -1."""
        requested = self.query.layers
        if requested is None:
            if layer <= previous:
                raise invalid_text(index, f"has layer {layer} after layer {previous} in {self._name}")
        elif place >= len(requested):
            raise invalid_text(index, f"has more than {len(requested)} layers in {self._name}")
        else:
            self._check_number("layers", "layers", requested[place], layer, index)

    def check_layers(self, index: int, layers: Sequence[int]) -> None:
        """Check all layers of a text."""
        for place, (layer, previous) in enumerate(zip(layers, (-1, *layers), strict=False)):
            self.check_layer(index, place, layer, previous)
        if self.query.layers is not None and len(layers) != len(self.query.layers):
            raise invalid_text(
                index, f"has {len(layers)} layers in {self._name}, expected {len(self.query.layers)}"
            )
        if not layers:
            raise invalid_text(index, f"has no layers in {self._name}")
        self._consistency.check(f"layers in {self._name}", tuple(layers), f"texts[{index}]")

    def _check_heads(self, index: int, heads: Sequence[int]) -> None:
        requested = range(len(heads)) if self.query.heads is None else self.query.heads
        if not heads:
            raise invalid_text(index, f"has no heads in {self._name}")
        if len(heads) != len(requested):
            problem = f"has {len(heads)} heads in {self._name}, expected {len(requested)}"
            raise invalid_text(index, problem)
        if self.query.heads is None:
            self._consistency.check(f"number of heads in {self._name}", len(heads), f"texts[{index}]")
        for expected, head in zip(requested, heads, strict=True):
            self._check_number("heads", f"heads in {self._name}", expected, head, index)

    def _check_number(self, kind: str, noun: str, expected: int, number: int, index: int) -> None:
        """Check a layer or a head. A negative `expected` implies a count, which must be consistent."""
        if expected < 0 <= number:
            self._consistency.check(f"number of {noun}", number - expected, f"texts[{index}]")
        elif number < 0 or number != expected:
            raise invalid_text(index, f"has {number} among the {kind} of {self._name}, expected {expected}")
