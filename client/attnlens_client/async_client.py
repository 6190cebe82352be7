"""The client for asyncio. `Client` is the same for ordinary Python."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_client import messages, parsing, plans, splitting
from attnlens_client.connection import Connection, closed_error
from attnlens_client.errors import AttnlensError
from attnlens_client.messages import EmbedOptions, EncodeOptions, Text
from attnlens_client.results import (
    Array,
    Embeddings,
    EncodedText,
    HeadPart,
    LayerPart,
    ModelInfo,
    TokenizedText,
)

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class AsyncClient(Connection):
    """A connection to an attnlens server, for one event loop and any number of its tasks.

    Make it where the loop is running. Methods, arguments and failures are those of `Client`.

    >>> async def main():
    ...     async with AsyncClient(address) as client:
    ...         return await asyncio.gather(client.embed(["The cat sat."]), client.embed(["It rained."]))
    >>> [vectors.shape for vectors in asyncio.run(main())]
    [(1, 384), (1, 384)]
    """

    def _open(self) -> None:
        options, credentials = self._grpc_options(), self.credentials
        self._channel = (
            grpc.aio.insecure_channel(self.address, options)
            if credentials is None
            else grpc.aio.secure_channel(self.address, credentials, options)
        )
        self._stub = EncoderServiceStub(self._channel)
        self._calls: set[grpc.aio.Call] = set()  # those under way

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is running, which raises AttnlensError there, and close the connection."""
        self._closed = True
        for call in tuple(self._calls):
            call.cancel()
        await self._channel.close()

    async def embed(self, texts: Iterable[Text], **options: Unpack[EmbedOptions]) -> Array:
        """Return one vector for each text: shape (N, D). See `Client.embed`."""
        return (await self.embed_with_usage(texts, **options)).vectors

    async def embed_with_usage(self, texts: Iterable[Text], **options: Unpack[EmbedOptions]) -> Embeddings:
        """Return the vectors together with the number of tokens of each text. See `Client.embed`."""
        return await self._run(self._stub.Embed, plans.embed(texts, **options))

    async def encode(self, texts: Iterable[Text], **options: Unpack[EncodeOptions]) -> list[EncodedText]:
        """Return tokens, token vectors and attention weights for each text. See `Client.encode`."""
        return await self._run(self._stub.Encode, plans.encode(texts, **options))

    def stream(self, texts: Iterable[Text], **options: Unpack[EncodeOptions]) -> AsyncGenerator[EncodedText]:
        """Yield what `encode` returns, one text at a time, whatever its size. See `Client.stream`.

        To stop early, close the iterator: `async with contextlib.aclosing(client.stream(...))`.
        """
        return self._assembled(plans.encode(texts, **options))

    def stream_parts(
        self, texts: Iterable[Text], **options: Unpack[EncodeOptions]
    ) -> AsyncGenerator[HeadPart | LayerPart]:
        """Yield for each text its head, then its attention weights by layer. See `Client.stream_parts`."""
        return self._parts(plans.encode(texts, **options))

    async def tokenize(self, texts: Iterable[str], *, model: str = "") -> list[TokenizedText]:
        """Return all tokens of each text, whatever the model's limit, without running the model."""
        return await self._run(self._stub.Tokenize, plans.tokenize(texts, model))

    async def get_model(self, name: str = "") -> ModelInfo:
        """Return sizes, limits, parity figures and versions of a model; "" is the server's only one."""
        [response] = await self._call_all(self._stub.GetModel, [(0, pb.GetModelRequest(model=name))], None)
        return self._remembered(name, response.model)

    async def list_models(self) -> list[ModelInfo]:
        """Return the models that the server holds."""
        [response] = await self._call_all(self._stub.ListModels, [(0, pb.ListModelsRequest())], None)
        return [parsing.model_info(model) for model in response.models]

    async def _run(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[plans.Request, plans.Response]",
        plan: plans.Plan[plans.Request, plans.Response, plans.Result],
    ) -> plans.Result:
        model = await self._model_for(plan)
        requests = plan.requests(model, self.batch_size)
        return plan.parse(await self._call_all(method, requests, model), model)

    async def _model_for(self, plan: plans.Plan[Any, Any, Any]) -> ModelInfo | None:
        model = self._models.get(plan.model)
        return await self.get_model(plan.model) if model is None and plan.needs_model else model

    async def _call_all(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]",
        requests: Iterable[tuple[int, _Request]],
        model: ModelInfo | None,
    ) -> list[_Response]:
        """Make the calls, a few at a time, and return the responses in order."""
        shared = iter(requests)  # each worker takes the next call
        responses: dict[int, _Response] = {}  # by the number of the first text

        async def worker() -> None:
            for first, request in shared:
                responses[first] = await self._call(method, first, request)
                self._has_answered = True

        limit = splitting.calls_at_a_time(self.max_in_flight, self.batch_size, model)
        workers = [asyncio.ensure_future(worker()) for _ in range(limit)]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()
        return [responses[first] for first in sorted(responses)]

    async def _call(
        self, method: "grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]", first: int, request: _Request
    ) -> _Response:
        """Make one call, again while that may help. `first` is the number of its first text."""
        attempts = self._attempts()
        while True:
            try:
                with self._translated(first):
                    call = method(request, **self._call_options(attempts))
                    with self._running(call):
                        return await call
            except AttnlensError as error:
                if not self._may_pass(error):
                    raise
                await asyncio.sleep(attempts.delay_s(error))

    @contextmanager
    def _running(self, call: grpc.aio.Call) -> Iterator[None]:
        """Cancel `call` when the block is left, or by `close`, which is not the waiting task's own end."""
        self._calls.add(call)
        try:
            yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise closed_error() from error
        finally:
            self._calls.discard(call)
            call.cancel()

    async def _parts(
        self, plan: plans.Plan[pb.EncodeRequest, pb.EncodeResponse, list[EncodedText]]
    ) -> AsyncGenerator[HeadPart | LayerPart]:
        for first, request in plan.requests(await self._model_for(plan), self.batch_size):
            async with aclosing(self._responses(first, pb.EncodeStreamRequest(encode=request))) as responses:
                async for response in responses:
                    yield parsing.stream_part(response, first)

    async def _responses(
        self, first: int, request: pb.EncodeStreamRequest
    ) -> AsyncGenerator[pb.EncodeStreamResponse]:
        """Yield the messages of one streaming call, made again while the first has not come."""
        attempts, received = self._attempts(), 0
        while True:
            try:
                with self._translated(first):
                    stream = self._stub.EncodeStream(request, **self._call_options(attempts))
                    with self._running(stream):
                        async for response in stream:
                            received += 1
                            self._has_answered = True
                            yield response
            except AttnlensError as error:
                if received or not self._may_pass(error):
                    raise
                await asyncio.sleep(attempts.delay_s(error))
            else:
                return

    async def _assembled(
        self, plan: plans.Plan[pb.EncodeRequest, pb.EncodeResponse, list[EncodedText]]
    ) -> AsyncGenerator[EncodedText]:
        layers = messages.num_layers(plan.template)
        if layers is None:
            model = self._models.get(plan.model) or await self.get_model(plan.model)
            layers = model.num_layers
        assembler = parsing.Assembler(layers)
        async with aclosing(self._parts(plan)) as parts:
            async for part in parts:
                text = assembler.add(part)
                if text is not None:
                    yield text
        assembler.finish()
