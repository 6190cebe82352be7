"""`attnlens.v1.EncoderService`: each method takes a job, asks the model's service, and makes the reply."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, ParamSpec

import grpc
from google.protobuf.message_factory import GetMessageClass

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_server.grpc_api import explanations, requests
from attnlens_server.grpc_api.calls import SMALL_BYTES, Call, Calls, Context, Parser
from attnlens_server.grpc_api.model_info import ModelDescriber
from attnlens_server.grpc_api.responses import Responses
from attnlens_server.serving.explanations import CompareJob, ExplainJob
from attnlens_server.serving.jobs import EmbedJob, EncodeJob, TokenizeJob
from attnlens_server.serving.service import ModelService

P = ParamSpec("P")
# Takes the bytes of a request; returns those of its reply, or None where it has written a stream.
Handler = Callable[[bytes, Context], Awaitable[bytes | None]]

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["EncoderService"]
SERVICE_NAME: str = DESCRIPTOR.full_name

# What makes a job of a request; the others are taken as they are.
_TRANSLATIONS: dict[str, Callable[[Any], Any]] = {
    "Embed": requests.embed_job,
    "Encode": requests.encode_job,
    "EncodeStream": requests.encode_job,
    "Tokenize": requests.tokenize_job,
    "Explain": explanations.explain_job,
    "Compare": explanations.compare_job,
}


class EncoderService:
    """The methods for one model. The .proto file says what each does.

    A method returns its reply as bytes, or writes a stream of them.
    """

    def __init__(self, service: ModelService, responses: Responses, describer: ModelDescriber) -> None:
        self._service = service
        self._responses = responses
        self._describer = describer

    async def Embed(self, job: EmbedJob, call: Call) -> bytes:
        result = await self._service.embed(job, call.budget())
        return await self._make(result.embeddings.nbytes, self._responses.embed, result, job.data_type)

    async def Encode(self, job: EncodeJob, call: Call) -> bytes:
        result = await self._service.encode(job, call.budget())
        return await self._service.workers.run(self._responses.encode, result, job.data_type)

    async def EncodeStream(self, job: EncodeJob, call: Call) -> None:
        async with aclosing(self._service.encode_stream(job, call.budget())) as parts:
            async for part in parts:
                await call.write(
                    await self._service.workers.run(self._responses.stream_part, part, job.data_type)
                )

    async def Tokenize(self, job: TokenizeJob, call: Call) -> bytes:
        serialized = [self._responses.tokenize_head()]
        async with aclosing(self._service.tokenize(job, call.budget())) as portions:
            async for texts in portions:
                num_tokens = sum(len(text.tokens.ids) for text in texts)
                serialized.append(await self._make(64 * num_tokens, self._responses.tokenize, texts))
        return await self._make(sum(map(len, serialized)), b"".join, serialized)

    async def Explain(self, job: ExplainJob, call: Call) -> bytes:
        self._service.check_model(job.model)
        result = await self._service.explanations.explain(job, call.budget())
        size = 64 * sum(len(text.tokens.ids) for text in result.texts)
        return await self._make(size, explanations.explain_response, self._responses, result)

    async def Compare(self, job: CompareJob, call: Call) -> bytes:
        self._service.check_model(job.model)
        result = await self._service.explanations.compare(job, call.budget())
        size = 64 * sum(len(text.tokens.ids) for pair in result.pairs for text in (pair.a, pair.b))
        size += sum(pair.matrix.nbytes for pair in result.pairs if pair.matrix is not None)
        return await self._make(size, explanations.compare_response, self._responses, result)

    async def ListModels(self, request: pb.ListModelsRequest, call: Call) -> bytes:
        del request, call
        return pb.ListModelsResponse(models=[self._describer.model()]).SerializeToString()

    async def GetModel(self, request: pb.GetModelRequest, call: Call) -> bytes:
        del call
        self._service.check_model(request.model)
        return pb.GetModelResponse(model=self._describer.model()).SerializeToString()

    async def _make(
        self, size_bytes: int, make: Callable[P, bytes], *args: P.args, **kwargs: P.kwargs
    ) -> bytes:
        """Make a reply: a large one in a worker thread."""
        return await self._service.workers.run_if(size_bytes > SMALL_BYTES, make, *args, **kwargs)


def handlers(service: EncoderService, calls: Calls, max_texts: int) -> dict[str, Handler]:
    """Return what answers each method of `service`, within the life of a call."""
    handles: dict[str, Handler] = {}
    for method in DESCRIPTOR.methods:
        fields = method.input_type.fields_by_name
        inputs = fields.get("inputs") or fields.get("pairs")
        parser = Parser(
            GetMessageClass(method.input_type),
            _TRANSLATIONS.get(method.name, lambda request: request),
            inputs.number if inputs else None,
            max_texts,
        )
        handles[method.name] = calls.handler(parser, getattr(service, method.name), method.name)
    return handles


def add_service(server: grpc.aio.Server, service: EncoderService, calls: Calls, max_texts: int) -> None:
    """Serve the methods of `service`."""
    rpc_handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
    for name, handle in handlers(service, calls, max_texts).items():
        make = (
            grpc.unary_stream_rpc_method_handler
            if DESCRIPTOR.methods_by_name[name].server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        rpc_handlers[name] = make(handle)  # without serializers: bytes in, bytes out
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, rpc_handlers),))
