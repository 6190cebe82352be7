"""Reduced attention to messages."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from attnlens.reductions import RowStatistics, SparseWeights, TopKWeights
from attnlens.tensors import fill_stacked, fill_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.tensor_pb2 import DataType as DataTypeNumber
from attnlens.v1.tensor_pb2 import Tensor
from attnlens_server.bundle import RowSum
from attnlens_server.serving.jobs import FLOAT16, DataType
from attnlens_server.serving.results import FloatArray, ReducedAttention, check_range

_Fill: TypeAlias = Callable[[Tensor, Sequence[FloatArray]], None]


def data_type_number(data_type: DataType) -> DataTypeNumber.ValueType:
    """Return the number of an element type."""
    return DataTypeNumber.DATA_TYPE_FLOAT16 if data_type == FLOAT16 else DataTypeNumber.DATA_TYPE_FLOAT32


def fill_reduced(message: pb.AttentionResult, attention: ReducedAttention, data_type: DataType) -> None:
    """Write what a reduction brought into a message that says already of what it is.

    Raises:
        InvalidFieldsError: a value is beyond the range of the chosen element type.
    """
    data, number = [part.data for part in attention.parts], data_type_number(data_type)

    def fill(tensor: Tensor, arrays: Sequence[FloatArray]) -> None:
        if attention.query.row_sum is not RowSum.ONE:  # then weights are at most 1, and sums of them T
            for array in arrays:
                check_range(array, data_type)
        fill_stacked(tensor, arrays, number)

    if tops := [each for each in data if isinstance(each, TopKWeights)]:
        _fill_top(message.top_k, tops, fill)
    elif rows := [each for each in data if isinstance(each, SparseWeights)]:
        _fill_sparse(message.sparse, SparseWeights.joined(rows), fill)
    elif found := [each for each in data if isinstance(each, RowStatistics)]:
        _fill_statistics(message.statistics, found, fill)
    else:
        _fill_maps(message, [each for each in data if isinstance(each, np.ndarray)], fill)
    if (units := attention.parts[0].unit_ids) is not None:  # those of all parts
        message.unit_ids.extend(units.tolist())
    if lost := [part.special_token_mass for part in attention.parts if part.special_token_mass is not None]:
        fill_stacked(message.special_token_mass, lost, number)


def _fill_maps(
    message: pb.AttentionResult, maps: "Sequence[FloatArray | np.typing.NDArray[np.uint8]]", fill: _Fill
) -> None:
    if maps[0].dtype == np.uint8:
        fill_stacked(message.sqrt_uint8, maps, DataTypeNumber.DATA_TYPE_UINT8)
    else:
        fill(message.dense, [np.asarray(each, np.float32) for each in maps])


def _fill_statistics(message: pb.AttentionStatistics, found: Sequence[RowStatistics], fill: _Fill) -> None:
    if received := [each.received for each in found if each.received is not None]:
        fill(message.received, received)
    if entropy := [each.entropy for each in found if each.entropy is not None]:
        fill(message.entropy, entropy)


def _fill_top(message: pb.TopKWeights, tops: Sequence[TopKWeights], fill: _Fill) -> None:
    fill_stacked(message.indices, [top.indices for top in tops], DataTypeNumber.DATA_TYPE_INT32)
    fill(message.values, [top.values for top in tops])
    fill(message.remaining_mass, [top.remaining_mass for top in tops])


def _fill_sparse(message: pb.SparseWeights, rows: SparseWeights, fill: _Fill) -> None:
    fill_tensor(message.indptr, rows.indptr, DataTypeNumber.DATA_TYPE_INT32)
    fill_tensor(message.indices, rows.indices, DataTypeNumber.DATA_TYPE_INT32)
    fill(message.values, [rows.values])
    message.values.shape[:] = rows.values.shape  # one array, of all layers
    fill(message.kept_mass, list(rows.kept_mass))
