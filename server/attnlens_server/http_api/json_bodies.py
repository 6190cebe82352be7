"""Steps that routes with JSON bodies share. Large bodies are parsed and serialized in worker threads."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from attnlens_server.core.usage import Usage
from attnlens_server.errors import FieldViolation, InputTooLongError
from attnlens_server.http_api.exchange import (
    BodyError,
    BodyParser,
    HttpRequest,
    HttpResponse,
    check_values,
    encode_json,
    parsed_bytes,
    shown,
)
from attnlens_server.operations.classify import ClassifyResult
from attnlens_server.operations.embed import EmbedRequest, EmbedResult
from attnlens_server.operations.inputs import Request, too_many_inputs
from attnlens_server.operations.score import ScoreResult
from attnlens_server.operations.service import ModelService
from attnlens_server.text import Input, TokenIds

ServiceRequest = TypeVar("ServiceRequest", bound=Request)

MAX_INLINE_BYTES = 1 << 16
TRUNCATED = "X-Truncated-Inputs"
"""Header with the number of truncated texts, if there are any: other APIs have no field for it."""


class TokenLimit(msgspec.Struct, kw_only=True):
    """vLLM's options for long texts.

    Attributes:
        truncate_prompt_tokens: Number of tokens to truncate to, at least the limit of the model. -1 for that
            limit.
        truncation_side: Side of a long text to remove. If None, the side that the model's tokenizer uses.
    """

    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    def check_limit(self, service: ModelService) -> None:
        """Reject a limit that is lower than the limit of the model.

        Raises:
            BodyError: It is.
        """
        if self.truncate_prompt_tokens != -1:
            check_max_tokens("truncate_prompt_tokens", self.truncate_prompt_tokens, service)


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
    is_large = len(request.body) > MAX_INLINE_BYTES

    def read() -> tuple[Any, ServiceRequest]:
        if is_large:
            check_values(request.body, service.model.max_inputs)
        body = parser.parse(request.body)
        return body, convert(body)

    service.process.check_serving()
    memory, size = request.budget.memory, parsed_bytes(request.body)
    memory.grow(size)
    body, converted = await service.process.workers.run_if(is_large, read)
    memory.shrink(size)
    request.budget.metrics.num_inputs = len(converted.inputs)
    memory.grow(converted.memory_bytes)
    return body, converted


async def serialize(service: ModelService, size_bytes: int, build: Callable[[], Any]) -> bytes:
    """Return a JSON value as bytes. The service has reserved its memory, see `JSON_CONVERSION`.

    Args:
        service: Service of the model.
        size_bytes: Approximate size of the value.
        build: Returns the value.
    """
    return await service.process.workers.run_if(size_bytes > MAX_INLINE_BYTES, lambda: encode_json(build()))


async def json_response(
    service: ModelService,
    size_bytes: int,
    build: Callable[[], Any],
    usages: Iterable[Usage],
) -> HttpResponse:
    """Return a response with the value that `serialize` returns, and with the header `TRUNCATED`.

    Args:
        service: Service of the model.
        size_bytes: Approximate size of the value.
        build: Returns the value.
        usages: Numbers of tokens of the texts.
    """
    content = await serialize(service, size_bytes, build)
    num_truncated = sum(usage.truncated for usage in usages)
    return HttpResponse(content, headers={TRUNCATED: str(num_truncated)} if num_truncated else {})


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
    size = result.embeddings.nbytes
    return await json_response(service, size, lambda: build(body, result), result.usages)


def num_tokens(result: EmbedResult | ScoreResult | ClassifyResult) -> int:
    """Return the number of tokens of all texts."""
    return sum(usage.num_tokens for usage in result.usages)


def text_inputs(values: Texts, max_inputs: int, field: str) -> list[Input]:
    """Return one input for each text.

    Raises:
        BodyError: There are more than `max_inputs` texts, the values of `field`.
    """
    if isinstance(values, str):
        return [Input(text=values)]
    check_count(values, max_inputs, field)
    return [Input(text=value) for value in values]


def inputs_of(values: Inputs | Sequence[int | list[int]], max_inputs: int, field: str) -> list[Input]:
    """Return one input for each text or list of token ids. A list of numbers is one input.

    Raises:
        BodyError: The list `field` contains numbers and other values, or more than `max_inputs` inputs.
    """
    if isinstance(values, str):
        return [Input(text=values)]
    numbers = [value for value in values if isinstance(value, int)]
    if 0 < len(numbers) < len(values):
        raise invalid(field, "mixes token ids with other values: send texts, or lists of token ids")
    if numbers:
        return [Input(token_ids=TokenIds(numbers))]
    check_count(values, max_inputs, field)
    return [
        Input(text=value) if isinstance(value, str) else Input(token_ids=TokenIds(value))
        for value in values
        if not isinstance(value, int)
    ]


def check_count(values: Sequence[object], max_inputs: int, field: str) -> None:
    """Reject too many values before an `Input` is built for each, which takes a second per million.

    Raises:
        BodyError: There are more than `max_inputs` values in `field`.
    """
    if len(values) > max_inputs:
        raise BodyError([replace(too_many_inputs(len(values), max_inputs), field=field)])


def choose(body: object, *names: str) -> Any:  # noqa: ANN401 - the value of a field
    """Return the value of an option that has several names, or None if none of them is set.

    Raises:
        BodyError: The fields have different values.
    """
    values = {name: value for name in names if (value := getattr(body, name)) is not None}
    (name, first), *others = values.items() or [("", None)]
    for other, value in others:
        if value != first:
            raise invalid(other, f"is {shown(value)}, but {name} is {shown(first)}: send one of them")
    return first


def check_max_tokens(field: str, value: int | None, service: ModelService) -> None:
    """Reject a limit on the tokens of a text that is lower than the limit of the model.

    Raises:
        BodyError: It is.
    """
    if value is not None and value < service.model.max_tokens:
        problem = "and only the limit of the model is supported"
        raise invalid(field, f"is {value}, {problem}: use {service.model.max_tokens} or more, or omit it")


@contextmanager
def truncation(service: ModelService, field: str, side: str | None, own: str | None = None) -> Iterator[None]:
    """Explain in errors that the model does not truncate on the requested side.

    Args:
        service: Service of the model, whose request must not truncate if `side` is not its side.
        field: Field that specifies the side.
        side: Requested side, "left" or "right". None for the side of the model.
        own: Side of the model. Defaults to that of its tokenizer.

    Raises:
        BodyError: A text is too long.
    """
    try:
        yield
    except InputTooLongError as error:
        own = own or service.model.truncation_side
        if side in (None, own):
            raise
        num_tokens, max_tokens = error.metadata["num_tokens"], error.metadata["max_tokens"]
        problem = f"needs truncation on the {side}, but this model truncates on the {own}, and a text has"
        tokens = f"{num_tokens} tokens, while the limit is {max_tokens}"
        raise invalid(field, f"{problem} {tokens}: shorten it, or omit {field}") from None


def invalid(field: str, description: str) -> BodyError:
    """Return the error for one invalid field of a body."""
    return BodyError([FieldViolation(field, description)])
