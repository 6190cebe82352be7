"""EncodeStream: texts in order, a bounded number and size of them under way."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from attnlens_server.admission import Admission, Reservation
from attnlens_server.engine import Item, ItemResult, SessionWorker
from attnlens_server.requests import EncodePlan
from attnlens_server.sizes import MAKING_COPIES, ReplySizes
from attnlens_server.text import EncodedInput

WINDOW = 32  # pieces of one call that wait, run or are sent at a time


@dataclass(frozen=True, slots=True)
class Piece:
    """What one run of the graph brings: all that was asked for of a text, or some of its layers.

    Attributes:
        index: the number of the text.
        has_head: whether the text's tokens and token vectors are part of it.
        layers: the layers whose attention is part of it.
        item: what runs.
        memory_bytes: what it takes until its last message is sent.
    """

    index: int
    has_head: bool
    layers: tuple[int, ...]
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
        part_bytes = MAKING_COPIES * sizes.check_parts(f"encode.inputs[{index}]", num_tokens, plan)
        layer_bytes = sizes.attention_bytes(num_tokens, plan)
        head_bytes = sizes.hidden_state_bytes(num_tokens, plan)
        num_layers = max(1, (room_bytes - part_bytes - head_bytes) // max(1, layer_bytes))
        starts = range(0, max(1, len(plan.layers)), num_layers)
        for start in starts:
            layers = plan.layers[start : start + num_layers]
            has_head = start == 0
            names = plan.output_names(layers, with_hidden_state=has_head)
            pieces.append(
                Piece(
                    index,
                    has_head,
                    layers,
                    Item(encoded.input_ids, names, deadline, plan.attention_selection),
                    part_bytes + len(layers) * layer_bytes + (head_bytes if has_head else 0),
                )
            )
    return pieces


async def run_pieces(
    worker: SessionWorker,
    pieces: Sequence[Piece],
    admission: Admission,
    memory: Reservation,
    window_bytes: int,
) -> AsyncGenerator[tuple[Piece, ItemResult]]:
    """Yield pieces with their results, in order. The next one is asked for when all of the last one is sent.

    One piece at a time always may be under way: the caller holds a place for it, its memory is reserved here.
    More are, within `window_bytes`, while the server has places and memory for them. A place is held only
    while a piece waits or runs, so that a slow reader takes none from the others.

    Raises:
        OverloadedError: there is no memory for one piece now.
        NeverFitsError: there will never be.
    """
    memory.grow(max(piece.memory_bytes for piece in pieces))
    window = _Window(worker, admission, memory, window_bytes)
    waiting = deque(pieces)
    try:
        while waiting or window.under_way:
            while waiting and window.try_start(waiting[0]):
                waiting.popleft()
            started = window.under_way[0]
            yield started.piece, await started.result
            window.finish_first()
    finally:
        for started in window.under_way:
            started.piece.item.future.cancel()


@dataclass(frozen=True, slots=True)
class _Started:
    piece: Piece
    result: "asyncio.Future[ItemResult]"
    is_extra: bool


class _Window:
    """The pieces of a call that wait, run or are being sent, in order."""

    def __init__(
        self, worker: SessionWorker, admission: Admission, memory: Reservation, window_bytes: int
    ) -> None:
        self.under_way: deque[_Started] = deque()
        self._worker = worker
        self._admission = admission
        self._memory = memory
        self._window_bytes = window_bytes

    def try_start(self, piece: Piece) -> bool:
        """Let the engine have a piece, if there is room for it."""
        is_extra = any(not started.is_extra for started in self.under_way)
        if is_extra and not self._has_room(piece):
            return False
        result = asyncio.wrap_future(piece.item.future)
        result.add_done_callback(self._give_back_place if is_extra else _retrieve)
        self.under_way.append(_Started(piece, result, is_extra))
        self._worker.queue.put([piece.item])
        return True

    def finish_first(self) -> None:
        """Give back what the oldest piece has taken."""
        started = self.under_way.popleft()
        if started.is_extra:
            self._memory.shrink(started.piece.memory_bytes)

    def _give_back_place(self, result: "asyncio.Future[ItemResult]") -> None:
        self._admission.give_back_texts(self._worker, 1)
        _retrieve(result)

    def _has_room(self, piece: Piece) -> bool:
        """Take a place and the memory for one more piece if there are."""
        size_bytes = sum(started.piece.memory_bytes for started in self.under_way) + piece.memory_bytes
        if len(self.under_way) >= WINDOW or size_bytes > self._window_bytes:
            return False
        if not self._admission.try_texts(self._worker, 1):
            return False
        if not self._memory.try_grow(piece.memory_bytes):
            self._admission.give_back_texts(self._worker, 1)
            return False
        return True


def _retrieve(result: "asyncio.Future[ItemResult]") -> None:
    """Look at a failure, of which a stream tells the first alone: asyncio logs each that nobody looks at."""
    if not result.cancelled():
        result.exception()
