"""Elements of tensors in requests: lengths are checked before anything is allocated.

Shapes: B texts, T tokens with padding.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from attnlens.oip import open_inference_pb2 as pb
from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.grpc_api.requests import copy_numbers
from attnlens_server.oip.models import BYTES, INT32, INT64

InputTensor = pb.ModelInferRequest.InferInputTensor
IntArray = npt.NDArray[np.integer]

MAX_QUOTED_CHARS = 40
_LENGTH_BYTES = 4


def invalid(field: str, problem: str) -> InvalidFieldsError:
    """Return an error for one field."""
    return InvalidFieldsError([FieldViolation(field, problem)])


def quoted(value: object) -> str:
    """Return the start of a client's value, for a message."""
    return repr(value)[:MAX_QUOTED_CHARS]


def read_texts(field: str, tensor: InputTensor, raw: bytes | None, max_texts: int) -> list[str]:
    """Return the texts of a tensor [B] or [B, 1].

    Args:
        field: Name of the tensor in messages.
        tensor: The tensor.
        raw: Its entry of raw_input_contents. If None, the elements are in `contents`.
        max_texts: Maximum B.

    Raises:
        InvalidFieldsError: Type, shape or elements are invalid.
    """
    shape = tensor.shape
    if tensor.datatype != BYTES:
        raise invalid(field, f"has the datatype {quoted(tensor.datatype)}: use BYTES")
    if len(shape) not in (1, 2) or shape[0] < 0 or (len(shape) == 2 and shape[1] != 1):  # noqa: PLR2004
        raise invalid(field, f"has the shape {_format(shape)}: use [n] or [n, 1]")
    count = shape[0]
    if count > max_texts:
        raise invalid(field, f"has {count} texts, but the limit is {max_texts}: send several requests")
    encoded = tensor.contents.bytes_contents if raw is None else list(_elements(field, raw, count))
    _check_count(field, len(encoded), shape, "contents.bytes_contents")
    texts = []
    for index, element in enumerate(encoded):
        try:
            texts.append(element.decode())
        except UnicodeDecodeError as error:
            raise invalid(f"{field}[{index}]", f"is not UTF-8 at byte {error.start}: send UTF-8") from None
    return texts


def _elements(field: str, raw: bytes, count: int) -> Iterator[bytes]:
    position = 0
    for index in range(count):
        start = position + _LENGTH_BYTES
        position = start + int.from_bytes(raw[position:start], "little")
        if position > len(raw):
            problem = f"has {len(raw)} bytes of data, which end within element {index} of {count}"
            raise invalid(field, f"{problem}: send each length as 4 bytes, and then the element")
        yield raw[start:position]
    if position < len(raw):
        problem = f"has {len(raw) - position} bytes of data after the last of {count} elements"
        raise invalid(field, f"{problem}: correct the shape")


def read_integers(field: str, tensor: InputTensor, raw: bytes | None, max_texts: int) -> IntArray:
    """Return the elements of a tensor (B, T). Arguments and errors are those of `read_texts`."""
    shape = tensor.shape
    if tensor.datatype not in (INT32, INT64):
        raise invalid(field, f"has the datatype {quoted(tensor.datatype)}: use INT64 or INT32")
    if len(shape) != 2 or min(shape) < 1:  # noqa: PLR2004
        raise invalid(field, f"has the shape {_format(shape)}: use [texts, tokens]")
    if shape[0] > max_texts:
        raise invalid(field, f"has {shape[0]} texts, but the limit is {max_texts}: send several requests")
    dtype = np.dtype("<i8" if tensor.datatype == INT64 else "<i4")
    if raw is not None:
        needed = shape[0] * shape[1] * dtype.itemsize
        if len(raw) != needed:
            problem = f"has {len(raw)} bytes of data, but {tensor.datatype} {_format(shape)} has {needed}"
            raise invalid(field, f"{problem}: correct the shape or the data")
        return np.frombuffer(raw, dtype).reshape(shape)
    is_long = tensor.datatype == INT64
    numbers = tensor.contents.int64_contents if is_long else tensor.contents.int_contents
    _check_count(field, len(numbers), shape, f"contents.{'int64' if is_long else 'int'}_contents")
    return np.frombuffer(copy_numbers(numbers, "q" if is_long else "i"), dtype.newbyteorder("=")).reshape(
        shape
    )


def _check_count(field: str, count: int, shape: Sequence[int], contents: str) -> None:
    if count != (needed := int(np.prod([int(size) for size in shape], dtype=object))):
        problem = f"has {count} elements in {contents}, but the shape {_format(shape)} has {needed}"
        raise invalid(field, f"{problem}: correct the shape or the data")


def _format(shape: Sequence[int]) -> str:
    sizes = ", ".join(map(str, shape[:4]))
    return f"[{sizes}{', ...' if len(shape) > 4 else ''}]"  # noqa: PLR2004
