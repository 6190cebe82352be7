"""The client for ordinary Python. `AsyncClient` is the same for asyncio."""

import time
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

import grpc

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_client import messages, parsing, plans, splitting
from attnlens_client.connection import Attempts, Connection, closed_error
from attnlens_client.errors import AttnlensError, from_rpc_error
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
        options, credentials = self._grpc_options(), self.credentials
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
        """Cancel what is running, which raises AttnlensError there, and close the connection."""
        self._closed = True
        self._channel.close()

    def embed(self, texts: Iterable[Text], **options: Unpack[EmbedOptions]) -> Array:
        """Return one vector for each text: shape (N, D), float32 unless `dtype` says otherwise.

        Args:
            texts: any number; of none the result has shape (0, D).
            options: pooling, normalize, dimensions, prompt_name, prompt, truncate, dtype, model; see
                `EmbedOptions`.

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
        return self._run(self._stub.Embed, plans.embed(texts, **options))

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
        return self._run(self._stub.Encode, plans.encode(texts, **options))

    def stream(self, texts: Iterable[Text], **options: Unpack[EncodeOptions]) -> Generator[EncodedText]:
        """Yield what `encode` returns, one text at a time, whatever its size.

        Holds one text in memory. To stop early, `close()` the iterator or let go of it.

        Raises:
            As `encode`, but never ResponseTooLargeError: here a layer is a message.

        >>> for text in client.stream(["It rained.", "It was wet."]):
        ...     print(text.num_tokens, text.attentions.shape)
        5 (6, 12, 5, 5)
        6 (6, 12, 6, 6)
        """
        return self._assembled(plans.encode(texts, **options))

    def stream_parts(
        self, texts: Iterable[Text], **options: Unpack[EncodeOptions]
    ) -> Generator[HeadPart | LayerPart]:
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
        return self._parts(plans.encode(texts, **options))

    def tokenize(self, texts: Iterable[str], *, model: str = "") -> list[TokenizedText]:
        """Return all tokens of each text, whatever the model's limit, without running the model.

        >>> [token.text for token in client.tokenize(["unbelievable!"])[0].tokens]
        ['[CLS]', 'unbelievable', '!', '[SEP]']
        """
        return self._run(self._stub.Tokenize, plans.tokenize(texts, model))

    def get_model(self, name: str = "") -> ModelInfo:
        """Return sizes, limits, parity figures and versions of a model; "" is the server's only one.

        >>> model = client.get_model()
        >>> model.hidden_size, model.num_layers, model.num_heads, model.pooling
        (384, 6, 12, 'mean')
        """
        [response] = self._call_all(self._stub.GetModel, [(0, pb.GetModelRequest(model=name))], None)
        return self._remembered(name, response.model)

    def list_models(self) -> list[ModelInfo]:
        """Return the models that the server holds.

        >>> len(client.list_models())
        1
        """
        [response] = self._call_all(self._stub.ListModels, [(0, pb.ListModelsRequest())], None)
        return [parsing.model_info(model) for model in response.models]

    def _run(
        self,
        method: "grpc.UnaryUnaryMultiCallable[plans.Request, plans.Response]",
        plan: plans.Plan[plans.Request, plans.Response, plans.Result],
    ) -> plans.Result:
        model = self._model_for(plan)
        requests = plan.requests(model, self.batch_size)
        return plan.parse(self._call_all(method, requests, model), model)

    def _model_for(self, plan: plans.Plan[Any, Any, Any]) -> ModelInfo | None:
        model = self._models.get(plan.model)
        return self.get_model(plan.model) if model is None and plan.needs_model else model

    def _call_all(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_Request, _Response]",
        requests: Iterable[tuple[int, _Request]],
        model: ModelInfo | None,
    ) -> list[_Response]:
        """Make the calls, a few at a time, and return the responses in order."""
        limit = splitting.calls_at_a_time(self.max_in_flight, self.batch_size, model)
        running: deque[_Running[_Request, _Response]] = deque()
        responses: list[_Response] = []

        def start(first: int, request: _Request, attempts: Attempts) -> _Running[_Request, _Response]:
            with self._translated(first):
                call = method.future(request, **self._call_options(attempts))
            return _Running(first, request, attempts, call)

        def wait_for_oldest() -> None:
            oldest = running[0]
            try:
                responses.append(self._result(oldest))
                self._has_answered = True
                running.popleft()
            except AttnlensError as error:
                if not self._may_pass(error):
                    raise
                time.sleep(oldest.attempts.delay_s(error))
                running[0] = start(oldest.first, oldest.request, oldest.attempts)

        try:
            for first, request in requests:
                while len(running) == limit:
                    wait_for_oldest()
                running.append(start(first, request, self._attempts()))
            while running:
                wait_for_oldest()
        finally:
            for each in running:
                each.call.cancel()
        return responses

    def _result(self, running: "_Running[_Request, _Response]") -> _Response:
        try:
            with self._translated(running.first):
                return running.call.result()
        except grpc.FutureCancelledError as error:  # by `close` in another thread, or by the server
            failure = closed_error() if self._closed else from_rpc_error(running.call, running.first)
            raise failure from error

    def _parts(
        self, plan: plans.Plan[pb.EncodeRequest, pb.EncodeResponse, list[EncodedText]]
    ) -> Generator[HeadPart | LayerPart]:
        for first, request in plan.requests(self._model_for(plan), self.batch_size):
            with closing(self._responses(first, pb.EncodeStreamRequest(encode=request))) as responses:
                for response in responses:
                    yield parsing.stream_part(response, first)

    def _responses(self, first: int, request: pb.EncodeStreamRequest) -> Generator[pb.EncodeStreamResponse]:
        """Yield the messages of one streaming call, made again while the first has not come."""
        attempts, received = self._attempts(), 0
        while True:
            try:
                with self._translated(first):
                    stream = self._stub.EncodeStream(request, **self._call_options(attempts))
                    try:
                        for response in stream:
                            received += 1
                            self._has_answered = True
                            yield response
                    finally:
                        stream.cancel()
            except AttnlensError as error:
                if received or not self._may_pass(error):
                    raise
                time.sleep(attempts.delay_s(error))
            else:
                return

    def _assembled(
        self, plan: plans.Plan[pb.EncodeRequest, pb.EncodeResponse, list[EncodedText]]
    ) -> Generator[EncodedText]:
        layers = messages.num_layers(plan.template)
        if layers is None:
            model = self._models.get(plan.model) or self.get_model(plan.model)
            layers = model.num_layers
        assembler = parsing.Assembler(layers)
        with closing(self._parts(plan)) as parts:
            for part in parts:
                text = assembler.add(part)
                if text is not None:
                    yield text
        assembler.finish()
