"""EncodeStream: the results of Encode in parts, with a limited number and size of pieces in flight."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from attnlens_server.bundle import Kind
from attnlens_server.core.admission import NO_CONVERSION, Admission, Budget, Conversion, Reservation
from attnlens_server.core.reply_costs import DESCRIBING_BYTES, PART_BYTES, TEXT_MEMORY_BYTES
from attnlens_server.core.stages import mark_run
from attnlens_server.core.usage import Clock, Timings
from attnlens_server.engine import Item, ItemResult, RequestedOutput, RequestedReduction
from attnlens_server.errors import InvalidResultError
from attnlens_server.operations.attention import (
    AttentionParts,
    AttentionResult,
    EncodePlan,
    Part,
    ReducedAttention,
    check_rows,
)
from attnlens_server.operations.encode import EncodedText, EncodeRequest, EncodingOperation, without_attention
from attnlens_server.operations.encode_costs import ReplySizes, part_bytes, working_bytes
from attnlens_server.operations.operation import MAX_INLINE_PARTS, TextSources
from attnlens_server.text import EncodedInput, TextShape, Tokens

if TYPE_CHECKING:
    from concurrent.futures import Future

MAX_IN_FLIGHT = 32
"""Maximum number of pieces of one call that wait, run or are being sent."""


@dataclass(frozen=True, slots=True)
class StreamText:
    """First part of each text of a stream.

    Attributes:
        input_index: Index of the text in the request.
        text: Result without attention.
        num_attention_parts: Number of attention parts that follow.
        timings: Durations of the text.
    """

    input_index: int
    text: EncodedText
    num_attention_parts: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class StreamAttention:
    """Further part of a text of a stream: one layer of a query, or all layers that a reduction joins."""

    input_index: int
    attention: AttentionResult | ReducedAttention


class EncodeStreamOperation(EncodingOperation):
    """Yields the results of Encode in parts."""

    async def __call__(
        self, request: EncodeRequest, budget: Budget
    ) -> AsyncGenerator[StreamText | StreamAttention]:
        """Yield the result of `encode` in parts: for each text a `StreamText`, then the layers of each query.

        Request the next part only after the previous one was sent. Close the generator to cancel the rest.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        plan = await self._validated(request, self.plan)
        clock = Clock(budget.metrics)
        with self._process.admission.slots(plan.kind, 1, budget.client):
            budget.charge_texts(len(request.inputs))
            budget.memory.grow(len(request.inputs) * TEXT_MEMORY_BYTES)
            check = partial(check_rows, plan.row_selections)
            inputs = await self._token_ids(
                request, plan.prompt, budget, clock, with_units=plan.needs_units, check=check
            )
            # The tokens of one text at a time are described again when they are sent.
            sources = TextSources(
                request.inputs, self._encoder.surroundings(plan.prompt), DESCRIBING_BYTES, budget
            )
            budget.memory.grow(sources.max_memory_bytes)
            is_slow = len(inputs) * (1 + len(plan.parts)) > MAX_INLINE_PARTS
            pieces, cost = await self._process.workers.run_if(is_slow, self._cut, inputs, plan, budget)
            budget.charge_tokens(cost)
            window = Window(
                lambda items, kind: self._model.engine.submit(items, kind=kind, client=budget.client),
                plan.kind,
                self._process.admission,
                budget.memory,
                self._model.config.max_response_bytes,
                clock,
            )
            started = run_pieces(window, pieces.start(budget.deadline), pieces.max_memory_bytes)
            async with aclosing(started) as results:
                async for piece, result in results:
                    mark_run([result], piece.item.queued_at)
                    elapsed = Timings(clock.timings.tokenize_s, result.queue_s, result.compute_s)
                    if piece.has_text:
                        tokens = await self._process.workers.run(
                            self._stream_tokens, request, plan, piece.index
                        )
                        text = without_attention(inputs[piece.index], tokens, result, plan)
                        yield StreamText(piece.index, text, len(plan.parts), elapsed)
                    for part in _attention_parts(piece, result, plan):
                        yield part

    def _cut(self, inputs: Sequence[EncodedInput], plan: EncodePlan, budget: Budget) -> "tuple[Pieces, int]":
        """Return the pieces of all texts, and the cost of their reductions in tokens."""
        piece_bytes = budget.memory.available_bytes // 2
        pieces = cut_into_pieces(
            inputs, plan, self._sizes, max_bytes=piece_bytes, conversion=budget.conversion
        )
        return pieces, self._reductions_cost(plan, pieces.graph_runs)

    def _stream_tokens(self, request: EncodeRequest, plan: EncodePlan, index: int) -> Tokens:
        """Return the tokens of a text of a stream. They are large, so they are only created when sent."""
        [(_, tokens, _)] = self._describe(request, range(index, index + 1), plan=plan)
        self._sizes.check_text_part(f"inputs[{index}]", tokens, plan)
        return tokens


