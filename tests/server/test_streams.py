"""EncodeStream: how texts are cut into pieces, and what pieces hold while they are under way."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from attnlens.v1.encoder_service_pb2 import HeadReduction
from attnlens.v1.tensor_pb2 import DataType
from attnlens_server.admission import Admission, Reservation
from attnlens_server.engine import Item, ItemResult, SessionWorker
from attnlens_server.errors import NeverFitsError, OverloadedError
from attnlens_server.requests import EncodePlan
from attnlens_server.sizes import ReplySizes
from attnlens_server.streams import Piece, cut_into_pieces, run_pieces
from attnlens_server.text import EncodedInput

PLAN = EncodePlan(
    hidden_state=True,
    layers=tuple(range(24)),
    heads=tuple(range(16)),
    head_reduction=HeadReduction.HEAD_REDUCTION_NONE,
    data_type=DataType.DATA_TYPE_FLOAT32,
    data_type_field="",
)
SIZES = ReplySizes(hidden_size=1024, max_message_bytes=32 << 20)
LAYER_BYTES = 4 * 16 * 512 * 512


def text(num_tokens: int) -> EncodedInput:
    return EncodedInput(np.zeros(num_tokens, np.int64), num_tokens)


def test_a_text_is_one_piece_where_all_of_it_fits() -> None:
    [piece] = cut_into_pieces([text(512)], PLAN, SIZES, room_bytes=1 << 30, deadline=None)
    assert (piece.index, piece.has_head, piece.layers) == (0, True, PLAN.layers)
    assert piece.item.output_names == PLAN.output_names(PLAN.layers)
    assert 24 * LAYER_BYTES < piece.memory_bytes < 28 * LAYER_BYTES


def test_layers_of_a_large_model_are_cut_into_pieces_that_fit() -> None:
    """BERT-large's 24 x 16 x 512 x 512 weights are 403 MB, more than calls may take in memory here."""
    room = 256 << 20
    pieces = cut_into_pieces([text(512), text(4)], PLAN, SIZES, room_bytes=room, deadline=None)
    assert [piece.index for piece in pieces] == [0, 0, 1]
    assert [piece.has_head for piece in pieces] == [True, False, True]
    assert pieces[0].layers + pieces[1].layers == PLAN.layers == pieces[2].layers
    assert "last_hidden_state" not in pieces[1].item.output_names
    assert max(piece.memory_bytes for piece in pieces) <= room


def test_without_attention_a_text_is_its_head() -> None:
    plan = replace(PLAN, layers=())
    [piece] = cut_into_pieces([text(9)], plan, SIZES, room_bytes=1 << 20, deadline=None)
    assert (piece.has_head, piece.layers, piece.item.output_names) == (True, (), ("last_hidden_state",))


class InstantQueue:
    """Puts nothing off: each item is done at once, unless it is to wait."""

    def __init__(self) -> None:
        self.holds = False
        self.items: list[Item] = []

    def put(self, items: list[Item]) -> None:
        for item in items:
            self.items.append(item)
            if not self.holds:
                item.future.set_result(ItemResult({}, 0, 0))


class InstantWorker:
    """A worker with such a queue."""

    def __init__(self) -> None:
        self.queue = InstantQueue()

    def retry_after_s(self) -> float:
        return 1.0


def pieces_of(count: int, memory_bytes: int = 10) -> list[Piece]:
    return [
        Piece(
            index, has_head=True, layers=(), item=Item(np.zeros(1, np.int64), ()), memory_bytes=memory_bytes
        )
        for index in range(count)
    ]


async def until_noted() -> None:
    """Let the callbacks of what is done run."""
    for _ in range(3):
        await asyncio.sleep(0)


Results = AsyncGenerator[tuple[Piece, ItemResult]]


def run(
    worker: InstantWorker, pieces: list[Piece], admission: Admission, window_bytes: int = 1000
) -> Results:
    session_worker = cast("SessionWorker", worker)
    return run_pieces(session_worker, pieces, admission, Reservation(admission), window_bytes)


async def test_pieces_come_in_order_and_give_back_what_they_took() -> None:
    worker, admission = InstantWorker(), Admission(max_texts=100, max_bytes=1000)
    async with aclosing(run(worker, pieces_of(50), admission)) as results:
        assert [piece.index async for piece, _ in results] == list(range(50))
    await until_noted()
    assert admission._num_bytes == 10  # one piece's, until the call is over
    assert admission._num_texts.total() == 0


@pytest.mark.parametrize(
    ("max_texts", "max_bytes", "window_bytes", "expected"),
    [(100, 1000, 1000, 32), (4, 1000, 1000, 5), (100, 35, 1000, 3), (100, 1000, 25, 2), (0, 10, 0, 1)],
)
async def test_one_piece_is_always_under_way_and_more_where_there_is_room(
    max_texts: int, max_bytes: int, window_bytes: int, expected: int
) -> None:
    """Of places the caller holds the first one itself."""
    worker, admission = InstantWorker(), Admission(max_texts, max_bytes)
    async with aclosing(run(worker, pieces_of(50), admission, window_bytes)) as results:
        await anext(results)
        assert len(worker.queue.items) == expected


async def test_a_slow_reader_holds_no_places() -> None:
    worker, admission = InstantWorker(), Admission(max_texts=100, max_bytes=1000)
    async with aclosing(run(worker, pieces_of(50), admission)) as results:
        await anext(results)
        await until_noted()
        assert len(worker.queue.items) == 32
        assert admission._num_texts.total() == 0


async def test_what_nobody_waits_for_is_dropped() -> None:
    worker, admission = InstantWorker(), Admission(max_texts=100, max_bytes=1000)
    async with aclosing(run(worker, pieces_of(3), admission)) as results:
        worker.queue.holds = True
        first = asyncio.ensure_future(anext(results))
        while len(worker.queue.items) < 3:
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    assert [item.future.cancelled() for item in worker.queue.items] == [True, True, True]


def test_what_can_never_fit_is_no_matter_of_time() -> None:
    admission = Admission(max_texts=1, max_bytes=100)
    with pytest.raises(NeverFitsError, match="needs 101 bytes of memory, all calls together may take 100"):
        Reservation(admission).grow(101)
    other = Reservation(admission)
    other.grow(60)
    with pytest.raises(
        OverloadedError, match="take 60 bytes, at most 100 may be taken, and this call needs 50"
    ):
        Reservation(admission).grow(50)
    other.release()
    Reservation(admission).grow(50)


async def test_of_pieces_that_fail_only_the_first_is_told(caplog: pytest.LogCaptureFixture) -> None:
    worker, admission = InstantWorker(), Admission(max_texts=100, max_bytes=1000)
    worker.queue.holds = True
    async with aclosing(run(worker, pieces_of(4), admission)) as results:
        first = asyncio.ensure_future(anext(results))
        while len(worker.queue.items) < 4:
            await asyncio.sleep(0)
        for item in worker.queue.items:
            item.future.set_exception(OverloadedError("none"))
        with pytest.raises(OverloadedError):
            await first
    del first, item, results
    worker.queue.items.clear()
    gc.collect()
    await until_noted()
    assert not caplog.records
    assert admission._num_texts.total() == 0
