"""An EncoderService of the tests' own: it answers, fails or waits as a test tells it. Without a model."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import grpc
import numpy as np

from attnlens.tensors import from_tensor, to_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceServicer, add_EncoderServiceServicer_to_server
from attnlens.v1.manifest_pb2 import Architecture
from attnlens.v1.tensor_pb2 import DataType, Tensor

Embed: TypeAlias = Callable[[pb.EmbedRequest, grpc.ServicerContext], pb.EmbedResponse]
_Reply = TypeVar("_Reply")

AT_ONCE = ("grpc-retry-pushback-ms", "1")

NAME = "scripted"
HIDDEN_SIZE = 4
NUM_LAYERS = 2
NUM_HEADS = 2


def model(**limits: int) -> pb.Model:
    """The only model."""
    sizes = Architecture(hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS, num_heads=NUM_HEADS)
    return pb.Model(
        name=NAME,
        architecture=sizes,
        max_tokens=16,
        limits=pb.Limits(**limits),
        embedding_size=HIDDEN_SIZE,
    )


def vectors(request: pb.EmbedRequest) -> pb.EmbedResponse:
    """The answer to a request: each text's vector has its number of characters in every place."""
    rows = [[len(each.text)] * (request.dimensions or HIDDEN_SIZE) for each in request.inputs]
    return pb.EmbedResponse(
        model=NAME, embeddings=_tensor(rows, request.data_type), usages=[_usage(1) for _ in rows]
    )


def encoded(request: pb.EncodeRequest) -> pb.EncodeResponse:
    """The answer to a request: each character is a token, which attends to all of them alike."""
    layers = [layer % NUM_LAYERS for layer in request.layers] or range(NUM_LAYERS)
    heads = [head % NUM_HEADS for head in request.heads] or range(NUM_HEADS)
    num_maps = 1 if request.head_reduction == pb.HEAD_REDUCTION_MEAN else len(heads)
    response = pb.EncodeResponse(model=NAME)
    for each in request.inputs:
        count = len(each.text)
        result = response.results.add(tokens=[pb.Token(text=char) for char in each.text], usage=_usage(count))
        if pb.ENCODE_OUTPUT_LAST_HIDDEN_STATE in request.outputs:
            ones = np.ones((count, HIDDEN_SIZE))
            result.last_hidden_state.CopyFrom(_tensor(ones, request.data_type))
        if pb.ENCODE_OUTPUT_ATTENTIONS in request.outputs:
            weights = np.full((len(layers), num_maps, count, count), 1 / max(1, count))
            result.attention.weights.CopyFrom(_tensor(weights, request.data_type))
            result.attention.layers.extend(layers)
            result.attention.heads.extend(heads)
            result.attention.head_reduction = request.head_reduction
    return response


def streamed(request: pb.EncodeRequest) -> list[pb.EncodeStreamResponse]:
    """The same as messages of a stream."""
    messages: list[pb.EncodeStreamResponse] = []
    for index, result in enumerate(encoded(request).results):
        attention = pb.Attention()
        attention.CopyFrom(result.attention)
        result.ClearField("attention")
        part = pb.EncodeStreamResponse(model=NAME, input_index=index)
        part.num_attention_parts = len(attention.layers)
        part.head.CopyFrom(result)
        messages.append(part)
        for place, layer in enumerate(attention.layers):
            weights = from_tensor(attention.weights)[place]
            part = pb.EncodeStreamResponse(model=NAME, input_index=index)
            part.attention.CopyFrom(attention)
            part.attention.layers[:] = [layer]
            part.attention.weights.CopyFrom(_tensor(weights[None], request.data_type))
            messages.append(part)
    return messages


def _tensor(values: Any, data_type: DataType.ValueType) -> Tensor:
    return to_tensor(np.array(values, np.float32), data_type)


def _usage(num_tokens: int) -> pb.Usage:
    return pb.Usage(num_tokens=num_tokens, num_tokens_total=num_tokens)


