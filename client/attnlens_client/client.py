"""The client for ordinary Python. `AsyncClient` is the same for asyncio."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar, Unpack

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


@dataclass(frozen=True, slots=True)
class _Running(Generic[_Request, _Response]):
    """A call under way: the number of its first text, and what it takes to make it again."""

    first: int
    request: _Request
    attempts: Attempts
    call: "grpc.Future[_Response]"


class Client(Connection):
    """A connection to an attnlens server, for use from any number of threads.

    Each method sends as many calls as the server's limits make necessary, a few at a time, and
    returns results in the order of the texts. A text is a str or a sequence of token ids. Failures
    are the exceptions of `attnlens_client.errors`.

    >>> with Client(address) as client:
    ...     client.embed(["The cat sat.", "It rained."]).shape
    (2, 384)
    """

    def _open(self) -> None:
        options, credentials = self._channel_options(), self.settings.credentials
        self._channel = (
            grpc.insecure_channel(self.address, options)
            if credentials is None
            else grpc.secure_channel(self.address, credentials, options)
        )
        self._stub = EncoderServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is running and close the connection."""
        self._channel.close()

    def embed(self, texts: Iterable[Text], **options: Unpack[EmbedOptions]) -> Array:
        """Return one vector for each text: shape (N, D), float32 unless `dtype` says otherwise.

        Args:
            texts: any number; of none the result has shape (0, D).
            options: pooling, normalize, dimensions, truncate, dtype, model; see `EmbedOptions`.

        Raises:
            TypeError, ValueError: an argument is wrong whatever the server.
            InputTooLongError: a text is too long and `truncate` is not set.
            AttnlensError: the call failed.

        >>> client.embed(["Ottawa is in Canada."], normalize=True, dtype="float16").dtype
        dtype('float16')
        """
        return self.embed_with_usage(texts, **options).vectors

    def embed_with_usage(self, texts: Iterable[Text], **options: Unpack[EmbedOptions]) -> Embeddings:
        """Return the vectors together with the number of tokens of each text. See `embed`.

        >>> client.embed_with_usage(["Hello, world!"]).usages
        (Usage(num_tokens=6, num_tokens_total=6, truncated=False),)
        """
        inputs, template = messages.inputs(texts), messages.embed_request(**options)
        if not inputs:
            return parsing.no_embeddings(template, self.get_model(template.model))
        model = self._model_for(template.model, len(inputs))
        requests = splitting.embed_requests(template, inputs, model, self.settings.batch_size)
        return parsing.embeddings(self._call_all(self._stub.Embed, requests, model))

    def encode(self, texts: Iterable[Text], **options: Unpack[EncodeOptions]) -> list[EncodedText]:
        """Return tokens, token vectors (T, D) and attention weights (L', H', T, T) for each text.

        Args:
            texts: any number.
            options: layers, heads, head_reduction, hidden_states, attentions, truncate, dtype, model;
                see `EncodeOptions`.

        Raises:
            TypeError, ValueError: an argument is wrong whatever the server.
            InputTooLongError: a text is too long and `truncate` is not set.
            ResponseTooLargeError: the result of one text is over the server's limit: use `stream`.
            AttnlensError: the call failed.

        >>> [text] = client.encode(["It rained."], layers=[-1], head_reduction="mean")
        >>> [token.text for token in text.tokens]
        ['[CLS]', 'it', 'rained', '.', '[SEP]']
        >>> text.hidden_states.shape, text.attentions.shape, text.layers
        ((5, 384), (1, 1, 5, 5), (5,))
        """
        inputs, template = messages.inputs(texts), messages.encode_request(**options)
        if not inputs:
            return []
        model = self._model_for(template.model, len(inputs))
        requests = splitting.encode_requests(template, inputs, model, self.settings.batch_size)
        return parsing.encoded_texts(self._call_all(self._stub.Encode, requests, model))

    def stream(self, texts: Iterable[Text], **options: Unpack[EncodeOptions]) -> Iterator[EncodedText]:
        """Yield what `encode` returns, one text at a time, whatever its size.

        Holds one text in memory. To stop early, `close()` the iterator or let go of it.

        Raises:
            As `encode`, but never ResponseTooLargeError: here a layer is a message.

        >>> for text in client.stream(["It rained.", "It was wet."]):
        ...     print(text.num_tokens, text.attentions.shape)
        5 (6, 12, 5, 5)
        6 (6, 12, 6, 6)
        """
        parts, template = self.stream_parts(texts, **options), messages.encode_request(**options)
        return self._assembled(parts, template)

    def stream_parts(
        self, texts: Iterable[Text], **options: Unpack[EncodeOptions]
    ) -> Iterator[HeadPart | LayerPart]:
        """Yield for each text its head, then its attention weights layer by layer, (H', T, T) each.

        Holds one layer in memory.

        >>> for part in client.stream_parts(["It rained."], layers=[0, -1]):
        ...     match part:
        ...         case HeadPart():
        ...             print(part.text.num_tokens)
        ...         case LayerPart():
        ...             print(part.layer, part.weights.shape)
        5
        0 (12, 5, 5)
        5 (12, 5, 5)
        """
        inputs, template = messages.inputs(texts), messages.encode_request(**options)
        return self._parts(inputs, template)

    def tokenize(self, texts: Iterable[str], *, model: str = "") -> list[TokenizedText]:
        """Return all tokens of each text, whatever the model's limit, without running the model.

        >>> [token.text for token in client.tokenize(["unbelievable!"])[0].tokens]
        ['[CLS]', 'unbelievable', '!', '[SEP]']
        """
        strings = messages.strings(texts)
        if not strings:
            return []
        info = self._model_for(model, len(strings))
        requests = splitting.tokenize_requests(strings, model, info, self.settings.batch_size)
        return parsing.tokenized_texts(self._call_all(self._stub.Tokenize, requests, info))

    def get_model(self, name: str = "") -> ModelInfo:
        """Return sizes, limits, parity figures and versions of a model; "" is the server's only one.

        >>> model = client.get_model()
        >>> model.hidden_size, model.num_layers, model.num_heads, model.pooling
        (384, 6, 12, 'mean')
        """
        [response] = self._call_all(self._stub.GetModel, [(0, pb.GetModelRequest(model=name))], None)
        self._models[name] = parsing.model_info(response.model)
        return self._models[name]

    def list_models(self) -> list[ModelInfo]:
        """Return the models that the server holds.

        >>> len(client.list_models())
        1
        """
        [response] = self._call_all(self._stub.ListModels, [(0, pb.ListModelsRequest())], None)
        return [parsing.model_info(model) for model in response.models]

    def _model_for(self, name: str, num_texts: int) -> ModelInfo | None:
        """Return the model whose limits decide how to split; one text needs none."""
        return None if num_texts == 1 else self._models.get(name) or self.get_model(name)

    def _call_all(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_Request, _Response]",
        requests: Iterable[tuple[int, _Request]],
        model: ModelInfo | None,
    ) -> list[_Response]:
        """Make the calls, a few at a time, and return the responses in order."""
        limit = splitting.max_in_flight(self.settings, model)
        running: deque[_Running[_Request, _Response]] = deque()
        responses: list[_Response] = []

        def start(first: int, request: _Request, attempts: Attempts) -> _Running[_Request, _Response]:
            call = method.future(request, **self._call_options(attempts))
            return _Running(first, request, attempts, call)

        def wait_for_oldest() -> None:
            oldest = running[0]
            try:
                with translated(oldest.first):
                    responses.append(oldest.call.result())
                running.popleft()
            except OverloadedError as error:
                time.sleep(oldest.attempts.delay_s(error))
                running[0] = start(oldest.first, oldest.request, oldest.attempts)

        try:
            for first, request in requests:
                while len(running) == limit:
                    wait_for_oldest()
                running.append(start(first, request, Attempts(self.settings)))
            while running:
                wait_for_oldest()
        finally:
            for each in running:
                each.call.cancel()
        return responses

    def _parts(
        self, inputs: Sequence[pb.Input], template: pb.EncodeRequest
    ) -> Iterator[HeadPart | LayerPart]:
        if not inputs:
            return
        model = self._model_for(template.model, len(inputs))
        for first, request in splitting.encode_requests(template, inputs, model, self.settings.batch_size):
            for response in self._responses(first, pb.EncodeStreamRequest(encode=request)):
                yield parsing.stream_part(response, first)

    def _responses(self, first: int, request: pb.EncodeStreamRequest) -> Iterator[pb.EncodeStreamResponse]:
        """Yield the messages of one streaming call, made again while the server is overloaded."""
        attempts, received = Attempts(self.settings), 0
        while True:
            stream = self._stub.EncodeStream(request, **self._call_options(attempts))
            try:
                with translated(first):
                    for response in stream:
                        received += 1
                        yield response
            except OverloadedError as error:
                if received:
                    raise
                time.sleep(attempts.delay_s(error))
            else:
                return
            finally:
                stream.cancel()

    def _assembled(
        self, parts: Iterator[HeadPart | LayerPart], template: pb.EncodeRequest
    ) -> Iterator[EncodedText]:
        layers = messages.num_layers(template)
        if layers is None:
            model = self._models.get(template.model) or self.get_model(template.model)
            layers = model.num_layers
        assembler = parsing.Assembler(layers)
        for part in parts:
            text = assembler.add(part)
            if text is not None:
                yield text
        assembler.finish()
