"""Streams of results: texts in order, with a limited number and size of pieces in flight."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnlens_server.bundle import Kind
from attnlens_server.engine import Item, ItemResult
from attnlens_server.errors import InvalidResultError
from attnlens_server.serving.admission import Admission, Reservation
from attnlens_server.serving.costs import ReplySizes, part_bytes, working_bytes
from attnlens_server.serving.requests import EncodePlan, Part
from attnlens_server.serving.results import Clock
from attnlens_server.text import EncodedInput

if TYPE_CHECKING:
    from concurrent.futures import Future

MAX_IN_FLIGHT = 32
"""Maximum number of pieces of one call that wait, run or are being sent."""


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


def cut_into_pieces(
    inputs: Sequence[EncodedInput],
    plan: EncodePlan,
    sizes: ReplySizes,
    *,
    max_bytes: int,
    deadline: float | None,
) -> list[Piece]:
    """Return the pieces of all texts, in order.

    A text is one piece, unless its layers exceed `max_bytes`. In that case it runs several times.

    Raises:
        ResponseTooLargeError: A message would exceed the limit.
    """
    pieces = []
    for index, encoded in enumerate(inputs):
        num_tokens = encoded.num_tokens
        message_bytes = sizes.check_parts(f"inputs[{index}]", encoded, plan)
        making_bytes = sizes.costs.serialization_copies * message_bytes
        text_bytes = sizes.hidden_state_bytes(num_tokens, plan)
        runs = _cut(plan.parts, encoded, max_bytes - making_bytes - text_bytes)
        for run_index, parts in enumerate(runs):
            has_text = run_index == 0
            outputs = plan.outputs(parts, with_hidden_state=has_text)
            reductions = plan.reduced_outputs(parts, encoded.units)
            item = Item(encoded.input_ids, outputs, encoded.token_type_ids, deadline, reductions)
            parts_bytes = sum(part_bytes(query, encoded) for query, _ in parts)
            running_bytes = working_bytes((query for query, _ in parts), num_tokens)
            memory_bytes = making_bytes + parts_bytes + running_bytes + (text_bytes if has_text else 0)
            pieces.append(Piece(index, has_text, parts, item, memory_bytes))
    return pieces


def _cut(parts: tuple[Part, ...], encoded: EncodedInput, max_bytes: int) -> list[tuple[Part, ...]]:
    """Split parts into runs of up to `max_bytes` and at least one part."""
    runs: list[list[Part]] = [[]]
    remaining_bytes = max_bytes
    for part in parts:
        size = part_bytes(part[0], encoded)
        if size > remaining_bytes and runs[-1]:
            runs.append([])
            remaining_bytes = max_bytes
        runs[-1].append(part)
        remaining_bytes -= size
    return [tuple(run) for run in runs]


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


async def run_pieces(window: Window, pieces: deque[Piece]) -> AsyncGenerator[tuple[Piece, ItemResult]]:
    """Yield pieces with their results, in order. Request the next one only after the previous one was sent.

    Started pieces are removed from `pieces`: nothing else may keep them, because they keep their results.

    One piece at a time is always allowed: the caller holds its slot, and its memory is reserved here. More
    are started, within the window, while the server has free slots and memory. A slot is held only while a
    piece waits or runs, so a slow client blocks no other.

    Raises:
        OverloadedError: There is not enough memory for one piece at the moment.
        RequestTooLargeError: One piece exceeds the memory limit.
    """
    window.memory.grow(max(piece.memory_bytes for piece in pieces))
    flight = _Flight(window)
    try:
        while pieces or flight.pieces:
            while pieces and flight.try_start(pieces[0]):
                pieces.popleft()
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
