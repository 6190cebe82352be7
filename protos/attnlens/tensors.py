"""numpy arrays to `attnlens.v1.Tensor` and back: shape, element type, little-endian bytes."""

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
}


def numpy_dtype(data_type: DataType.ValueType) -> np.dtype[Any]:
    """Return the little-endian numpy dtype; unspecified means float32.

    Raises:
        ValueError: the type is not one that goes over the wire.
    """
    if data_type not in _NUMPY_DTYPES:
        raise ValueError(f"data type {data_type} does not go over the wire")
    return _NUMPY_DTYPES[data_type]


def to_tensor(array: npt.NDArray[Any], data_type: DataType.ValueType) -> Tensor:
    """Convert `array` to `data_type` and pack it."""
    tensor = Tensor()
    fill_tensor(tensor, array, data_type)
    return tensor


def fill_tensor(tensor: Tensor, array: npt.NDArray[Any], data_type: DataType.ValueType) -> None:
    """Pack into a tensor in its place: a message that is put into another one is copied."""
    contiguous = np.ascontiguousarray(array, dtype=numpy_dtype(data_type))
    _fill(tensor, array.shape, contiguous.tobytes(), data_type)


def fill_stacked(tensor: Tensor, arrays: Sequence[npt.NDArray[Any]], data_type: DataType.ValueType) -> None:
    """Pack N arrays of one shape as one array (N, ...), without making it."""
    dtype = numpy_dtype(data_type)
    data = b"".join(np.ascontiguousarray(each, dtype=dtype).data for each in arrays)
    _fill(tensor, (len(arrays), *arrays[0].shape), data, data_type)


def _fill(tensor: Tensor, shape: tuple[int, ...], data: bytes, data_type: DataType.ValueType) -> None:
    tensor.data_type = data_type or DataType.DATA_TYPE_FLOAT32
    tensor.shape[:] = shape
    tensor.data = data


def from_tensor(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a read-only view of the tensor's bytes in its own shape and element type.

    Raises:
        ValueError: the bytes do not fill the shape, or the type is not one that goes over the wire.
    """
    dtype, shape = numpy_dtype(tensor.data_type), tuple(tensor.shape)
    # numpy would take -1 for "as many as there are".
    if any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != len(tensor.data):
        raise ValueError(f"{len(tensor.data)} bytes of {dtype} do not fill the shape {shape}")
    return np.frombuffer(tensor.data, dtype).reshape(shape)
