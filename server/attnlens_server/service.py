"""The gRPC methods. Each reads as the way of a request: check, tokenize, run, reply.

Everything here runs on the event loop except what is handed to `workers`: tokenizing, and copying
results into messages.
"""

import asyncio
import functools
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from enum import Enum
from typing import Any, ParamSpec, TypeVar

import grpc
import numpy as np

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceServicer
from attnlens_server import errors, responses
from attnlens_server.bundle import Bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine, Item, ItemResult
from attnlens_server.model_info import describe_model
from attnlens_server.requests import EncodePlan, RequestChecker
from attnlens_server.text import EncodedInput, TextEncoder, describe_tokens

logger = logging.getLogger(__name__)

STREAM_WINDOW = 32  # texts of one EncodeStream call that wait or run at a time
MESSAGE_OVERHEAD_BYTES = 128  # of a text in a reply: field tags, lengths, usage, numbers of layers and heads

P = ParamSpec("P")
R = TypeVar("R")
Context = grpc.aio.ServicerContext[Any, Any]


class State(Enum):
    """Where the server is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


def _as_request_error(error: Exception, method: str) -> errors.RequestError:
    if isinstance(error, errors.RequestError):
        return error
    error_id = secrets.token_hex(6)
    logger.error("%s failed, error id %s", method, error_id, exc_info=error)
    return errors.InternalError(
        f"the server failed; its log has more under error id {error_id}", metadata={"error_id": error_id}
    )


def guarded(
    method: Callable[["EncoderService", Any, Context], Awaitable[R]],
) -> Callable[["EncoderService", Any, Context], Awaitable[R]]:
    """Refuse while the server is not serving, and turn exceptions into statuses with details."""

    @functools.wraps(method)
    async def call(self: "EncoderService", request: Any, context: Context) -> R:  # noqa: ANN401 - any request
        try:
            self.check_serving()
            return await method(self, request, context)
        except Exception as error:  # noqa: BLE001 - the outermost edge of a call
            failure = _as_request_error(error, method.__name__)
        await context.abort(failure.status, failure.message, errors.trailers(failure))
        raise AssertionError  # abort has raised

    return call


class EncoderService(EncoderServiceServicer):
    """`attnlens.v1.EncoderService` for one bundle. The .proto file says what each method does."""

    def __init__(
        self,
        bundle: Bundle,
        config: ServerConfig,
        engine: Engine,
        text_encoder: TextEncoder | None,
        workers: Executor,
    ) -> None:
        self.state = State.STARTING
        self._bundle = bundle
        self._config = config
        self._engine = engine
        self._text_encoder = text_encoder
        self._workers = workers
        self._name = bundle.manifest.model_name
        self._max_tokens = config.max_tokens or bundle.manifest.max_tokens
        self._checker = RequestChecker(bundle.manifest, config, has_tokenizer=text_encoder is not None)

    def check_serving(self) -> None:
        """Raise NotReadyError or ShuttingDownError unless requests are welcome."""
        if self.state is State.STARTING:
            raise errors.NotReadyError("the server is starting: try again soon", retry_after_s=0.5)
        if self.state is State.DRAINING:
            raise errors.ShuttingDownError("the server is shutting down: ask another one")

    @guarded
    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        plan = self._checker.check_embed(request)
        with self._engine.reserve(len(request.inputs)):
            started = time.monotonic()
            inputs = await self._encode_inputs(request.inputs, truncate=request.truncate, with_offsets=False)
            tokenize_s = time.monotonic() - started
            items = _make_items(inputs, ("last_hidden_state",), context)
            results = await self._run(items, attention=False)
            return await self._in_worker(
                responses.embed_response, self._name, inputs, results, plan, tokenize_s
            )

    @guarded
    async def Encode(self, request: pb.EncodeRequest, context: Context) -> pb.EncodeResponse:
        plan = self._checker.check_encode(request)
        with self._engine.reserve(len(request.inputs)):
            started = time.monotonic()
            inputs = await self._encode_inputs(request.inputs, truncate=request.truncate, with_offsets=True)
            tokens = await self._in_worker(self._describe, inputs)
            tokenize_s = time.monotonic() - started
            self._check_response_size(inputs, tokens, plan)
            items = _make_items(inputs, plan.output_names, context)
            results = await self._run(items, attention=bool(plan.layers))
            return await self._in_worker(
                responses.encode_response, self._name, inputs, tokens, results, plan, tokenize_s
            )

    @guarded
    async def EncodeStream(  # type: ignore[override]  # grpc.aio takes a coroutine that writes, too
        self, request: pb.EncodeStreamRequest, context: Context
    ) -> None:
        plan = self._checker.check_encode(request.encode, prefix="encode.")
        with self._engine.reserve(min(len(request.encode.inputs), STREAM_WINDOW)):
            started = time.monotonic()
            inputs = await self._encode_inputs(
                request.encode.inputs, truncate=request.encode.truncate, with_offsets=True, prefix="encode."
            )
            tokenize_s = time.monotonic() - started
            self._check_part_sizes(inputs, plan)
            items = _make_items(inputs, plan.output_names, context)
            index = 0
            async for result in self._run_in_order(items, plan):
                async for part in self._parts(inputs[index], result, plan, tokenize_s):
                    part.model, part.input_index = self._name, index
                    await context.write(part)  # waits for a slow reader
                index += 1

    @guarded
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        del context
        self._checker.check_tokenize(request)
        return await self._in_worker(self._tokenize, request.texts)

    @guarded
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        del request, context
        return pb.ListModelsResponse(models=[self._describe_model()])

    @guarded
    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        del context
        self._checker.check_model(request.model)
        return pb.GetModelResponse(model=self._describe_model())

    # --- tokenizing -------------------------------------------------------------------------------

    async def _encode_inputs(
        self, inputs: Sequence[pb.Input], *, truncate: bool, with_offsets: bool, prefix: str = ""
    ) -> list[EncodedInput]:
        """Tokenize the texts among the inputs; refuse or cut what is too long."""
        texts = [each.text for each in inputs if each.HasField("text")]
        encoded_texts: list[EncodedInput] = []
        if texts and self._text_encoder is not None:
            encode = functools.partial(self._text_encoder.encode, with_offsets=with_offsets)
            encoded_texts = await self._in_worker(encode, texts)
        from_text = iter(encoded_texts)
        encoded = [
            next(from_text) if each.HasField("text") else self._encode_ids(each.token_ids.ids)
            for each in inputs
        ]
        for index, each in enumerate(encoded):
            if each.num_tokens_total > self._max_tokens and not truncate:
                raise errors.InputTooLongError(
                    f"{prefix}inputs[{index}]", each.num_tokens_total, self._max_tokens
                )
        return encoded

    def _encode_ids(self, ids: Sequence[int]) -> EncodedInput:
        return EncodedInput(np.asarray(ids[: self._max_tokens], dtype=np.int64), len(ids))

    def _describe(self, inputs: Sequence[EncodedInput]) -> list[list[pb.Token]]:
        return [describe_tokens(each, self._text_encoder) for each in inputs]

    def _tokenize(self, texts: Sequence[str]) -> pb.TokenizeResponse:
        assert self._text_encoder is not None  # noqa: S101 - the checker refuses texts without a tokenizer
        results = [
            pb.TokenizedText(
                tokens=describe_tokens(encoded, self._text_encoder),
                exceeds_max_tokens=encoded.num_tokens > self._max_tokens,
            )
            for encoded in self._text_encoder.encode_whole(texts)
        ]
        return pb.TokenizeResponse(model=self._name, results=results)

    # --- sizes, known before the model runs -------------------------------------------------------

    def _text_bytes(self, encoded: EncodedInput, plan: EncodePlan) -> int:
        """The size of a text's reply without its tokens and attention."""
        hidden_size = self._bundle.manifest.architecture.hidden_size
        return MESSAGE_OVERHEAD_BYTES + plan.hidden_bytes(encoded.num_tokens, hidden_size)

    def _check_response_size(
        self, inputs: Sequence[EncodedInput], tokens: Sequence[Sequence[pb.Token]], plan: EncodePlan
    ) -> None:
        size = sum(
            self._text_bytes(encoded, plan)
            + len(plan.layers) * plan.layer_bytes(encoded.num_tokens)
            + sum(token.ByteSize() + 4 for token in each_tokens)
            for encoded, each_tokens in zip(inputs, tokens, strict=True)
        )
        if size > self._config.max_message_bytes:
            raise errors.ResponseTooLargeError(
                "the response",
                size,
                self._config.max_message_bytes,
                "use EncodeStream, or ask for fewer texts, layers or heads, the mean over heads, "
                "or DATA_TYPE_FLOAT16",
            )

    def _check_part_sizes(self, inputs: Sequence[EncodedInput], plan: EncodePlan) -> None:
        limit = self._config.max_message_bytes
        for index, encoded in enumerate(inputs):
            layer_bytes = plan.layer_bytes(encoded.num_tokens) if plan.layers else 0
            size = max(self._text_bytes(encoded, plan), layer_bytes + MESSAGE_OVERHEAD_BYTES)
            if size > limit:
                raise errors.ResponseTooLargeError(
                    f"one layer of encode.inputs[{index}]",
                    size,
                    limit,
                    "ask for fewer heads, the mean over heads or DATA_TYPE_FLOAT16, or start the server "
                    "with a larger --max-message-bytes",
                )

    # --- running ----------------------------------------------------------------------------------

    async def _run(self, items: Sequence[Item], *, attention: bool) -> list[ItemResult]:
        """Run all items. Where one fails or the call is cancelled, those that still wait are dropped."""
        futures = self._engine.submit(items, attention=attention)
        try:
            return await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        finally:
            for future in futures:
                future.cancel()  # no effect on what runs or is done

    async def _run_in_order(self, items: Sequence[Item], plan: EncodePlan) -> AsyncIterator[ItemResult]:
        """Yield results in order, a bounded number and size of them under way."""
        waiting = deque(items)
        under_way: deque[Item] = deque()
        try:
            while waiting or under_way:
                while waiting and self._has_room(under_way, waiting[0], plan):
                    item = waiting.popleft()
                    under_way.append(item)
                    self._engine.submit([item], attention=bool(plan.layers))
                yield await asyncio.wrap_future(under_way[0].future)
                under_way.popleft()
        finally:
            for item in under_way:
                item.future.cancel()

    def _has_room(self, under_way: Sequence[Item], item: Item, plan: EncodePlan) -> bool:
        if not under_way:
            return True
        num_heads = self._bundle.manifest.architecture.num_heads
        cells = sum(each.num_tokens**2 for each in (*under_way, item))
        size = 4 * num_heads * len(plan.layers) * cells
        return len(under_way) < STREAM_WINDOW and size <= self._config.max_message_bytes

    async def _parts(
        self, encoded: EncodedInput, result: ItemResult, plan: EncodePlan, tokenize_s: float
    ) -> AsyncIterator[pb.EncodeStreamResponse]:
        tokens = await self._in_worker(describe_tokens, encoded, self._text_encoder)
        head = await self._in_worker(responses.encoded_text, encoded, tokens, result, plan)
        yield pb.EncodeStreamResponse(head=head, timings=responses.timings(tokenize_s, [result]))
        for layer in plan.layers:
            attention = await self._in_worker(responses.attention, result, plan, (layer,))
            yield pb.EncodeStreamResponse(attention=attention)

    async def _in_worker(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._workers, call)

    def _describe_model(self) -> pb.Model:
        return describe_model(self._bundle.manifest, self._config, self._engine.execution_providers)


def _make_items(
    inputs: Sequence[EncodedInput], output_names: tuple[str, ...], context: Context
) -> list[Item]:
    remaining_s = context.time_remaining()
    deadline = None if remaining_s is None else time.monotonic() + remaining_s
    return [Item(each.input_ids, output_names, deadline) for each in inputs]