def _attention_parts(piece: "Piece", result: ItemResult, plan: EncodePlan) -> Iterator[StreamAttention]:
    parts = AttentionParts(result, has_hidden_state=piece.has_text and plan.hidden_state is not None)
    for query, outputs in piece.parts:
        yield StreamAttention(piece.index, parts.take(query, [outputs]))


# --- Pieces ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """Result of one graph run: all requested outputs of a text, or some of its layers.

    Attributes:
        index: Index of the text.
        has_text: Whether the piece includes the text's tokens and token vectors.
        parts: Included layers of each query.
        item: Item that runs.
        memory_bytes: Memory until the piece's last message was sent.
    """

    index: int
    has_text: bool
    parts: tuple[Part, ...]
    item: Item
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class _Run:
    """A graph run of all texts of one shape.

    Attributes:
        has_text: Whether the run includes the text's tokens and token vectors.
        parts: Included layers of each query.
        outputs: Outputs to return.
        reductions: Reductions to return.
        memory_bytes: Memory until the last message of a text was sent.
    """

    has_text: bool
    parts: tuple[Part, ...]
    outputs: tuple[RequestedOutput, ...]
    reductions: tuple[RequestedReduction, ...]
    memory_bytes: int


class Pieces:
    """Pieces of all texts, in order.

    Texts of one shape have the same runs, and items are created one by one, when they are needed: a small
    request can have a thousand texts with hundreds of parts each.

    Attributes:
        max_memory_bytes: Memory of the largest piece.
    """

    def __init__(self, inputs: Sequence[EncodedInput], runs: Sequence[tuple[_Run, ...]]) -> None:
        self._inputs = inputs
        self._runs = runs
        self.max_memory_bytes = max(run.memory_bytes for each in runs for run in each)

    @property
    def graph_runs(self) -> Iterator[tuple[tuple[Part, ...], int]]:
        """Parts and number of tokens of each graph run."""
        for encoded, runs in zip(self._inputs, self._runs, strict=True):
            for run in runs:
                yield run.parts, encoded.num_tokens

    def start(self, deadline: float | None) -> Iterator[Piece]:
        """Yield the pieces, with items that have this deadline."""
        for index, (encoded, runs) in enumerate(zip(self._inputs, self._runs, strict=True)):
            ids, types, units = encoded.input_ids, encoded.token_type_ids, encoded.units
            for run in runs:
                yield Piece(
                    index,
                    run.has_text,
                    run.parts,
                    Item(ids, run.outputs, types, deadline, run.reductions, units),
                    run.memory_bytes,
                )


def cut_into_pieces(
    inputs: Sequence[EncodedInput],
    plan: EncodePlan,
    sizes: ReplySizes,
    *,
    max_bytes: int,
    conversion: Conversion = NO_CONVERSION,
) -> Pieces:
    """Return the pieces of all texts. Takes long for many texts of different lengths.

    A text is one piece, unless its layers exceed `max_bytes`. In that case it runs several times.

    Raises:
        ResponseTooLargeError: A message would exceed the limit.
    """
    all_parts, planned = plan.parts, dict[TextShape, tuple[_Run, ...]]()
    whole = plan.outputs(all_parts), plan.reduced_outputs(all_parts)

    def plan_runs(field: str, shape: TextShape) -> Iterator[_Run]:
        message_bytes = sizes.check_parts(field, shape, plan)
        making_bytes = sizes.costs.serialization_copies * message_bytes
        making_bytes += conversion.memory_bytes(message_bytes, shape.num_tokens, 1)
        text_bytes = sizes.hidden_state_bytes(shape.num_tokens, plan)
        part_sizes = {query.index: PART_BYTES + part_bytes(query, shape) for query in plan.queries}
        cuts = _cut(all_parts, part_sizes, max_bytes - making_bytes - text_bytes)
        for run_index, parts in enumerate(cuts):
            has_text = run_index == 0
            outputs, reductions = whole
            if len(cuts) > 1:
                outputs = plan.outputs(parts, with_hidden_state=has_text)
                reductions = plan.reduced_outputs(parts)
            running_bytes = working_bytes(
                {query.index: query for query, _ in parts}.values(), shape.num_tokens
            )
            parts_bytes = sum(part_sizes[query.index] for query, _ in parts)
            memory_bytes = making_bytes + parts_bytes + running_bytes + (text_bytes if has_text else 0)
            yield _Run(has_text, parts, outputs, reductions, memory_bytes)

    runs = []
    for index, encoded in enumerate(inputs):
        shape = encoded.shape
        if shape not in planned:
            planned[shape] = tuple(plan_runs(f"inputs[{index}]", shape))
        runs.append(planned[shape])
    return Pieces(inputs, runs)


def _cut(
    parts: tuple[Part, ...], part_sizes: Mapping[int, int], max_bytes: int
) -> Sequence[tuple[Part, ...]]:
    """Split parts into runs of up to `max_bytes` and at least one part. The sizes are by query index."""
    if sum(part_sizes[query.index] for query, _ in parts) <= max_bytes:
        return [parts]
    runs: list[list[Part]] = [[]]
    remaining_bytes = max_bytes
    for part in parts:
        size = part_sizes[part[0].index]
        if size > remaining_bytes and runs[-1]:
            runs.append([])
            remaining_bytes = max_bytes
        runs[-1].append(part)
        remaining_bytes -= size
    return [tuple(run) for run in runs]


# --- Flight ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """Limits of the pieces of a call in flight.

    Attributes:
        submit: Submits items to the engine.
        kind: Graph that runs them.
        admission: Source of extra slots.
        memory: The call's reservation.
        max_bytes: Maximum memory of the pieces in flight, except for the first one.
        clock: Durations of the call.
    """

    submit: Callable[[Sequence[Item], Kind], object]
    kind: Kind
    admission: Admission
    memory: Reservation
    max_bytes: int
    clock: Clock


async def run_pieces(
    window: Window, pieces: Iterator[Piece], max_memory_bytes: int
) -> AsyncGenerator[tuple[Piece, ItemResult]]:
    """Yield pieces with their results, in order. Request the next one only after the previous one was sent.

    `pieces` must not keep the pieces that it has yielded, because they keep their results.

    One piece of up to `max_memory_bytes` at a time is always allowed: the caller holds its slot, and its
    memory is reserved here. More are started, within the window, while the server has free slots and memory.
    A slot is held only while a piece waits or runs, so a slow client blocks no other.

    Raises:
        OverloadedError: There is not enough memory for one piece at the moment.
        RequestTooLargeError: One piece exceeds the memory limit.
    """
    window.memory.grow(max_memory_bytes)
    flight, waiting = _Flight(window), deque(islice(pieces, 1))
    try:
        while waiting or flight.pieces:
            while waiting and flight.try_start(waiting[0]):
                waiting.popleft()
                waiting.extend(islice(pieces, 1))
            started = flight.pieces[0]
            try:
                result = await started.result
            except InvalidResultError:
                raise InvalidResultError(f"inputs[{started.piece.index}]") from None
            window.clock.add([result])
            yield started.piece, result
            del result
            flight.finish_first()
    finally:
        for started in flight.pieces:
            started.piece.item.abandon()
        window.clock.add([started.piece.item.elapsed(time.monotonic()) for started in flight.pieces])


@dataclass(frozen=True, slots=True)
class _Started:
    piece: Piece
    result: "asyncio.Future[ItemResult]"
    is_extra: bool


class _Flight:
    """Pieces of a call that wait, run or are being sent, in order."""

    def __init__(self, window: Window) -> None:
        self.pieces: deque[_Started] = deque()
        self._window = window

    def try_start(self, piece: Piece) -> bool:
        """Submit a piece if the limits allow it."""
        is_extra = any(not started.is_extra for started in self.pieces)
        if is_extra and not self._acquire(piece):
            return False
        result = _in_loop(piece.item.future)
        result.add_done_callback(self._release_slot if is_extra else _retrieve_exception)
        self.pieces.append(_Started(piece, result, is_extra))
        self._window.submit([piece.item], self._window.kind)
        return True

    def finish_first(self) -> None:
        """Release the memory of the oldest piece."""
        started = self.pieces.popleft()
        if started.is_extra:
            self._window.memory.shrink(started.piece.memory_bytes)

    def _release_slot(self, result: "asyncio.Future[ItemResult]") -> None:
        self._window.admission.release_slots(self._window.kind, 1, self._window.memory.client)
        _retrieve_exception(result)

    def _acquire(self, piece: Piece) -> bool:
        """Acquire a slot and memory for one more piece. Return whether both were free."""
        window = self._window
        size_bytes = sum(started.piece.memory_bytes for started in self.pieces) + piece.memory_bytes
        if len(self.pieces) >= MAX_IN_FLIGHT or size_bytes > window.max_bytes:
            return False
        if not window.admission.acquire_extra_slots(window.kind, 1, window.memory.client):
            return False
        if not window.memory.try_grow(piece.memory_bytes):
            window.admission.release_slots(window.kind, 1, window.memory.client)
            return False
        return True


def _in_loop(future: "Future[ItemResult]") -> "asyncio.Future[ItemResult]":
    """Return a future of the running event loop with the outcome of an item.

    `asyncio.wrap_future` creates a reference cycle, which keeps the result until a garbage collection.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[ItemResult] = loop.create_future()

    def on_done(done: "Future[ItemResult]") -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_copy, done, result)

    future.add_done_callback(on_done)
    return result


def _copy(done: "Future[ItemResult]", result: "asyncio.Future[ItemResult]") -> None:
    if result.done():
        return
    if done.cancelled():
        result.cancel()
    elif (error := done.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(done.result())


def _retrieve_exception(result: "asyncio.Future[ItemResult]") -> None:
    """Retrieve an exception. A stream reports only the first, and asyncio logs those never retrieved."""
    if not result.cancelled():
        result.exception()
