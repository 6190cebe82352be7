"""The gRPC methods. Each reads as the way of a request: check, tokenize, measure, run, reply.

Everything here runs on the event loop except what is handed to `workers`: tokenizing, and copying
results into messages.
"""

import asyncio
import functools
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from enum import Enum
from typing import Any, ParamSpec, TypeVar

import grpc

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceServicer
from attnlens_server import errors, responses
from attnlens_server.admission import Admission
from attnlens_server.bundle import Bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine import ALL_HEADS, AttentionSelection, Engine, Item, ItemResult, SessionWorker
from attnlens_server.inputs import InputEncoder, portions
from attnlens_server.model_info import describe_model
from attnlens_server.requests import EncodePlan, RequestChecker
from attnlens_server.sizes import ReplySizes
from attnlens_server.text import EncodedInput, TextEncoder, describe_tokens

logger = logging.getLogger(__name__)

STREAM_WINDOW = 32  # texts of one EncodeStream call that wait or run at a time

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
        self.calls.begin(context)
        try:
            self.check_serving()
            return await method(self, request, context)
        except Exception as error:  # noqa: BLE001 - the outermost edge of a call
            failure = _as_request_error(error, method.__name__)
        await context.abort(failure.status, failure.message, errors.trailers(failure))
        raise AssertionError  # abort has raised

    return call


