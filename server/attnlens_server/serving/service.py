"""The gRPC methods. Each reads as the way of a request: check, tokenize, measure, run, reply.

Everything here runs on the event loop except what is handed to `workers`: checks of large requests,
tokenizing, and copying results into messages.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from enum import Enum
from typing import ParamSpec, TypeVar

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_server import errors, responses
from attnlens_server.admission import Admission
from attnlens_server.bundle import Bundle
from attnlens_server.calls import SMALL_BYTES, Call
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine, Item, ItemResult, SessionWorker, TokenPooling
from attnlens_server.inputs import EncodeOptions, InputEncoder, portions
from attnlens_server.model_info import ModelDescriber
from attnlens_server.requests import EmbedPlan, EncodePlan, RequestChecker
from attnlens_server.sizes import (
    MAKING_COPIES,
    MESSAGE_COPIES,
    SENDING_COPIES,
    TEXT_MEMORY_BYTES,
    TOKEN_MEMORY_BYTES,
    ReplySizes,
)
from attnlens_server.streams import Piece, cut_into_pieces, run_pieces
from attnlens_server.text import EncodedInput, TextEncoder, fill_tokens
from attnlens_server.workers import Workers

P = ParamSpec("P")
Plan = TypeVar("Plan")

TOKEN_ID_BYTES = 8


class State(Enum):
    """Where the server is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


