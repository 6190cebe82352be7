"""Conversion of arrays to tensors and back, compared with `struct`."""

import struct
from typing import Any

import numpy as np
import pytest

from attnlens.tensors import fill_stacked, from_tensor, to_tensor
from attnlens.v1.tensor_pb2 import DataType, Tensor

FORMATS = {DataType.DATA_TYPE_FLOAT32: "f", DataType.DATA_TYPE_FLOAT16: "e"}


def _bytes(array: np.ndarray[Any, Any], data_type: DataType.ValueType) -> bytes:
    """Pack the elements in row-major order, little-endian."""
    numbers = [float(array[index]) for index in np.ndindex(array.shape)]
    return struct.pack(f"<{len(numbers)}{FORMATS[data_type]}", *numbers)


def test_known_values_have_known_bytes() -> None:
    numbers = np.array([[1.0, -2.0, 0.5]])
    tensor = to_tensor(numbers, DataType.DATA_TYPE_FLOAT32)
    assert tensor.data.hex() == "0000803f000000c00000003f"
    assert to_tensor(numbers, DataType.DATA_TYPE_FLOAT16).data.hex() == "003c00c00038"
    assert (list(tensor.shape), tensor.data_type) == ([1, 3], DataType.DATA_TYPE_FLOAT32)
    indices = to_tensor(np.array([[1, -2], [70_000, 0]]), DataType.DATA_TYPE_INT32)
    assert indices.data.hex() == "01000000feffffff7011010000000000"
    assert from_tensor(indices).tolist() == [[1, -2], [70_000, 0]]


@pytest.mark.parametrize("data_type", FORMATS)
def test_arrays_are_packed_in_row_major_order_from_any_memory_layout(data_type: DataType.ValueType) -> None:
    whole = np.random.default_rng(0).random((3, 4, 5, 7), dtype=np.float32)
    arrays = [whole[0], whole[1].copy(order="F"), whole[2][:, ::-1]]
    stacked = Tensor()
    fill_stacked(stacked, arrays, data_type)
    assert stacked.data == b"".join(_bytes(array, data_type) for array in arrays)
    assert (list(stacked.shape), stacked.data_type) == ([3, 4, 5, 7], data_type)
    for array in arrays:
        assert to_tensor(array, data_type).data == _bytes(array, data_type)


@pytest.mark.parametrize("data_type", FORMATS)
def test_bytes_are_read_in_row_major_order(data_type: DataType.ValueType) -> None:
    data = struct.pack(f"<6{FORMATS[data_type]}", *range(6))
    array = from_tensor(Tensor(data_type=data_type, shape=[2, 3], data=data))
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not array.flags.writeable


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ([2, 3], 20),
        ([2, 3], 28),
        ([2, -1], 24),
        ([-1], 24),
        ([-2, -3], 24),
        ([], 0),
        ([2**62, 4], 0),
        ([2**62, 2**62], 24),
    ],
)
def test_bytes_that_do_not_match_the_shape_are_rejected(shape: list[int], size: int) -> None:
    tensor = Tensor(data_type=DataType.DATA_TYPE_FLOAT32, shape=shape, data=bytes(size))
    with pytest.raises(ValueError, match=f"{size} bytes of float32 do not fill the shape"):
        from_tensor(tensor)


def test_types_that_messages_do_not_allow_are_rejected() -> None:
    with pytest.raises(ValueError, match="is not allowed in messages"):
        from_tensor(Tensor(data_type=DataType.DATA_TYPE_INT64, shape=[1], data=bytes(8)))
