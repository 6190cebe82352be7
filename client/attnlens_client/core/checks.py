"""What is checked of every reply: nothing in it is believed.

Another program may answer at the address, something on the way may have changed the reply, and the model may
be replaced between two calls.

Letters: T tokens of a text.
"""

from typing import TypeAlias

import numpy as np

from attnlens.tensors import from_tensor, numpy_dtype
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1 import manifest_pb2
from attnlens.v1.tensor_pb2 import DataType, Tensor
from attnlens_client.core.enums import name_of
from attnlens_client.errors import BadReplyError, FieldViolation
from attnlens_client.results import Array, Usage

_MAX_MESSAGE_CHARS = 500

Value: TypeAlias = str | int | tuple[int, ...]


def wrong_reply(what: str) -> BadReplyError:
    """Return the exception for a reply that is not what was asked for."""
    return BadReplyError(f"the reply is wrong: {what[:_MAX_MESSAGE_CHARS]}")


def wrong_text(index: int, description: str) -> BadReplyError:
    """Return the exception for a text with this number whose result is not what was asked for."""
    violation = FieldViolation(f"texts[{index}]", description[:_MAX_MESSAGE_CHARS], index)
    return BadReplyError(
        f"the reply is wrong: {violation.field} {violation.description}", violations=[violation]
    )


class Agreed:
    """What all replies of one method have in common: what was asked for, else what the first one has."""

    def __init__(self, **asked: str | int) -> None:
        self._values: dict[str, Value] = {name: value for name, value in asked.items() if value}

    def check(self, name: str, value: Value, where: str) -> None:
        """Check that a reply has the same `value` as the others."""
        known = self._values.setdefault(name, value)
        if value != known:
            raise wrong_reply(f"the {name} of {where} is {value!r} instead of {known!r}")

    def check_model(self, name: str, version: str, where: str) -> None:
        """Check that it is the model asked for, and the one that answered before."""
        self.check("model", name, where)
        self.check("model version", version, where)

    def check_computation(self, message: pb.Computation, where: str) -> None:
        """Check that what computed it is what computed the others. Older servers do not say it."""
        if message.engine:
            self.check("engine", message.engine, where)
            self.check("precision", precision_of(message), where)


def precision_of(message: pb.Computation) -> str:
    """Return the name of what a result was computed in; empty: the server does not say it."""
    return name_of(manifest_pb2.Precision.DESCRIPTOR, message.precision) if message.engine else ""


def check_count(number: int, expected: int, what: str) -> None:
    """Check how many there are."""
    if number != expected:
        raise wrong_reply(f"there are {number} instead of {expected} {what}")


def check_presence(what: str, index: int, *, has: bool, wants: bool) -> None:
    """Check that a text has what was asked for, and nothing else."""
    if has != wants:
        raise wrong_text(index, f"comes {'with' if has else 'without'} {what}")


def checked_usage(message: pb.Usage, index: int, *, may_truncate: bool) -> Usage:
    """Read how much of a text was used."""
    usage = Usage(message.num_tokens, message.num_tokens_total, message.truncated)
    is_cut = usage.num_tokens < usage.num_tokens_total
    if not 0 <= usage.num_tokens <= usage.num_tokens_total or usage.truncated != is_cut:
        raise wrong_text(index, f"can't have {usage}")
    if usage.truncated and not may_truncate:
        raise wrong_text(index, "was truncated, which was not asked for")
    return usage


def checked_array(
    tensor: Tensor, data_type: DataType.ValueType, shape: tuple[int | None, ...], what: str
) -> Array:
    """Return the tensor as an array of `shape`, where None is any length. Nothing is allocated."""
    given = tuple(tensor.shape[: len(shape) + 1])
    fits = len(given) == len(shape) and all(
        expected in (None, length) for length, expected in zip(given, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise wrong_reply(f"the {what} have the shape {given} instead of ({wanted})")
    try:
        array = from_tensor(tensor)
    except ValueError as error:
        raise wrong_reply(f"the {what}: {error}") from error
    if array.dtype != numpy_dtype(data_type):
        raise wrong_reply(f"the {what} are {array.dtype} instead of {numpy_dtype(data_type)}")
    return array


def check_finite(array: Array, what: str, index: int) -> None:
    """Check that every element is a finite number."""
    if not np.isfinite(array).all():
        raise wrong_text(index, f"has {what} with a value that is no finite number")
