"""Conversion between NumPy arrays and `attnlens.v1.Tensor` messages."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens.v1.tensor_pb2 import DataType, Tensor

_NUMPY_DTYPES: dict[DataType.ValueType, np.dtype[Any]] = {
    DataType.DATA_TYPE_UNSPECIFIED: np.dtype("<f4"),
    DataType.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    DataType.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    DataType.DATA_TYPE_INT32: np.dtype("<i4"),
    DataType.DATA_TYPE_UINT8: np.dtype("u1"),
    DataType.DATA_TYPE_INT8: np.dtype("i1"),
}


def numpy_dtype(data_type: DataType.ValueType) -> np.dtype[Any]:
    """Return the little-endian NumPy dtype. DATA_TYPE_UNSPECIFIED means float32.

    Raises:
        ValueError: The type is not allowed in messages.
    """
    if data_type not in _NUMPY_DTYPES:
        raise ValueError(f"data type {data_type} is not allowed in messages")
    return _NUMPY_DTYPES[data_type]


def to_tensor(array: npt.NDArray[Any], data_type: DataType.ValueType) -> Tensor:
    """Return a message with the elements of `array`, converted to `data_type`."""
    tensor = Tensor()
    fill_tensor(tensor, array, data_type)
    return tensor


def fill_tensor(tensor: Tensor, array: npt.NDArray[Any], data_type: DataType.ValueType) -> None:
    """Fill an existing message, which avoids the copy made by assigning the result of `to_tensor`."""
    contiguous = np.ascontiguousarray(array, dtype=numpy_dtype(data_type))
    _fill(tensor, array.shape, contiguous.tobytes(), data_type)


def fill_stacked(tensor: Tensor, arrays: Sequence[npt.NDArray[Any]], data_type: DataType.ValueType) -> None:
    """Fill an existing message with N arrays of equal shape, as one tensor (N, ...)."""
    dtype = numpy_dtype(data_type)
    data = b"".join(np.ascontiguousarray(array, dtype=dtype).data for array in arrays)
    _fill(tensor, (len(arrays), *arrays[0].shape), data, data_type)


def _fill(tensor: Tensor, shape: tuple[int, ...], data: bytes, data_type: DataType.ValueType) -> None:
    tensor.data_type = data_type or DataType.DATA_TYPE_FLOAT32
    tensor.shape[:] = shape
    tensor.data = data


def from_tensor(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a read-only array that shares the message's memory.

    Raises:
        ValueError: The data does not match the shape, or the type is not allowed in messages.
    """
    dtype, shape = numpy_dtype(tensor.data_type), tuple(tensor.shape)
    # NumPy would infer a length of -1.
    if any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != len(tensor.data):
        raise ValueError(f"{len(tensor.data)} bytes of {dtype} do not fill the shape {shape}")
    return np.frombuffer(tensor.data, dtype).reshape(shape)
