"""The gRPC methods of `attnlens.v1.EncoderService`."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, ParamSpec, Protocol

import grpc
from google.protobuf.message_factory import GetMessageClass

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_server.core.admission import Budget
from attnlens_server.grpc_api import requests
from attnlens_server.grpc_api.calls import SMALL_BYTES, Call, Calls, Context, Parser
from attnlens_server.grpc_api.model_info import ModelDescriber
from attnlens_server.grpc_api.responses import Responses
from attnlens_server.operations.classify import ClassifyRequest
from attnlens_server.operations.compare import CompareRequest
from attnlens_server.operations.documents import ScoreRequest
from attnlens_server.operations.embed import EmbedRequest
from attnlens_server.operations.encode import EncodeRequest
from attnlens_server.operations.explain import ExplainRequest
from attnlens_server.operations.explanations import Explanation
from attnlens_server.operations.service import ModelService
from attnlens_server.operations.tokenize import TokenizedText, TokenizeRequest

P = ParamSpec("P")
_RESULT_BYTES = 32  # serialized score and usage of a text
# From a serialized request to a serialized response, or None if it wrote a stream.
Handler = Callable[[object, Context], Awaitable[bytes | None]]

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["EncoderService"]
SERVICE_NAME: str = DESCRIPTOR.full_name

CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "Embed": requests.embed_request,
    "Encode": requests.encode_request,
    "EncodeStream": requests.encode_request,
    "Tokenize": requests.tokenize_request,
    "Explain": requests.explain_request,
    "Compare": requests.compare_request,
    "Score": requests.score_request,
    "Classify": requests.classify_request,
}
"""Conversions of request messages to typed requests by method name."""


INPUT_FIELDS = ("inputs", "pairs", "documents")
"""Names of the repeated fields whose length is limited by the number of texts of a request."""


class HasBudget(Protocol):
    """A call over any protocol."""

    def budget(self) -> Budget:
        """Return the budget of the call: memory, deadline and metrics."""


class EncoderService:
    """Calls the model's service and serializes its results. The .proto file documents the methods."""

    def __init__(self, service: ModelService, responses: Responses, describer: ModelDescriber) -> None:
        self._service = service
        self._responses = responses
        self._describer = describer

    async def Embed(self, request: EmbedRequest, call: HasBudget) -> bytes:
        result = await self._service.embed(request, call.budget())
        size = result.embeddings.nbytes
        return await self._serialize(size, self._responses.embed, result)

    async def Encode(self, request: EncodeRequest, call: HasBudget) -> bytes:
        result = await self._service.encode(request, call.budget())
        return await self._service.process.workers.run(self._responses.encode, result, request.data_type)

    async def EncodeStream(self, request: EncodeRequest, call: Call) -> None:
        async with aclosing(self.encode_parts(request, call)) as parts:
            async for part in parts:
                await call.write(part)

    async def encode_parts(self, request: EncodeRequest, call: HasBudget) -> AsyncGenerator[bytes]:
        run = self._service.process.workers.run
        async with aclosing(self._service.encode_stream(request, call.budget())) as parts:
            async for part in parts:
                yield await run(self._responses.stream_part, part, request.data_type)

    async def Tokenize(self, request: TokenizeRequest, call: HasBudget) -> bytes:
        serialized = [self._responses.tokenize_head()]
        async with aclosing(self._service.tokenize(request, call.budget())) as portions:
            async for texts in portions:
                size = _tokens_bytes(texts)
                serialized.append(await self._serialize(size, self._responses.tokenize, texts))
        return await self._serialize(sum(map(len, serialized)), b"".join, serialized)

    async def Explain(self, request: ExplainRequest, call: HasBudget) -> bytes:
        result = await self._service.explain(request, call.budget())
        return await self._serialize(_tokens_bytes(result.texts), self._responses.explain, result)

    async def Compare(self, request: CompareRequest, call: HasBudget) -> bytes:
        result = await self._service.compare(request, call.budget())
        size = _tokens_bytes(text for pair in result.pairs for text in (pair.a, pair.b))
        size += sum(pair.matrix.nbytes for pair in result.pairs if pair.matrix is not None)
        return await self._serialize(size, self._responses.compare, result)

    async def Score(self, request: ScoreRequest, call: HasBudget) -> bytes:
        result = await self._service.score(request, call.budget())
        size = _RESULT_BYTES * len(result.usages)
        size += _tokens_bytes(each.explanation for each in result.scores if each.explanation is not None)
        return await self._serialize(size, self._responses.score, result)

    async def Classify(self, request: ClassifyRequest, call: HasBudget) -> bytes:
        result = await self._service.classify(request, call.budget())
        size = 2 * result.logits.nbytes + _RESULT_BYTES * len(result.usages)
        return await self._serialize(size, self._responses.classify, result)

    async def ListModels(self, request: pb.ListModelsRequest, call: HasBudget) -> bytes:
        del request, call
        return pb.ListModelsResponse(models=[self._describer.model()]).SerializeToString()

    async def GetModel(self, request: pb.GetModelRequest, call: HasBudget) -> bytes:
        del call
        self._service.model.check_name(request.model, request.model_version)
        return pb.GetModelResponse(model=self._describer.model()).SerializeToString()

    async def _serialize(
        self, size_bytes: int, serialize: Callable[P, bytes], *args: P.args, **kwargs: P.kwargs
    ) -> bytes:
        """Serialize a response, in a worker thread if it is large."""
        return await self._service.process.workers.run_if(
            size_bytes > SMALL_BYTES, serialize, *args, **kwargs
        )


def _tokens_bytes(texts: Iterable[TokenizedText | Explanation]) -> int:
    """Estimate the serialized size of the tokens of some texts."""
    return 64 * sum(len(text.tokens.ids) for text in texts)


def handlers(service: EncoderService, calls: Calls, max_texts: int) -> dict[str, Handler]:
    """Return the handler of each method of `service`."""
    handles: dict[str, Handler] = {}
    for method in DESCRIPTOR.methods:
        fields = method.input_type.fields_by_name
        numbers = frozenset(fields[name].number for name in INPUT_FIELDS if name in fields)
        parser = Parser(
            GetMessageClass(method.input_type),
            CONVERSIONS.get(method.name, lambda message: message),
            numbers,
            max_texts,
        )
        handles[method.name] = calls.handler(parser, getattr(service, method.name), method.name)
    return handles


def add_service(server: grpc.aio.Server, handles: Mapping[str, Handler], *, receives: bool = True) -> None:
    """Register a handler for each method.

    Args:
        server: gRPC server.
        handles: Handlers by method name.
        receives: Whether handlers receive their requests, see `Receiver`, or are called with them.
    """
    rpc_handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
    for name, handle in handles.items():
        request = "stream" if receives else "unary"
        response = "stream" if DESCRIPTOR.methods_by_name[name].server_streaming else "unary"
        make = getattr(grpc, f"{request}_{response}_rpc_method_handler")
        rpc_handlers[name] = make(handle)  # no serializers: handlers receive and return bytes
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, rpc_handlers),))
