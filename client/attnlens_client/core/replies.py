"""Validation of replies and their conversion to results.

The client does not trust replies: the address may belong to another program, a proxy may change messages, and
the model may be replaced between two calls.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from attnlens.embedding_types import ranges_problem
from attnlens.tensors import from_tensor, numpy_dtype
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1 import manifest_pb2
from attnlens.v1.tensor_pb2 import DataType, Tensor
from attnlens_client.core.requests import embedding_data_type, embedding_type, name_of, num_columns
from attnlens_client.errors import BadReplyError, FieldViolation
from attnlens_client.results import Array, Embeddings, Token, TokenizedText, Usage

_MAX_MESSAGE_CHARS = 500

Value: TypeAlias = str | int | tuple[int, ...]


def invalid_reply(problem: str) -> BadReplyError:
    """Return the exception for an invalid reply."""
    return BadReplyError(f"invalid reply: {problem[:_MAX_MESSAGE_CHARS]}")


def invalid_text(index: int, description: str, name: str = "texts") -> BadReplyError:
    """Return the exception for the invalid result of the text at `index` of the argument `name`."""
    violation = FieldViolation(f"{name}[{index}]", description[:_MAX_MESSAGE_CHARS], index)
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


_Response = TypeVar("_Response")

_MAX_INT32 = 2**31 - 1

# Index of the first text of a call, number of its texts, and the response.
Reply: TypeAlias = tuple[int, int, _Response]


def embed_consistency(request: pb.EmbedRequest) -> Consistency:
    """Return the consistency checks for all replies of Embed."""
    return Consistency(model=request.model, width=num_columns(request, 0))


def embeddings(
    request: pb.EmbedRequest, consistency: Consistency, replies: Sequence[Reply[pb.EmbedResponse]]
) -> Embeddings:
    """Concatenate the embeddings of one or more calls into a new array (N, D).

    Raises:
        BadReplyError: A reply is invalid or inconsistent.
    """
    arrays: list[Array] = []
    usages: list[Usage] = []
    for first, count, response in replies:
        where = f"texts[{first}:{first + count}]"
        consistency.check_model(response.model, response.model_version, where)
        consistency.check_computation(response.computation, where)
        vectors = checked_array(
            response.embeddings, embedding_data_type(request), (count, None), f"embeddings of {where}"
        )
        consistency.check("width", vectors.shape[1], where)
        ranges = _checked_ranges(request, consistency, response, vectors.shape[1], where)
        is_finite = np.isfinite(vectors).all(axis=1)
        if not is_finite.all():
            index = first + int(is_finite.argmin())
            raise invalid_text(index, "has an embedding with a value that is not finite")
        check_count(len(response.usages), count, f"usages for {where}")
        usages += [
            checked_usage(usage, index, may_truncate=request.truncate)
            for index, usage in enumerate(response.usages, first)
        ]
        arrays.append(vectors)
    _, _, last = replies[-1]
    return Embeddings(
        np.concatenate(arrays),
        tuple(usages),
        last.model,
        last.model_version,
        last.computation.engine,
        precision_of(last.computation),
        ranges,
    )


def _checked_ranges(
    request: pb.EmbedRequest, consistency: Consistency, response: pb.EmbedResponse, width: int, where: str
) -> Array | None:
    """Return the ranges of quantized embeddings, which are the requested ones if there are any."""
    if not embedding_type(request).needs_ranges:
        return None
    name = f"ranges of {where}"
    ranges = checked_array(response.ranges, DataType.DATA_TYPE_FLOAT32, (2, width), name)
    if problem := ranges_problem(ranges, width):
        raise invalid_reply(f"{name}: {problem}")
    if request.HasField("ranges") and response.ranges.data != request.ranges.data:
        raise invalid_reply(f"{name}: not the requested ranges")
    consistency.check("ranges", hashlib.sha256(response.ranges.data).hexdigest(), where)
    return ranges


def tokenized_texts(
    request: pb.TokenizeRequest,
    inputs: Sequence[pb.Input],
    replies: Iterable[Reply[pb.TokenizeResponse]],
) -> list[TokenizedText]:
    """Concatenate the tokens of all calls.

    Raises:
        BadReplyError: A reply is invalid or inconsistent.
    """
    consistency = Consistency(model=request.model)
    texts: list[TokenizedText] = []
    for first, count, response in replies:
        where = f"texts[{first}:{first + count}]"
        consistency.check_model(response.model, response.model_version, where)
        check_count(len(response.results), count, f"results for {where}")
        texts += [
            TokenizedText(
                tokens_of(result.tokens, index, inputs[index]),
                result.exceeds_max_tokens,
                response.model,
                response.model_version,
            )
            for index, result in enumerate(response.results, first)
        ]
    return texts


def tokens_of(messages: Iterable[pb.Token], index: int, text: pb.Input) -> tuple[Token, ...]:
    """Convert the tokens of a text and check their offsets.

    Args:
        messages: The tokens.
        index: Index of the text, for errors.
        text: The text. Offsets must be within it.
    """
    tokens = tuple(
        Token(
            id=token.id,
            text=token.text,
            source=name_of(pb.TokenSource.DESCRIPTOR, token.source),
            byte_start=token.byte_start,
            byte_end=token.byte_end,
            char_start=token.char_start,
            char_end=token.char_end,
            word_index=token.word_index if token.HasField("word_index") else None,
        )
        for token in messages
    )
    _check_offsets(tokens, index, text)
    return tokens


def _check_offsets(tokens: Iterable[Token], index: int, given: pb.Input) -> None:
    if given.HasField("text_pair"):
        texts = {"text": given.text_pair.first, "second_text": given.text_pair.second}
    else:
        texts = {"text": given.text}
    ends = {source: (len(text), len(text.encode())) for source, text in texts.items()}
    unknown = (_MAX_INT32, _MAX_INT32)  # prompts that are only known to the server
    for token in tokens:
        char_limit, byte_limit = ends.get(token.source, unknown)
        if not (
            0 <= token.char_start <= token.char_end <= char_limit
            and 0 <= token.byte_start <= token.byte_end <= byte_limit
        ):
            raise invalid_text(
                index,
                f"has a token with offsets out of range: characters {token.char_start} to {token.char_end}, "
                f"bytes {token.byte_start} to {token.byte_end} of its {token.source}",
            )
