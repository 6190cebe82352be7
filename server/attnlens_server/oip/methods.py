"""The gRPC methods of `inference.GRPCInferenceService`."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from attnlens.oip import open_inference_pb2 as pb
from attnlens_server.bundle import Bundle
from attnlens_server.config import ServerConfig
from attnlens_server.core.admission import Budget
from attnlens_server.errors import ModelNotFoundError, RequestError, ResponseTooLargeError
from attnlens_server.grpc_api.calls import REQUEST_COPIES, SMALL_BYTES, Call, Calls, Parser
from attnlens_server.grpc_api.identity import Check, Context, accept
from attnlens_server.grpc_api.model_info import own_version
from attnlens_server.grpc_api.open_streams import OpenStreams
from attnlens_server.oip.models import PLATFORM, VERSION, Models
from attnlens_server.oip.requests import InferRequest, RequestReader
from attnlens_server.oip.responses import InferResults, serialize
from attnlens_server.operations.service import ModelService

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
SERVICE_NAME: str = DESCRIPTOR.full_name

CONTENTS_COPIES = 20  # an element of one byte takes 8, and lists of elements grow by doubling


class InferenceService:
    """Serves one model under the names of `Models`. The .proto file documents the methods."""

    def __init__(self, bundle: Bundle, service: ModelService, config: ServerConfig) -> None:
        self._service = service
        self._models = Models(bundle)
        self._max_response_bytes = config.max_response_bytes
        self.reader = RequestReader(bundle.model, self._models, config.max_inputs_per_request)

    # --- Health: answered in every state of the server --------------------------------------------

    def ServerLive(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        del request
        return pb.ServerLiveResponse(live=True)

    def ServerReady(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        del request
        return pb.ServerReadyResponse(ready=self._service.process.is_serving)

    def ModelReady(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        try:
            self._models.find(request.name, request.version)
        except ModelNotFoundError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._service.process.is_serving)

    # --- Metadata ---------------------------------------------------------------------------------

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, call: Call) -> bytes:
        del request, call
        return pb.ServerMetadataResponse(name="attnlens", version=own_version()).SerializeToString()

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, call: Call) -> bytes:
        del call
        return self._models.find(request.name, request.version).SerializeToString()

    async def ModelConfig(self, request: pb.ModelConfigRequest, call: Call) -> bytes:
        del call
        name = self._models.find(request.name, request.version).name
        config = pb.ModelConfig(name=name, platform=PLATFORM)
        return pb.ModelConfigResponse(config=config).SerializeToString()

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, call: Call) -> bytes:
        del call
        response, is_ready = pb.RepositoryIndexResponse(), self._service.process.is_serving
        if request.ready and not is_ready:
            return response.SerializeToString()
        state = "READY" if is_ready else "UNAVAILABLE"
        for name in self._models.metadata:
            response.models.add(name=name, version=VERSION, state=state, reason=self._service.process.problem)
        return response.SerializeToString()

    # --- Inference --------------------------------------------------------------------------------

    async def ModelInfer(self, request: InferRequest, call: Call) -> bytes:
        budget = call.budget()
        if request.timeout_us:
            deadline = time.monotonic() + request.timeout_us / 1e6
            budget = replace(budget, deadline=min(deadline, budget.deadline or deadline))
        try:
            results = await self._run(request, budget)
        except RequestError as error:
            raise request.renamed(error) from None
        layers = self._models.layers
        tensors = [
            results.tensor(name, request.width, layers.get(name), self._models.logits)
            for name in request.outputs
        ]
        size = sum(tensor.nbytes for tensor in tensors)
        if size > self._max_response_bytes:
            remedy = "request fewer outputs, or send fewer texts or texts of similar length"
            raise ResponseTooLargeError("the padded response", size, self._max_response_bytes, remedy)
        call.memory.grow(2 * size)  # the padded tensors and the message
        run_if = self._service.process.workers.run_if
        return await run_if(size > SMALL_BYTES, serialize, request, tensors, results.num_truncated)

    async def _run(self, request: InferRequest, budget: Budget) -> InferResults:
        results = InferResults()
        if request.embed is not None:
            embedded = await self._service.embed(request.embed, budget)
            results.embeddings, results.usages = embedded.embeddings, embedded.usages
        if request.encode is not None:
            results.texts = (await self._service.encode(request.encode, budget)).texts
            results.usages = [text.usage for text in results.texts]
        if request.classify is not None:
            classified = await self._service.classify(request.classify, budget)
            results.logits, results.usages = classified.logits, classified.usages
        if request.explain is not None:
            results.explanations = (await self._service.explain(request.explain, budget)).texts
            results.usages = [text.usage for text in results.explanations]
        return results


def add_service(
    server: grpc.aio.Server,
    service: InferenceService,
    calls: Calls,
    max_texts: int,
    streams: OpenStreams,
    check_health_access: Check = accept,
) -> None:
    """Register the methods of `service`.

    `streams` receives the requests of health checks, and `check_health_access` checks their senders.
    """
    rpc_handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in DESCRIPTOR.methods:
        message_class = GetMessageClass(method.input_type)
        answer = getattr(service, method.name)
        if method.name in ("ServerLive", "ServerReady", "ModelReady"):
            handle: Any = _health_handler(method.name, message_class, answer, check_health_access, streams)
        else:
            is_infer = method.name == "ModelInfer"
            contents = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
            parser: Parser[Any, Any] = Parser(
                message_class,
                service.reader.read if is_infer else lambda message: message,
                frozenset({contents} if is_infer else ()),
                max_texts,
                CONTENTS_COPIES if is_infer else REQUEST_COPIES,
            )
            handle = calls.handler(parser, answer, method.name)
        rpc_handlers[method.name] = grpc.stream_unary_rpc_method_handler(handle)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, rpc_handlers),))


def _health_handler(
    name: str,
    message_class: type[Message],
    answer: Callable[[Any], Message],
    check_access: Check,
    streams: OpenStreams,
) -> Callable[[object, Context], Awaitable[bytes]]:
    async def handle(_: object, context: Context) -> bytes:
        await check_access(context, name)
        return answer(await streams.receive(message_class, context)).SerializeToString()

    return handle
