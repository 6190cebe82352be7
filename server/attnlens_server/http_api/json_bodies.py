"""Steps that routes with JSON bodies share. Large bodies are parsed and serialized in worker threads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec

from attnlens_server.errors import FieldViolation, InputTooLongError, InvalidFieldsError
from attnlens_server.http_api.exchange import BodyParser, HttpRequest, HttpResponse, encode_json
from attnlens_server.serving.requests import EmbedRequest, Request
from attnlens_server.serving.results import ClassifyResult, EmbedResult, ScoreResult
from attnlens_server.serving.service import ModelService
from attnlens_server.serving.validation import too_many_inputs
from attnlens_server.text import Input, TokenIds

ServiceRequest = TypeVar("ServiceRequest", bound=Request)

MAX_INLINE_BYTES = 1 << 16
Dimensions = Annotated[int, msgspec.Meta(ge=1)]
"""Number of components of an embedding."""
Texts = str | list[str]
Inputs = str | list[str | int | list[int]]
"""One text, several texts, the token ids of one text, or those of several texts."""


async def read_body(
    service: ModelService,
    request: HttpRequest,
    parser: BodyParser,
    convert: Callable[[Any], ServiceRequest],
) -> tuple[Any, ServiceRequest]:
    """Parse a body and convert it to a request of the service. Return both.

    Raises:
        RequestError: The body is invalid, or the server does not accept requests.
    """

    def read() -> tuple[Any, ServiceRequest]:
        body = parser.parse(request.body)
        return body, convert(body)

    service.check_serving()
    body, converted = await service.workers.run_if(len(request.body) > MAX_INLINE_BYTES, read)
    request.budget.metrics.num_inputs = len(converted.inputs)
    request.budget.memory.grow(converted.memory_bytes)
    return body, converted


async def serialize(
    service: ModelService, request: HttpRequest, size_bytes: int, build: Callable[[], Any]
) -> bytes:
    """Return a JSON value as bytes, with reserved memory.

    Args:
        service: Service of the model.
        request: Request to answer.
        size_bytes: Approximate size of the value.
        build: Returns the value.

    Raises:
        OverloadedError: Other calls use too much memory.
    """
    content = await service.workers.run_if(size_bytes > MAX_INLINE_BYTES, lambda: encode_json(build()))
    request.budget.memory.grow(len(content))
    return content


async def json_response(
    service: ModelService, request: HttpRequest, size_bytes: int, build: Callable[[], Any]
) -> HttpResponse:
    """Return a response with the value that `serialize` returns."""
    return HttpResponse(await serialize(service, request, size_bytes, build))


async def embed(
    service: ModelService,
    request: HttpRequest,
    parser: BodyParser,
    convert: Callable[[Any], EmbedRequest],
    build: Callable[[Any, EmbedResult], Any],
) -> HttpResponse:
    """Answer a request for embeddings.

    Args:
        service: Service of the model.
        request: Request to answer.
        parser: Parser of its body.
        convert: Converts the parsed body to a request of the service.
        build: Returns the JSON value of the response for the parsed body and the embeddings.

    Raises:
        RequestError: See `attnlens_server.errors`.
    """
    body, embed_request = await read_body(service, request, parser, convert)
    result = await service.embed(embed_request, request.budget)
    return await json_response(service, request, result.embeddings.nbytes, lambda: build(body, result))


def num_tokens(result: EmbedResult | ScoreResult | ClassifyResult) -> int:
    """Return the number of tokens of all texts."""
    return sum(usage.num_tokens for usage in result.usages)


def text_inputs(values: Texts, max_inputs: int, field: str = "inputs") -> list[Input]:
    """Return one input for each text.

    Raises:
        InvalidFieldsError: There are more than `max_inputs` texts, the values of `field`.
    """
    if isinstance(values, str):
        return [Input(text=values)]
    check_count(values, max_inputs, field)
    return [Input(text=value) for value in values]


def inputs_of(values: Inputs | Sequence[int | list[int]], max_inputs: int) -> list[Input]:
    """Return one input for each text or list of token ids. A list of numbers is one input.

    Raises:
        InvalidFieldsError: A list contains numbers and other values, or more than `max_inputs` inputs.
    """
    if isinstance(values, str):
        return [Input(text=values)]
    numbers = [value for value in values if isinstance(value, int)]
    if 0 < len(numbers) < len(values):
        raise invalid("inputs", "mixes token ids with other values: send texts, or lists of token ids")
    if numbers:
        return [Input(token_ids=TokenIds(numbers))]
    check_count(values, max_inputs)
    return [
        Input(text=value) if isinstance(value, str) else Input(token_ids=TokenIds(value))
        for value in values
        if not isinstance(value, int)
    ]


def check_count(values: Sequence[object], max_inputs: int, field: str = "inputs") -> None:
    """Reject too many values before an `Input` is built for each, which takes a second per million.

    Raises:
        InvalidFieldsError: There are more than `max_inputs` values in `field`.
    """
    if len(values) > max_inputs:
        raise InvalidFieldsError([replace(too_many_inputs(len(values), max_inputs), field=field)])


@contextmanager
def truncation(service: ModelService, field: str, side: str | None, own: str | None = None) -> Iterator[None]:
    """Explain in errors that the model does not truncate on the requested side.

    Args:
        service: Service of the model, whose request must not truncate if `side` is not its side.
        field: Field that specifies the side.
        side: Requested side, "left" or "right". None for the side of the model.
        own: Side of the model. Defaults to that of its tokenizer.

    Raises:
        InvalidFieldsError: A text is too long.
    """
    try:
        yield
    except InputTooLongError as error:
        own = own or service.truncation_side
        if side in (None, own):
            raise
        num_tokens, max_tokens = error.metadata["num_tokens"], error.metadata["max_tokens"]
        problem = f"needs truncation on the {side}, but this model truncates on the {own}, and a text has"
        tokens = f"{num_tokens} tokens, while the limit is {max_tokens}"
        raise invalid(field, f"{problem} {tokens}: shorten it, or omit {field}") from None


def invalid(field: str, description: str) -> InvalidFieldsError:
    """Return the error for one invalid field."""
    return InvalidFieldsError([FieldViolation(field, description)])
