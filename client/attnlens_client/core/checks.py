"""Validation of replies.

The client does not trust replies: the address may belong to another program, a proxy may change messages, and
the model may be replaced between two calls.
"""

from typing import TypeAlias

import numpy as np

from attnlens.tensors import from_tensor, numpy_dtype
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1 import manifest_pb2
from attnlens.v1.tensor_pb2 import DataType, Tensor
from attnlens_client.core.requests import name_of
from attnlens_client.errors import BadReplyError, FieldViolation
from attnlens_client.results import Array, Usage

_MAX_MESSAGE_CHARS = 500

Value: TypeAlias = str | int | tuple[int, ...]


def invalid_reply(problem: str) -> BadReplyError:
    """Return the exception for an invalid reply."""
    return BadReplyError(f"invalid reply: {problem[:_MAX_MESSAGE_CHARS]}")


def invalid_text(index: int, description: str) -> BadReplyError:
    """Return the exception for the invalid result of the text at `index`."""
    violation = FieldViolation(f"texts[{index}]", description[:_MAX_MESSAGE_CHARS], index)
    return BadReplyError(f"invalid reply: {violation.field} {violation.description}", violations=[violation])


class Consistency:
    """Checks that all replies of one method agree with the request and with each other.

    Args:
        requested: Requested values by name. Empty ones are taken from the first reply.
    """

    def __init__(self, **requested: str | int) -> None:
        self._values: dict[str, Value] = {name: value for name, value in requested.items() if value}

    def check(self, name: str, value: Value, where: str) -> None:
        """Check that a value equals the requested value, or else the one in the first reply."""
        expected = self._values.setdefault(name, value)
        if value != expected:
            raise invalid_reply(f"the {name} of {where} is {value!r}, expected {expected!r}")

    def check_model(self, name: str, version: str, where: str) -> None:
        """Check the model and its version."""
        self.check("model", name, where)
        self.check("model version", version, where)

    def check_computation(self, message: pb.Computation, where: str) -> None:
        """Check engine and precision. Older servers do not report them."""
        if message.engine:
            self.check("engine", message.engine, where)
            self.check("precision", precision_of(message), where)


def precision_of(message: pb.Computation) -> str:
    """Return the precision of a result, or "" if the server does not report it."""
    return name_of(manifest_pb2.Precision.DESCRIPTOR, message.precision) if message.engine else ""


def check_count(number: int, expected: int, noun: str) -> None:
    """Check the number of results."""
    if number != expected:
        raise invalid_reply(f"there are {number} {noun}, expected {expected}")


def check_presence(noun: str, index: int, *, is_present: bool, is_requested: bool) -> None:
    """Check that a result is present if and only if it was requested."""
    if is_present != is_requested:
        raise invalid_text(index, f"has {'unrequested' if is_present else 'no'} {noun}")


def checked_usage(message: pb.Usage, index: int, *, may_truncate: bool) -> Usage:
    """Return the number of tokens of a text."""
    usage = Usage(message.num_tokens, message.num_tokens_total, message.truncated)
    is_cut = usage.num_tokens < usage.num_tokens_total
    if not 0 <= usage.num_tokens <= usage.num_tokens_total or usage.truncated != is_cut:
        raise invalid_text(index, f"has inconsistent {usage}")
    if usage.truncated and not may_truncate:
        raise invalid_text(index, "was truncated without a request to truncate")
    return usage


def checked_array(
    tensor: Tensor, data_type: DataType.ValueType, shape: tuple[int | None, ...], name: str
) -> Array:
    """Return a tensor as an array without copying. None in `shape` matches any length."""
    actual = tuple(tensor.shape[: len(shape) + 1])
    matches = len(actual) == len(shape) and all(
        expected in (None, length) for length, expected in zip(actual, shape, strict=True)
    )
    if not matches:
        expected_shape = ", ".join("any" if length is None else str(length) for length in shape)
        raise invalid_reply(f"{name}: shape {actual}, expected ({expected_shape})")
    try:
        array = from_tensor(tensor)
    except ValueError as error:
        raise invalid_reply(f"{name}: {error}") from error
    if array.dtype != numpy_dtype(data_type):
        raise invalid_reply(f"{name}: data type {array.dtype}, expected {numpy_dtype(data_type)}")
    return array


def check_finite(array: Array, name: str, index: int) -> None:
    """Check that all values are finite."""
    if not np.isfinite(array).all():
        raise invalid_text(index, f"has {name} with a value that is not finite")