class ScriptedServer(EncoderServiceServicer):
    """A server in this process for the time of the block.

    `embed` and `stream` may be set to what Embed and EncodeStream shall do, and `change` to what shall be
    done to every reply before it is sent.
    """

    def __init__(self, **limits: int) -> None:
        self.limits = limits
        self.model = pb.Model()  # what else GetModel tells
        self.port = 0
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.embed: Embed = lambda request, _: vectors(request)
        self.stream: Callable[[pb.EncodeRequest], Iterable[pb.EncodeStreamResponse]] = streamed
        self.holds_streams = False  # after the first message, until their client cancels them
        self.change: Callable[[Any], object] = lambda _: None
        self.waiting = threading.Semaphore(0)  # counts the calls that are held
        self.cancelled = threading.Semaphore(0)  # and those that their client cancelled
        self._leaving = threading.Event()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Listen, on the same port as before."""
        self._leaving.clear()
        self._server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        add_EncoderServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        """Go away at once."""
        self._leaving.set()
        self._server.stop(grace=None).wait()

    def wait_until_cancelled(self, context: grpc.ServicerContext) -> None:
        """Hold a call until its client cancels it."""
        ended = self._noted_end(context)
        self.waiting.release()
        ended.wait(timeout=60)

    def _noted_end(self, context: grpc.ServicerContext) -> threading.Event:
        ended = threading.Event()

        def note() -> None:
            ended.set()
            if not self._leaving.is_set():
                self.cancelled.release()

        if not context.add_callback(note):
            note()  # it was cancelled before
        return ended

    def _model(self) -> pb.Model:
        told = model(**self.limits)
        told.MergeFrom(self.model)
        return told

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.GetModelResponse:  # noqa: N802
        self._note(request, context)
        return self._changed(pb.GetModelResponse(model=self._model()))

    def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        self._note(request, context)
        return self._changed(pb.ListModelsResponse(models=[self._model()]))

    def Embed(self, request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:  # noqa: N802
        self._note(request, context)
        return self._changed(self.embed(request, context))

    def Encode(self, request: pb.EncodeRequest, context: grpc.ServicerContext) -> pb.EncodeResponse:  # noqa: N802
        self._note(request, context)
        return self._changed(encoded(request))

    def EncodeStream(  # noqa: N802
        self, request: pb.EncodeStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.EncodeStreamResponse]:
        self._note(request, context)
        ended = self._noted_end(context)  # now: a generator whose call is cancelled is not run on
        for response in self.stream(request.encode):
            yield self._changed(response)
            if self.holds_streams:
                self.waiting.release()
                ended.wait(timeout=60)
                return

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:  # noqa: N802
        self._note(request, context)
        results = [pb.TokenizedText(tokens=[pb.Token(text=char) for char in text]) for text in request.texts]
        return self._changed(pb.TokenizeResponse(model=NAME, results=results))

    def _changed(self, reply: _Reply) -> _Reply:
        self.change(reply)
        return reply

    def _note(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))


def refuse(
    context: grpc.ServicerContext, code: grpc.StatusCode, reason: str, message: str, *more: tuple[str, str]
) -> None:
    """End a call as an attnlens server does, with `more` trailers."""
    context.set_trailing_metadata((("attnlens-error-reason", reason), *more))
    context.abort(code, message)


def fails(code: grpc.StatusCode, reason: str, message: str, times: int = 1) -> Embed:
    """Return an Embed that fails so many times first, and lets gRPC try again at once."""
    left = [times]

    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        left[0] -= 1
        if left[0] >= 0:
            refuse(context, code, reason, message, AT_ONCE)
        return vectors(request)

    return embed


class _Garbled(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        if details.method.endswith("Stream"):
            return grpc.unary_stream_rpc_method_handler(lambda *_: iter([b"\xff"]))
        return grpc.unary_unary_rpc_method_handler(lambda *_: b"\xff")


@contextmanager
def garbled() -> Iterator[str]:
    """Yield the address of a server whose replies are no messages."""
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((_Garbled(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address
    server.stop(None).wait()
