"""An EncoderService of the tests' own: it answers, fails or waits as a test tells it. Without a model."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np

from attnlens.tensors import to_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceServicer, add_EncoderServiceServicer_to_server
from attnlens.v1.manifest_pb2 import Architecture
from attnlens.v1.tensor_pb2 import DataType

HIDDEN_SIZE = 4


def vectors(request: pb.EmbedRequest) -> pb.EmbedResponse:
    """The answer to a request: each text's vector has its number of characters in every place."""
    rows = [[len(each.text)] * HIDDEN_SIZE for each in request.inputs]
    usages = [pb.Usage(num_tokens=1, num_tokens_total=1)] * len(rows)
    return pb.EmbedResponse(
        embeddings=to_tensor(np.array(rows, np.float32), DataType.DATA_TYPE_FLOAT32), usages=usages
    )


class ScriptedServer(EncoderServiceServicer):
    """A server in this process for the time of the block. `embed` may be set to what Embed shall do."""

    def __init__(self, **limits: int) -> None:
        self.limits = limits
        self.model = pb.Model()  # what else GetModel tells
        self.port = 0
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.embed: Callable[[pb.EmbedRequest, grpc.ServicerContext], pb.EmbedResponse] = lambda request, _: (
            vectors(request)
        )
        self.waiting = threading.Semaphore(0)  # counts the calls that `wait_until_cancelled` holds
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

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.GetModelResponse:  # noqa: N802
        self._note(request, context)
        sizes = Architecture(hidden_size=HIDDEN_SIZE, num_layers=2, num_heads=2)
        limits = pb.Limits(**self.limits)
        model = pb.Model(
            name="scripted", architecture=sizes, max_tokens=16, limits=limits, embedding_size=HIDDEN_SIZE
        )
        model.MergeFrom(self.model)
        return pb.GetModelResponse(model=model)

    def Embed(self, request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:  # noqa: N802
        self._note(request, context)
        return self.embed(request, context)

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:  # noqa: N802
        self._note(request, context)
        return pb.TokenizeResponse(results=[pb.TokenizedText()] * len(request.texts))

    def EncodeStream(  # noqa: N802
        self, request: pb.EncodeStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.EncodeStreamResponse]:
        self._note(request, context)
        ended = self._noted_end(context)  # now: a generator whose call is cancelled is not run on
        yield pb.EncodeStreamResponse(head=pb.EncodedText())
        self.waiting.release()
        ended.wait(timeout=60)

    def Encode(self, request: pb.EncodeRequest, context: grpc.ServicerContext) -> pb.EncodeResponse:  # noqa: N802
        raise NotImplementedError

    def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        raise NotImplementedError

    def _note(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))


def refuse(context: grpc.ServicerContext, code: grpc.StatusCode, reason: str, message: str) -> None:
    """End a call as an attnlens server does."""
    context.set_trailing_metadata((("attnlens-error-reason", reason),))
    context.abort(code, message)
