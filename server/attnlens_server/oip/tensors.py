"""Elements of input tensors. Sizes are checked before anything is allocated.

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
_LENGTH_BYTES = 4  # before each element of BYTES


def invalid(field: str, problem: str) -> InvalidFieldsError:
    """Return an error for one field."""
    return InvalidFieldsError([FieldViolation(field, problem)])


def quoted(value: str) -> str:
    """Return the start of a client's value, for a message."""
    return repr(value[:MAX_QUOTED_CHARS])


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
    if tensor.datatype != BYTES or tensor.shape[1:] not in ([], [1]):
        raise invalid(field, f"is {_described(tensor)}: use BYTES [n] or [n, 1]")
    _check_batch(field, tensor, max_texts)
    count, elements = tensor.shape[0], tensor.contents.bytes_contents
    encoded = elements if raw is None else list(_elements(field, raw, count))
    _check_size(field, tensor, len(encoded), count, "elements in contents.bytes_contents")
    texts = []
    for index, element in enumerate(encoded):
        try:
            texts.append(element.decode())
        except UnicodeDecodeError as error:
            raise invalid(f"{field}[{index}]", f"is not UTF-8 at byte {error.start}: send UTF-8") from None
    return texts


def read_integers(field: str, tensor: InputTensor, raw: bytes | None, max_texts: int) -> IntArray:
    """Return the elements of a tensor (B, T). For arguments and errors, see `read_texts`."""
    shape, is_long = tuple(tensor.shape), tensor.datatype == INT64
    if tensor.datatype not in (INT32, INT64) or len(shape) != 2 or shape[1] < 1:  # noqa: PLR2004
        raise invalid(field, f"is {_described(tensor)}: use INT64 or INT32 [texts, tokens]")
    _check_batch(field, tensor, max_texts)
    count, dtype = shape[0] * shape[1], np.dtype("<i8" if is_long else "<i4")
    if raw is not None:
        _check_size(field, tensor, len(raw), count * dtype.itemsize, "bytes of data")
        return np.frombuffer(raw, dtype).reshape(shape)
    name = "int64_contents" if is_long else "int_contents"
    numbers: Sequence[int] = getattr(tensor.contents, name)
    _check_size(field, tensor, len(numbers), count, f"elements in contents.{name}")
    return np.array(copy_numbers(numbers, "q" if is_long else "i")).reshape(shape)


def _elements(field: str, raw: bytes, count: int) -> Iterator[bytes]:
    """Yield the elements of a BYTES tensor, which each follow their length."""
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
        raise invalid(field, f"{problem}: correct the shape or the data")


def _check_batch(field: str, tensor: InputTensor, max_texts: int) -> None:
    if not tensor.shape or not 1 <= tensor.shape[0] <= max_texts:
        remedy = f"send 1 to {max_texts} texts per request"
        raise invalid(field, f"is {_described(tensor)}: {remedy}")


def _check_size(field: str, tensor: InputTensor, size: int, needed: int, unit: str) -> None:
    if size != needed:
        problem = f"has {size} {unit}, but {_described(tensor)} has {needed}"
        raise invalid(field, f"{problem}: correct the shape or the data")


def _described(tensor: InputTensor) -> str:
    sizes = ", ".join(map(str, tensor.shape[:4]))
    return f"{tensor.datatype[:MAX_QUOTED_CHARS]} [{sizes}{', ...' if len(tensor.shape) > 4 else ''}]"  # noqa: PLR2004
