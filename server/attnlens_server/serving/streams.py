"""Streams of results: texts in order, a bounded number and size of them under way."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from attnlens_server.bundle import Kind
from attnlens_server.engine import Item, ItemResult
from attnlens_server.serving.admission import Admission, Reservation
from attnlens_server.serving.checks import EncodePlan, Part
from attnlens_server.serving.sizes import ReplySizes, part_bytes, working_bytes
from attnlens_server.text import EncodedInput

WINDOW = 32  # pieces of one call that wait, run or are sent at a time


@dataclass(frozen=True, slots=True)
class Piece:
    """What one run of the graph brings: all that was asked for of a text, or some of its layers.

    Attributes:
        index: the number of the text.
        has_text: whether the text's tokens and token vectors are part of it.
        parts: the layers of queries that are part of it.
        item: what runs.
        memory_bytes: what it takes until its last message is sent.
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
    room_bytes: int,
    deadline: float | None,
) -> list[Piece]:
    """Return the pieces of all texts, in order.

    A text is one piece, unless its layers take more than `room_bytes` together: then it is run several times.

    Raises:
        ResponseTooLargeError: a message would be over the limit.
    """
    pieces = []
    for index, encoded in enumerate(inputs):
        num_tokens = encoded.num_tokens
        message_bytes = sizes.check_parts(f"inputs[{index}]", encoded, plan)
        making_bytes = sizes.costs.making_copies * message_bytes
        text_bytes = sizes.hidden_state_bytes(num_tokens, plan)
        runs = _cut(plan.parts, encoded, room_bytes - making_bytes - text_bytes)
        for number, parts in enumerate(runs):
            has_text = number == 0
            wanted = plan.wanted(parts, with_hidden_state=has_text)
            reductions = plan.wanted_reductions(parts, encoded.units)
            item = Item(encoded.input_ids, wanted, encoded.token_type_ids, deadline, reductions)
            parts_bytes = sum(part_bytes(query, encoded) for query, _ in parts)
            running_bytes = working_bytes((query for query, _ in parts), num_tokens)
            memory_bytes = making_bytes + parts_bytes + running_bytes + (text_bytes if has_text else 0)
            pieces.append(Piece(index, has_text, parts, item, memory_bytes))
    return pieces


def _cut(parts: tuple[Part, ...], encoded: EncodedInput, room_bytes: int) -> list[tuple[Part, ...]]:
    """Cut parts into runs that fit into `room_bytes`, one part at least in each."""
    runs: list[list[Part]] = [[]]
    left_bytes = room_bytes
    for part in parts:
        size = part_bytes(part[0], encoded)
        if size > left_bytes and runs[-1]:
            runs.append([])
            left_bytes = room_bytes
        runs[-1].append(part)
        left_bytes -= size
    return [tuple(run) for run in runs]


@dataclass(frozen=True, slots=True)
class Window:
    """What the pieces of a call may take.

    Attributes:
        submit: lets the engine have items.
        kind: of the graph that runs them.
        admission: has places and memory.
        memory: what the call has reserved.
        max_bytes: of all pieces under way, beside the first.
    """

    submit: Callable[[Sequence[Item], Kind], object]
    kind: Kind
    admission: Admission
    memory: Reservation
    max_bytes: int


async def run_pieces(window: Window, pieces: Sequence[Piece]) -> AsyncGenerator[tuple[Piece, ItemResult]]:
    """Yield pieces with their results, in order. The next one is asked for when all of the last one is sent.

    One piece at a time always may be under way: the caller holds a place for it, its memory is reserved here.
    More are, within the window, while the server has places and memory for them. A place is held only while a
    piece waits or runs, so that a slow reader takes none from the others.

    Raises:
        OverloadedError: there is no memory for one piece now.
        RequestTooLargeError: there will never be.
    """
    window.memory.grow(max(piece.memory_bytes for piece in pieces))
    run = _Run(window)
    waiting = deque(pieces)
    try:
        while waiting or run.under_way:
            while waiting and run.try_start(waiting[0]):
                waiting.popleft()
            started = run.under_way[0]
            yield started.piece, await started.result
            run.finish_first()
    finally:
        for started in run.under_way:
            started.piece.item.future.cancel()


@dataclass(frozen=True, slots=True)
class _Started:
    piece: Piece
    result: "asyncio.Future[ItemResult]"
    is_extra: bool


class _Run:
    """The pieces of a call that wait, run or are being sent, in order."""

    def __init__(self, window: Window) -> None:
        self.under_way: deque[_Started] = deque()
        self._window = window

    def try_start(self, piece: Piece) -> bool:
        """Let the engine have a piece, if there is room for it."""
        is_extra = any(not started.is_extra for started in self.under_way)
        if is_extra and not self._has_room(piece):
            return False
        result = asyncio.wrap_future(piece.item.future)
        result.add_done_callback(self._give_back_place if is_extra else _retrieve)
        self.under_way.append(_Started(piece, result, is_extra))
        self._window.submit([piece.item], self._window.kind)
        return True

    def finish_first(self) -> None:
        """Give back what the oldest piece has taken."""
        started = self.under_way.popleft()
        if started.is_extra:
            self._window.memory.shrink(started.piece.memory_bytes)

    def _give_back_place(self, result: "asyncio.Future[ItemResult]") -> None:
        self._window.admission.give_back_texts(self._window.kind, 1)
        _retrieve(result)

    def _has_room(self, piece: Piece) -> bool:
        """Take a place and the memory for one more piece if there are."""
        window = self._window
        size_bytes = sum(started.piece.memory_bytes for started in self.under_way) + piece.memory_bytes
        if len(self.under_way) >= WINDOW or size_bytes > window.max_bytes:
            return False
        if not window.admission.take_extra(window.kind, 1):
            return False
        if not window.memory.try_grow(piece.memory_bytes):
            window.admission.give_back_texts(window.kind, 1)
            return False
        return True


def _retrieve(result: "asyncio.Future[ItemResult]") -> None:
    """Look at a failure, of which a stream tells the first alone: asyncio logs each that nobody looks at."""
    if not result.cancelled():
        result.exception()
