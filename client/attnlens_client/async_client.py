"""The client for asyncio. `Client` is the same for ordinary Python."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_client import messages, parsing, splitting
from attnlens_client.attempts import Attempts
from attnlens_client.connection import Connection
from attnlens_client.errors import OverloadedError, translated
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
        options, credentials = self._channel_options(), self.settings.credentials
        self._channel = (
            grpc.aio.insecure_channel(self.address, options)
            if credentials is None
            else grpc.aio.secure_channel(self.address, credentials, options)
        )
        self._stub = EncoderServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is running and close the connection."""
        await self._channel.close()

    async def embed(self, texts: Iterable[Text], **options: Unpack[EmbedOptions]) -> Array:
        """Return one vector for each text: shape (N, D). See `Client.embed`."""
        return (await self.embed_with_usage(texts, **options)).vectors

    async def embed_with_usage(self, texts: Iterable[Text], **options: Unpack[EmbedOptions]) -> Embeddings:
        """Return the vectors together with the number of tokens of each text. See `Client.embed`."""
        inputs, template = messages.inputs(texts), messages.embed_request(**options)
        if not inputs:
            return parsing.no_embeddings(template, await self.get_model(template.model))
        model = await self._model_for(template.model, len(inputs))
        requests = splitting.embed_requests(template, inputs, model, self.settings.batch_size)
        return parsing.embeddings(await self._call_all(self._stub.Embed, requests, model))

    async def encode(self, texts: Iterable[Text], **options: Unpack[EncodeOptions]) -> list[EncodedText]:
        """Return tokens, token vectors and attention weights for each text. See `Client.encode`."""
        inputs, template = messages.inputs(texts), messages.encode_request(**options)
        if not inputs:
            return []
        model = await self._model_for(template.model, len(inputs))
        requests = splitting.encode_requests(template, inputs, model, self.settings.batch_size)
        return parsing.encoded_texts(await self._call_all(self._stub.Encode, requests, model))

    def stream(self, texts: Iterable[Text], **options: Unpack[EncodeOptions]) -> AsyncIterator[EncodedText]:
        """Yield what `encode` returns, one text at a time, whatever its size. See `Client.stream`.

        To stop early, close the iterator: `async with contextlib.aclosing(client.stream(...))`.
        """
        parts, template = self.stream_parts(texts, **options), messages.encode_request(**options)
        return self._assembled(parts, template)

    def stream_parts(
        self, texts: Iterable[Text], **options: Unpack[EncodeOptions]
    ) -> AsyncIterator[HeadPart | LayerPart]:
        """Yield for each text its head, then its attention weights by layer. See `Client.stream_parts`."""
        inputs, template = messages.inputs(texts), messages.encode_request(**options)
        return self._parts(inputs, template)

    async def tokenize(self, texts: Iterable[str], *, model: str = "") -> list[TokenizedText]:
        """Return all tokens of each text, whatever the model's limit, without running the model."""
        strings = messages.strings(texts)
        if not strings:
            return []
        info = await self._model_for(model, len(strings))
        requests = splitting.tokenize_requests(strings, model, info, self.settings.batch_size)
        return parsing.tokenized_texts(await self._call_all(self._stub.Tokenize, requests, info))

    async def get_model(self, name: str = "") -> ModelInfo:
        """Return sizes, limits, parity figures and versions of a model; "" is the server's only one."""
        [response] = await self._call_all(self._stub.GetModel, [(0, pb.GetModelRequest(model=name))], None)
        self._models[name] = parsing.model_info(response.model)
        return self._models[name]

    async def list_models(self) -> list[ModelInfo]:
        """Return the models that the server holds."""
        [response] = await self._call_all(self._stub.ListModels, [(0, pb.ListModelsRequest())], None)
        return [parsing.model_info(model) for model in response.models]

    async def _model_for(self, name: str, num_texts: int) -> ModelInfo | None:
        """Return the model whose limits decide how to split; one text needs none."""
        return None if num_texts == 1 else self._models.get(name) or await self.get_model(name)

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

        limit = splitting.max_in_flight(self.settings, model)
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
        """Make one call, again while the server is overloaded. `first` is the number of its first text."""
        attempts = Attempts(self.settings)
        while True:
            try:
                with translated(first):
                    return await method(request, **self._call_options(attempts))
            except OverloadedError as error:
                await asyncio.sleep(attempts.delay_s(error))

    async def _parts(
        self, inputs: Sequence[pb.Input], template: pb.EncodeRequest
    ) -> AsyncIterator[HeadPart | LayerPart]:
        if not inputs:
            return
        model = await self._model_for(template.model, len(inputs))
        for first, request in splitting.encode_requests(template, inputs, model, self.settings.batch_size):
            async with aclosing(self._responses(first, pb.EncodeStreamRequest(encode=request))) as responses:
                async for response in responses:
                    yield parsing.stream_part(response, first)

    async def _responses(
        self, first: int, request: pb.EncodeStreamRequest
    ) -> AsyncGenerator[pb.EncodeStreamResponse]:
        """Yield the messages of one streaming call, made again while the server is overloaded."""
        attempts, received = Attempts(self.settings), 0
        while True:
            stream = self._stub.EncodeStream(request, **self._call_options(attempts))
            try:
                with translated(first):
                    async for response in stream:
                        received += 1
                        yield response
            except OverloadedError as error:
                if received:
                    raise
                await asyncio.sleep(attempts.delay_s(error))
            else:
                return
            finally:
                stream.cancel()

    async def _assembled(
        self, parts: AsyncIterator[HeadPart | LayerPart], template: pb.EncodeRequest
    ) -> AsyncIterator[EncodedText]:
        layers = messages.num_layers(template)
        if layers is None:
            model = self._models.get(template.model) or await self.get_model(template.model)
            layers = model.num_layers
        assembler = parsing.Assembler(layers)
        async for part in parts:
            text = assembler.add(part)
            if text is not None:
                yield text
        assembler.finish()