class RunningCalls:
    """Counts the calls that are not over, that is, whose client does not have everything yet."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def begin(self, context: Context) -> None:
        """Count a call until it is over."""
        self._count += 1
        self._none.clear()
        context.add_done_callback(self._end)  # type: ignore[arg-type]  # its stub asks for a class

    async def wait_until_none(self) -> None:
        """Return when no call is running."""
        await self._none.wait()

    def _end(self, _: object) -> None:
        self._count -= 1
        if self._count == 0:
            self._none.set()


class EncoderService(EncoderServiceServicer):
    """`attnlens.v1.EncoderService` for one bundle. The .proto file says what each method does."""

    def __init__(
        self,
        bundle: Bundle,
        config: ServerConfig,
        engine: Engine,
        text_encoder: TextEncoder | None,
        workers: Executor,
        *,
        max_tokens: int,
    ) -> None:
        self.state = State.STARTING
        self.calls = RunningCalls()
        manifest = bundle.manifest
        self._manifest = manifest
        self._dense = bundle.dense
        self._config = config
        self._engine = engine
        self._text_encoder = text_encoder
        self._workers = workers
        self._name = manifest.model_name
        self._max_tokens = max_tokens
        self._checker = RequestChecker(manifest, config, has_tokenizer=text_encoder is not None)
        self._input_encoder = InputEncoder(
            text_encoder, max_tokens, workers, exclude_prompt=manifest.pooling.exclude_prompt
        )
        self._sizes = ReplySizes(manifest.architecture.hidden_size, config.max_message_bytes)
        self._admission = Admission(config.max_queue, max(config.max_reply_bytes, config.max_message_bytes))

    def check_serving(self) -> None:
        """Raise NotReadyError or ShuttingDownError unless requests are welcome."""
        if self.state is State.STARTING:
            raise errors.NotReadyError("the server is starting: try again soon", retry_after_s=0.5)
        if self.state is State.DRAINING:
            raise errors.ShuttingDownError("the server is shutting down: ask another one")

    @guarded
    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        plan = self._checker.check_embed(request)
        worker = self._engine.embeddings
        with self._admission.texts(worker, len(request.inputs)):
            self._admission.reply(self._sizes.check_embed(len(request.inputs), plan), context)
            started = time.monotonic()
            inputs = await self._input_encoder.encode(
                request.inputs, truncate=request.truncate, with_offsets=False, prompt=plan.prompt
            )
            tokenize_s = time.monotonic() - started
            results = await _run(worker, _make_items(inputs, ("last_hidden_state",), context))
            return await self._in_worker(
                responses.embed_response, self._name, inputs, results, plan, self._dense, tokenize_s
            )

    @guarded
    async def Encode(self, request: pb.EncodeRequest, context: Context) -> pb.EncodeResponse:
        plan = self._checker.check_encode(request)
        worker = self._engine.worker(attention=bool(plan.layers))
        with self._admission.texts(worker, len(request.inputs)):
            started = time.monotonic()
            inputs = await self._input_encoder.encode(
                request.inputs, truncate=request.truncate, with_offsets=True
            )
            tokens = await self._in_worker(self._describe, inputs)
            tokenize_s = time.monotonic() - started
            self._admission.reply(self._sizes.check_encode(inputs, tokens, plan), context)
            items = _make_items(inputs, plan.output_names, context, plan.attention_selection)
            results = await _run(worker, items)
            return await self._in_worker(
                responses.encode_response, self._name, inputs, tokens, results, plan, tokenize_s
            )

    @guarded
    async def EncodeStream(  # type: ignore[override]  # grpc.aio takes a coroutine that writes, too
        self, request: pb.EncodeStreamRequest, context: Context
    ) -> None:
        plan = self._checker.check_encode(request.encode, prefix="encode.")
        worker = self._engine.worker(attention=bool(plan.layers))
        with self._admission.texts(worker, min(len(request.encode.inputs), STREAM_WINDOW)):
            started = time.monotonic()
            inputs = await self._input_encoder.encode(
                request.encode.inputs, truncate=request.encode.truncate, with_offsets=True, prefix="encode."
            )
            tokens = await self._in_worker(self._describe, inputs)
            tokenize_s = time.monotonic() - started
            largest_text_bytes = self._sizes.check_parts(inputs, tokens, plan)
            window_bytes = max(self._config.max_message_bytes, largest_text_bytes)
            self._admission.reply(min(window_bytes, largest_text_bytes * len(inputs)), context)
            items = _make_items(inputs, plan.output_names, context, plan.attention_selection)
            results = self._run_in_order(worker, items, plan)
            async with aclosing(results):
                index = 0
                async for result in results:
                    parts = self._parts(inputs[index], tokens[index], result, plan, tokenize_s)
                    async with aclosing(parts):
                        async for part in parts:
                            part.model, part.input_index = self._name, index
                            await self._write(part, context)
                    index += 1

    @guarded
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        self._checker.check_tokenize(request)
        with self._admission.texts(self._engine.embeddings, len(request.texts)):
            results: list[pb.TokenizedText] = []
            size = 0
            for portion in portions(request.texts):
                tokenized = await self._in_worker(self._tokenize, portion)
                results += tokenized
                size += sum(each.ByteSize() for each in tokenized)
                self._sizes.check("the response", size, "send fewer or shorter texts")
            self._admission.reply(size, context)
            return pb.TokenizeResponse(model=self._name, results=results)

    @guarded
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        del request, context
        return pb.ListModelsResponse(models=[self._describe_model()])

    @guarded
    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        del context
        self._checker.check_model(request.model)
        return pb.GetModelResponse(model=self._describe_model())

    # --- in a worker thread -----------------------------------------------------------------------

    async def _in_worker(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._workers, call)

    def _describe(self, inputs: Sequence[EncodedInput]) -> list[list[pb.Token]]:
        return [describe_tokens(each, self._text_encoder) for each in inputs]

    def _tokenize(self, texts: Sequence[str]) -> list[pb.TokenizedText]:
        assert self._text_encoder is not None  # noqa: S101 - the checker refuses texts without a tokenizer
        return [
            pb.TokenizedText(
                tokens=describe_tokens(encoded, self._text_encoder),
                exceeds_max_tokens=encoded.num_tokens > self._max_tokens,
            )
            for encoded in self._text_encoder.encode_whole(texts)
        ]

    # --- streaming --------------------------------------------------------------------------------

    async def _run_in_order(
        self, worker: SessionWorker, items: Sequence[Item], plan: EncodePlan
    ) -> AsyncGenerator[ItemResult]:
        """Yield results in order, a bounded number and size of them under way."""
        waiting = deque(items)
        under_way: deque[Item] = deque()
        try:
            while waiting or under_way:
                while waiting and self._has_room(under_way, waiting[0], plan):
                    under_way.append(waiting.popleft())
                    worker.queue.put([under_way[-1]])
                yield await asyncio.wrap_future(under_way[0].future)
                under_way.popleft()
        finally:
            for item in under_way:
                item.future.cancel()

    def _has_room(self, under_way: Sequence[Item], item: Item, plan: EncodePlan) -> bool:
        if not under_way:
            return True
        cells = sum(each.num_tokens**2 for each in (*under_way, item))
        size = 4 * plan.num_head_maps * len(plan.layers) * cells
        return len(under_way) < STREAM_WINDOW and size <= self._config.max_message_bytes

    async def _parts(
        self,
        encoded: EncodedInput,
        tokens: Sequence[pb.Token],
        result: ItemResult,
        plan: EncodePlan,
        tokenize_s: float,
    ) -> AsyncGenerator[pb.EncodeStreamResponse]:
        yield await self._in_worker(responses.stream_head, encoded, tokens, result, plan, tokenize_s)
        for layer in plan.layers:
            yield await self._in_worker(responses.stream_attention, result, plan, layer)

    async def _write(self, part: pb.EncodeStreamResponse, context: Context) -> None:
        """Send a message; returns when the connection has room for the next."""
        try:
            await asyncio.wait_for(context.write(part), self._config.stall_timeout_s)
        except grpc.aio.InternalError as error:  # the client has left: nobody to tell, nothing wrong here
            raise asyncio.CancelledError from error
        except TimeoutError as error:
            raise errors.SlowReaderError(
                f"the client read nothing for {self._config.stall_timeout_s:g} s: read messages as they come"
            ) from error

    def _describe_model(self) -> pb.Model:
        return describe_model(
            self._manifest,
            self._config,
            self._engine,
            max_tokens=self._max_tokens,
        )


async def _run(worker: SessionWorker, items: Sequence[Item]) -> list[ItemResult]:
    """Run all items. Where one fails or the call is cancelled, those that still wait are dropped."""
    worker.queue.put(items)
    try:
        return await asyncio.gather(*(asyncio.wrap_future(item.future) for item in items))
    finally:
        for item in items:
            item.future.cancel()  # no effect on what runs or is done


def _make_items(
    inputs: Sequence[EncodedInput],
    output_names: tuple[str, ...],
    context: Context,
    attention: AttentionSelection = ALL_HEADS,
) -> list[Item]:
    remaining_s = context.time_remaining()
    deadline = None if remaining_s is None else time.monotonic() + remaining_s
    return [Item(each.input_ids, output_names, deadline, attention) for each in inputs]
