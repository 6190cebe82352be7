"""Routes of attnlens: the methods of `attnlens.v1.EncoderService` with their messages as JSON."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from attnlens_server.core.admission import Budget
from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.grpc_api.calls import SMALL_BYTES
from attnlens_server.grpc_api.methods import CONVERSIONS, DESCRIPTOR, EncoderService
from attnlens_server.http_api.exchange import (
    JSON,
    NATIVE,
    NDJSON,
    HttpRequest,
    HttpResponse,
    Route,
    check_values,
    encode_json,
    parsed_bytes,
    shown,
)
from attnlens_server.http_api.transcoding import fill_message, message_value, parse_json
from attnlens_server.operations.encode import EncodeRequest
from attnlens_server.operations.inputs import Request
from attnlens_server.operations.service import ModelService

PREFIX = "/v1/attnlens"
ARRAYS = ("lists", "base64")
"""Values of `arrays`, the only field that the messages do not have: the format of tensors in the response."""
SMALL_REPLY_BYTES = 1 << 14  # messages up to this size are converted on the event loop
_SUMMARIES = {
    "embed": "Return one embedding for each text.",
    "encode": "Return token vectors, attention or both for each text.",
    "encode_stream": "Stream the results of encode, one JSON object per line. An error is the last line.",
    "tokenize": "Return the tokens of each text.",
    "explain": "Return how much each token of a text contributes to its embedding or to a similarity.",
    "compare": "Return how much each token of two texts contributes to their similarity.",
    "score": "Return the relevance of documents to a query, sorted, or of pairs of texts.",
    "classify": "Return the logit and score of each label for each text.",
    "attention": "Return the attention weights of each text. Defaults to all heads of all layers.",
}
_METHODS = {"encode_stream": "EncodeStream", "attention": "Encode"}  # others are named like their method


class TranscodedBody(NamedTuple):
    """Type of a JSON body that is converted to a message.

    Attributes:
        message: Descriptor of the message.
        has_arrays: Whether the body may select the format of tensors in the response.
    """

    message: Descriptor
    has_arrays: bool


@dataclass(frozen=True, slots=True)
class _Call:
    """A call, for `EncoderService`."""

    resources: Budget

    def budget(self) -> Budget:
        """Return the budget."""
        return self.resources


class NativeRoutes:
    """Routes of one model.

    Args:
        service: Service of the model.
        methods: Methods of the gRPC service, which return serialized responses.
        max_texts: Maximum number of texts of a request.
    """

    def __init__(self, service: ModelService, methods: EncoderService, max_texts: int) -> None:
        self._service = service
        self._methods = methods
        self._max_texts = max_texts

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            *(self._route(name, summary) for name, summary in _SUMMARIES.items()),
            self._model_route("models", "ListModels", "List the models."),
            self._model_route("models/*", "GetModel", "Return a model, its limits and its versions."),
        ]

    def _route(self, name: str, summary: str) -> Route:
        method = DESCRIPTOR.methods_by_name[_METHODS.get(name, name.capitalize())]
        handler = partial(self._stream if method.server_streaming else self._respond, name, method)
        body = TranscodedBody(method.input_type, has_arrays=name != "tokenize")
        media_type = NDJSON if method.server_streaming else JSON
        return Route(
            "POST",
            f"{PREFIX}/{name}",
            handler,
            NATIVE,
            (method.name,),
            summary=summary,
            body=body,
            response=method.output_type,
            media_type=media_type,
        )

    def _model_route(self, path: str, name: str, summary: str) -> Route:
        method = DESCRIPTOR.methods_by_name[name]
        handler = partial(self._model, method)
        return Route(
            "GET", f"{PREFIX}/{path}", handler, NATIVE, (name,), summary=summary, response=method.output_type
        )

    async def _respond(self, name: str, method: MethodDescriptor, request: HttpRequest) -> HttpResponse:
        typed, as_base64 = await self._parse(name, method, request)
        reply = await getattr(self._methods, method.name)(typed, _Call(request.budget))
        return HttpResponse(await self._json(method, reply, as_base64))

    async def _stream(self, name: str, method: MethodDescriptor, request: HttpRequest) -> HttpResponse:
        """Wait for the first part, so that an invalid request gets the status of its error."""
        typed, as_base64 = await self._parse(name, method, request)
        lines = self._lines(method, typed, as_base64, request.budget)
        await anext(lines)
        return HttpResponse(lines, content_type=NDJSON)

    async def _lines(
        self,
        method: MethodDescriptor,
        typed: EncodeRequest,
        as_base64: bool,
        budget: Budget,
    ) -> AsyncGenerator[bytes]:
        """Yield nothing as soon as the first line is known, then the lines."""
        is_first = True
        async with aclosing(self._methods.encode_parts(typed, _Call(budget))) as parts:
            async for part in parts:
                line = await self._json(method, part, as_base64)
                if is_first:
                    yield b""
                    is_first = False
                yield line + b"\n"

    async def _model(self, method: MethodDescriptor, request: HttpRequest) -> HttpResponse:
        self._service.process.check_serving()
        message = GetMessageClass(method.input_type)()
        if request.path:
            fill_message(message, {"model": request.path}, self._max_texts)
        reply = await getattr(self._methods, method.name)(message, _Call(request.budget))
        return HttpResponse(await self._json(method, reply, as_base64=False))

    async def _parse(self, name: str, method: MethodDescriptor, request: HttpRequest) -> tuple[Any, bool]:
        """Return the typed request, and whether its response has tensors in base64."""
        self._service.process.check_serving()
        memory, size = request.budget.memory, parsed_bytes(request.body)
        memory.grow(size)
        is_slow = len(request.body) > SMALL_BYTES
        typed, as_base64 = await self._service.process.workers.run_if(
            is_slow, self._typed_request, name, method, request.body
        )
        memory.shrink(size)
        request.budget.metrics.num_inputs = len(typed.inputs)
        memory.grow(typed.memory_bytes)
        return typed, as_base64

    def _typed_request(self, name: str, method: MethodDescriptor, body: bytes) -> tuple[Request, bool]:
        if len(body) > SMALL_BYTES:
            check_values(body, self._max_texts)
        content = parse_json(body)
        arrays = content.pop("arrays", None)
        if arrays is not None and arrays not in ARRAYS:
            problem = f"is {shown(arrays)}: use one of {', '.join(ARRAYS)}"
            raise InvalidFieldsError([FieldViolation("arrays", problem)])
        message: Any = GetMessageClass(method.input_type)()
        fill_message(message, content, self._max_texts)
        if name == "attention" and not message.attention:
            message.attention.add()
        return CONVERSIONS[method.name](message), arrays == "base64"

    async def _json(self, method: MethodDescriptor, reply: bytes, as_base64: bool) -> bytes:
        """Convert a reply, whose memory the service has reserved, see `JSON_CONVERSION`."""
        is_slow = len(reply) > SMALL_REPLY_BYTES
        return await self._service.process.workers.run_if(
            is_slow, _to_json, method.output_type, reply, as_base64
        )


def _to_json(descriptor: Descriptor, reply: bytes, as_base64: bool) -> bytes:
    return encode_json(message_value(GetMessageClass(descriptor).FromString(reply), as_base64))