class EncoderService:
    """`attnlens.v1.EncoderService` for one bundle. The .proto file says what each method does.

    A method returns its reply as bytes, or writes a stream of them.
    """

    def __init__(
        self,
        bundle: Bundle,
        config: ServerConfig,
        engine: Engine,
        text_encoder: TextEncoder | None,
        *,
        max_tokens: int,
    ) -> None:
        self.state = State.STARTING
        self.workers = Workers(config.worker_threads)
        self.admission = Admission(
            config.max_queue, max(config.max_reply_bytes, MESSAGE_COPIES * config.max_message_bytes)
        )
        manifest = bundle.manifest
        self._dense = bundle.dense
        self._config = config
        self._engine = engine
        self._text_encoder = text_encoder
        self._name = manifest.model_name
        self._max_tokens = max_tokens
        self._checker = RequestChecker(
            manifest, config, max_tokens=max_tokens, has_tokenizer=text_encoder is not None
        )
        self._input_encoder = InputEncoder(
            text_encoder, max_tokens, self.workers, exclude_prompt=manifest.pooling.exclude_prompt
        )
        self._sizes = ReplySizes(manifest.architecture.hidden_size, config.max_message_bytes)
        self._describer = ModelDescriber(manifest, config, engine, max_tokens=max_tokens)

    def check_serving(self) -> None:
        """Raise NotReadyError or ShuttingDownError unless requests are welcome."""
        if self.state is State.STARTING:
            raise errors.NotReadyError("the server is starting: try again soon", retry_after_s=0.5)
        if self.state is State.DRAINING:
            raise errors.ShuttingDownError("the server is shutting down: ask another one")
        if self.state is State.FAILED:
            raise errors.ShuttingDownError("the engine of the server has stopped: ask another one")

    async def Embed(self, request: pb.EmbedRequest, call: Call) -> bytes:
        plan = await self._checked(call, self._checker.check_embed, request)
        num_texts, worker = len(request.inputs), self._engine.embeddings
        with self.admission.texts(worker, num_texts):
            reply_bytes = self._sizes.check_embed(num_texts, plan)
            call.memory.grow(MAKING_COPIES * reply_bytes + num_texts * TEXT_MEMORY_BYTES)
            options = EncodeOptions(truncate=request.truncate, prompt=plan.prompt)
            inputs, tokenize_s = await self._ids(request.inputs, options, call)
            results = await _run(worker, _embed_items(inputs, plan, call))
            return await self.workers.run(
                responses.embed_response, self._name, inputs, results, plan, self._dense, tokenize_s
            )

    async def Encode(self, request: pb.EncodeRequest, call: Call) -> bytes:
        plan = await self._checked(call, self._checker.check_encode, request)
        worker = self._engine.worker(attention=bool(plan.layers))
        with self.admission.texts(worker, len(request.inputs)):
            started = time.monotonic()
            inputs, parts = await self._described_inputs(request, plan, call)
            tokenize_s = time.monotonic() - started
            results = await _run(worker, _encode_items(inputs, plan, call))
            return await self.workers.run(
                responses.encode_response, self._name, parts, inputs, results, plan, tokenize_s
            )

    async def EncodeStream(self, request: pb.EncodeStreamRequest, call: Call) -> None:
        plan = await self._checked(call, self._checker.check_encode, request.encode, prefix="encode.")
        worker = self._engine.worker(attention=bool(plan.layers))
        texts = request.encode.inputs
        with self.admission.texts(worker, 1):
            call.memory.grow(len(texts) * TEXT_MEMORY_BYTES)
            options = EncodeOptions(truncate=request.encode.truncate, prefix="encode.")
            inputs, tokenize_s = await self._ids(texts, options, call)
            pieces = cut_into_pieces(
                inputs, plan, self._sizes, room_bytes=call.memory.room_bytes // 2, deadline=call.deadline()
            )
            window_bytes = self._config.max_message_bytes
            async with aclosing(
                run_pieces(worker, pieces, self.admission, call.memory, window_bytes)
            ) as results:
                async for piece, result in results:
                    await self._write_piece(
                        piece, result, texts[piece.index], inputs[piece.index], plan, tokenize_s, call
                    )

    async def Tokenize(self, request: pb.TokenizeRequest, call: Call) -> bytes:
        await self._checked(call, self._checker.check_tokenize, request)
        with self.admission.texts(self._engine.embeddings, len(request.texts)):
            parts = [pb.TokenizeResponse(model=self._name).SerializeToString()]
            size = len(parts[0])
            for portion in portions([len(text) for text in request.texts]):
                part = await self.workers.run(self._tokenize, [request.texts[index] for index in portion])
                size += len(part)
                self._sizes.check("the response", size, "send fewer or shorter texts")
                call.memory.grow(SENDING_COPIES * len(part))  # now as a part, then in the whole
                parts.append(part)
            return await self.workers.run(b"".join, parts)

    async def ListModels(self, request: pb.ListModelsRequest, call: Call) -> bytes:
        del request, call
        return pb.ListModelsResponse(models=[self._describer.model()]).SerializeToString()

    async def GetModel(self, request: pb.GetModelRequest, call: Call) -> bytes:
        del call
        self._checker.check_model(request.model)
        return pb.GetModelResponse(model=self._describer.model()).SerializeToString()

    # --- from requests to token ids ---------------------------------------------------------------

    async def _checked(self, call: Call, check: Callable[P, Plan], *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Check a request: a large one in a worker thread."""
        if call.request_bytes <= SMALL_BYTES:
            return check(*args, **kwargs)
        return await self.workers.run(check, *args, **kwargs)

    async def _ids(
        self, texts: Sequence[pb.Input], options: EncodeOptions, call: Call
    ) -> tuple[list[EncodedInput], float]:
        """Return the token ids of all texts, and the seconds that it took."""
        started = time.monotonic()
        inputs: list[EncodedInput] = []
        async with aclosing(self._input_encoder.encode(texts, options)) as encoded_portions:
            async for portion in encoded_portions:
                call.memory.grow(TOKEN_ID_BYTES * sum(each.num_tokens for each in portion))
                inputs += portion
        return inputs, time.monotonic() - started

    async def _described_inputs(
        self, request: pb.EncodeRequest, plan: EncodePlan, call: Call
    ) -> tuple[list[EncodedInput], list[pb.EncodeResponse]]:
        """Return the token ids of all texts, and for each a response of one text that has the tokens.

        Raises:
            ResponseTooLargeError: as soon as it is known that the response would be.
        """
        parts: list[pb.EncodeResponse] = []

        def describe(encoded: EncodedInput) -> None:
            part = pb.EncodeResponse()
            fill_tokens(part.results.add().tokens, encoded, self._text_encoder)
            parts.append(part)

        options = EncodeOptions(truncate=request.truncate)
        inputs: list[EncodedInput] = []
        size = 0
        async with aclosing(
            self._input_encoder.encode(request.inputs, options, describe)
        ) as encoded_portions:
            async for portion in encoded_portions:
                described = parts[len(inputs) :]
                inputs += portion
                memory_bytes = 0
                for part, encoded in zip(described, portion, strict=True):
                    tensor_bytes = self._sizes.tensor_bytes(encoded.num_tokens, plan)
                    array_bytes = self._sizes.hidden_state_bytes(encoded.num_tokens, plan)
                    array_bytes += len(plan.layers) * self._sizes.attention_bytes(encoded.num_tokens, plan)
                    size += part.ByteSize() + tensor_bytes
                    # The last text's arrays are there while its tensors are copied into the message.
                    memory_bytes += array_bytes + (MAKING_COPIES - 1) * tensor_bytes + TEXT_MEMORY_BYTES
                    memory_bytes += encoded.num_tokens * (TOKEN_ID_BYTES + TOKEN_MEMORY_BYTES)
                self._sizes.check_encode(size)
                call.memory.grow(memory_bytes)
        return inputs, parts

    def _tokenize(self, texts: Sequence[str]) -> bytes:
        """Return a response for some of the texts. Messages are joined by joining their bytes."""
        assert self._text_encoder is not None  # noqa: S101 - the checker refuses texts without a tokenizer
        response = pb.TokenizeResponse()
        for encoded in self._text_encoder.encode_whole(texts):
            result = response.results.add(exceeds_max_tokens=encoded.num_tokens > self._max_tokens)
            fill_tokens(result.tokens, encoded, self._text_encoder)
        return response.SerializeToString()

    # --- streaming --------------------------------------------------------------------------------

    async def _write_piece(
        self,
        piece: Piece,
        result: ItemResult,
        text: pb.Input,
        encoded: EncodedInput,
        plan: EncodePlan,
        tokenize_s: float,
        call: Call,
    ) -> None:
        index = piece.index
        if piece.has_head:
            await call.write(
                await self.workers.run(self._head, index, text, encoded, result, plan, tokenize_s)
            )
        for layer in piece.layers:
            await call.write(
                await self.workers.run(responses.stream_attention, self._name, index, result, plan, layer)
            )

    def _head(
        self,
        index: int,
        text: pb.Input,
        encoded: EncodedInput,
        result: ItemResult,
        plan: EncodePlan,
        tokenize_s: float,
    ) -> bytes:
        """Return the first message of a text. Its tokens are described only now: those of all are many."""
        part = pb.EncodeStreamResponse(model=self._name, input_index=index)
        described = encoded
        if text.HasField("text") and self._text_encoder is not None:
            [described] = self._text_encoder.encode([text.text], with_offsets=True)
        fill_tokens(part.head.tokens, described, self._text_encoder)
        head = responses.stream_head(part, encoded, result, plan, tokenize_s)
        self._sizes.check(f"the token vectors of encode.inputs[{index}]", len(head), "send a shorter text")
        return head


async def _run(worker: SessionWorker, items: Sequence[Item]) -> list[ItemResult]:
    """Run all items. Where one fails or the call is cancelled, those that still wait are dropped."""
    worker.queue.put(items)
    try:
        return await asyncio.gather(*(asyncio.wrap_future(item.future) for item in items))
    finally:
        for item in items:
            item.future.cancel()  # no effect on what runs or is done
        del items  # a failure holds on to this frame


def _embed_items(inputs: Iterable[EncodedInput], plan: EmbedPlan, call: Call) -> list[Item]:
    deadline = call.deadline()
    return [
        Item(
            each.input_ids,
            ("last_hidden_state",),
            deadline,
            pooling=TokenPooling(plan.pooling, each.num_excluded),
        )
        for each in inputs
    ]


def _encode_items(inputs: Iterable[EncodedInput], plan: EncodePlan, call: Call) -> list[Item]:
    deadline = call.deadline()
    return [
        Item(each.input_ids, plan.output_names(plan.layers), deadline, plan.attention_selection)
        for each in inputs
    ]
