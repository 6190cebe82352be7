"""EncodeStream: how texts are split into pieces, and which resources the pieces hold."""

import asyncio
import gc
import sys
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens.reductions import AttentionReduction, TextUnits, Units
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_server.bundle import Kind, Layout, Output, OutputRole
from attnlens_server.clients import Client
from attnlens_server.core.admission import Admission, Reservation
from attnlens_server.core.reply_costs import ReplyCosts
from attnlens_server.core.usage import CallMetrics, Clock
from attnlens_server.engine import Item, ItemResult
from attnlens_server.errors import OverloadedError, RequestTooLargeError
from attnlens_server.operations.attention import AttentionView, EncodePlan, QueryPlan
from attnlens_server.operations.encode_costs import ReplySizes
from attnlens_server.operations.encode_stream import Piece, Window, cut_into_pieces, run_pieces
from attnlens_server.operations.values import FLOAT32
from attnlens_server.text import EncodedInput
from served import ServerProcess

LAYERS = tuple(
    Output(f"attentions.{layer}", OutputRole.ATTENTION_WEIGHTS, Layout.DENSE, layer, 16)
    for layer in range(24)
)
HIDDEN = Output("last_hidden_state", OutputRole.LAST_HIDDEN_STATE, Layout.PER_TOKEN, width=1024)
QUERY = QueryPlan(0, OutputRole.ATTENTION_WEIGHTS, LAYERS, tuple(range(16)), AttentionView.FULL)
PLAN = EncodePlan("", HIDDEN, (QUERY,), FLOAT32)
SIZES = ReplySizes(1024, ReplyCosts(32 << 20, 128, lambda _: 0, serialization_copies=3, sending_copies=2))
LAYER_BYTES = 4 * 16 * 512 * 512


def cut(inputs: Sequence[EncodedInput], plan: EncodePlan, max_bytes: int) -> list[Piece]:
    return list(cut_into_pieces(inputs, plan, SIZES, max_bytes=max_bytes).start(deadline=None))


def text(num_tokens: int) -> EncodedInput:
    return EncodedInput(np.zeros(num_tokens, np.int64), num_tokens)


def test_text_is_one_piece_if_it_fits() -> None:
    [piece] = cut([text(512)], PLAN, 1 << 30)
    assert (piece.index, piece.has_text, piece.parts) == (0, True, PLAN.parts)
    assert piece.item.requested == PLAN.outputs(PLAN.parts)
    assert 24 * LAYER_BYTES < piece.memory_bytes < 28 * LAYER_BYTES


def test_layers_of_a_large_model_are_split_into_pieces_that_fit() -> None:
    """BERT-large's 24 x 16 x 512 x 512 weights take 403 MB, more than the memory limit for calls."""
    max_piece_bytes = 256 << 20
    pieces = cut([text(512), text(4)], PLAN, max_piece_bytes)
    assert [piece.index for piece in pieces] == [0, 0, 1]
    assert [piece.has_text for piece in pieces] == [True, False, True]
    assert pieces[0].parts + pieces[1].parts == PLAN.parts == pieces[2].parts
    assert "last_hidden_state" not in [requested.name for requested in pieces[1].item.requested]
    assert max(piece.memory_bytes for piece in pieces) <= max_piece_bytes


def test_text_without_attention_is_one_text_part() -> None:
    plan = replace(PLAN, queries=())
    [piece] = cut([text(9)], plan, 1 << 20)
    assert (piece.has_text, piece.parts) == (True, ())
    assert [requested.name for requested in piece.item.requested] == ["last_hidden_state"]


def test_queries_of_one_layer_are_parts_of_one_run() -> None:
    mean = replace(QUERY, index=1, outputs=LAYERS[3:4], view=AttentionView.HEAD_MEAN)
    plan = replace(PLAN, queries=(replace(QUERY, outputs=LAYERS[3:5]), mean))
    [piece] = cut([text(512)], plan, 1 << 30)
    names = [requested.name for requested in piece.item.requested]
    assert names == ["last_hidden_state", "attentions.3", "attentions.4", "attentions.3"]
    assert [query.index for query, _ in piece.parts] == [0, 0, 1]


class InstantEngine:
    """Completes each item immediately unless the item is set to wait."""

    def __init__(self) -> None:
        self.holds = False
        self.items: list[Item] = []

    def submit(self, items: Sequence[Item], kind: Kind) -> None:
        assert kind == "attention"
        for item in items:
            self.items.append(item)
            if not self.holds:
                item.future.set_result(ItemResult((np.zeros(1, np.float32),), 0, 0))


def make_admission(max_texts: int, max_bytes: int) -> Admission:
    return Admission(max_texts, max_bytes, lambda _: 1.0)


def make_pieces(count: int, memory_bytes: int = 10) -> list[Piece]:
    return [
        Piece(index, has_text=True, parts=(), item=Item(np.zeros(1, np.int64), ()), memory_bytes=memory_bytes)
        for index in range(count)
    ]


async def run_callbacks() -> None:
    """Let the callbacks of completed items run."""
    for _ in range(3):
        await asyncio.sleep(0)


Results = AsyncGenerator[tuple[Piece, ItemResult]]


def run(
    engine: InstantEngine, pieces: list[Piece], admission: Admission, window_bytes: int = 1000
) -> Results:
    window = Window(
        engine.submit, "attention", admission, Reservation(admission), window_bytes, Clock(CallMetrics())
    )
    waiting = deque(pieces)
    once = (waiting.popleft() for _ in range(len(waiting)))
    return run_pieces(window, once, max(piece.memory_bytes for piece in pieces))


async def test_pieces_arrive_in_order_and_release_their_memory() -> None:
    engine, admission = InstantEngine(), make_admission(100, 1000)
    async with aclosing(run(engine, make_pieces(50), admission)) as results:
        assert [piece.index async for piece, _ in results] == list(range(50))
    await run_callbacks()
    assert admission.memory.used == 10  # one piece's memory, until the call ends
    assert sum(pool.used for pool in admission._texts.values()) == 0


async def test_results_of_sent_pieces_are_freed_at_once() -> None:
    engine, references = InstantEngine(), []
    gc.disable()
    try:
        async with aclosing(run(engine, make_pieces(50), make_admission(100, 1000))) as results:
            async for piece, result in results:
                references.append(weakref.ref(result.arrays[0]))
                engine.items.clear()
                del piece, result
                await asyncio.sleep(0)
                assert [reference() for reference in references[:-1]] == [None] * (len(references) - 1)
    finally:
        gc.enable()
    assert len(references) == 50


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of the server from /proc")
def test_server_keeps_only_the_unsent_part_of_a_stream_in_memory(minilm_server: ServerProcess) -> None:
    request = pb.EncodeStreamRequest(
        inputs=[pb.Input(text="word " * 254)] * 24, attention=[pb.AttentionQuery()], truncate=True
    )
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(minilm_server.address, options=options) as channel:
        for _ in EncoderServiceStub(channel).EncodeStream(pb.EncodeStreamRequest(inputs=request.inputs[:2])):
            pass
        process = Path(f"/proc/{minilm_server.process.pid}")
        before = memory_mib(process, "VmRSS")
        (process / "clear_refs").write_text("5")  # resets VmHWM
        size = sum(message.ByteSize() for message in EncoderServiceStub(channel).EncodeStream(request))
        assert size > 400 << 20
        assert memory_mib(process, "VmHWM") - before < 300


def memory_mib(process: Path, name: str) -> int:
    [line] = [line for line in (process / "status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) // 1024


@pytest.mark.parametrize(
    ("max_texts", "max_bytes", "window_bytes", "expected"),
    [(100, 1000, 1000, 32), (4, 1000, 1000, 3), (100, 35, 1000, 3), (100, 1000, 25, 2), (0, 10, 0, 1)],
)
async def test_at_least_one_piece_runs_and_more_when_capacity_allows(
    max_texts: int, max_bytes: int, window_bytes: int, expected: int
) -> None:
    """The caller holds the first slot itself, and half of the queue stays free for other calls."""
    engine, admission = InstantEngine(), make_admission(max_texts, max_bytes)
    async with aclosing(run(engine, make_pieces(50), admission, window_bytes)) as results:
        await anext(results)
        assert len(engine.items) == expected
        await run_callbacks()
        assert sum(pool.used for pool in admission._texts.values()) == 0  # no piece is queued or running


async def test_slow_consumer_keeps_no_slots() -> None:
    engine, admission = InstantEngine(), make_admission(100, 1000)
    async with aclosing(run(engine, make_pieces(50), admission)) as results:
        await anext(results)
        await run_callbacks()
        assert len(engine.items) == 32
        assert sum(pool.used for pool in admission._texts.values()) == 0


async def test_abandoned_pieces_are_dropped() -> None:
    engine, admission = InstantEngine(), make_admission(100, 1000)
    async with aclosing(run(engine, make_pieces(3), admission)) as results:
        engine.holds = True
        first = asyncio.ensure_future(anext(results))
        while len(engine.items) < 3:
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    assert [item.future.cancelled() for item in engine.items] == [True, True, True]


def test_piece_that_can_never_fit_fails_permanently() -> None:
    admission = make_admission(1, 100)
    with pytest.raises(
        RequestTooLargeError, match="needs 101 bytes of memory, and the limit for all calls is 100"
    ):
        Reservation(admission).grow(101)
    other = Reservation(admission)
    other.grow(60)
    with pytest.raises(OverloadedError, match=r"hold 60 of at most 100 bytes, .* needs 50 more"):
        Reservation(admission).grow(50)
    other.release()
    Reservation(admission).grow(50)


def test_rejected_memory_is_not_counted() -> None:
    admission = make_admission(1, 100)
    first, second = (Reservation(admission, Client(name)) for name in ("a", "b"))
    first.grow(60)
    assert not second.try_grow(50)
    second.release()
    assert not second.try_grow(50)
    assert second.try_grow(40)


async def test_only_the_first_failing_piece_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    engine, admission = InstantEngine(), make_admission(100, 1000)
    engine.holds = True
    async with aclosing(run(engine, make_pieces(4), admission)) as results:
        first = asyncio.ensure_future(anext(results))
        while len(engine.items) < 4:
            await asyncio.sleep(0)
        for item in engine.items:
            item.future.set_exception(OverloadedError("none"))
        with pytest.raises(OverloadedError):
            await first
    del first, item, results
    engine.items.clear()
    gc.collect()
    await run_callbacks()
    assert not caplog.records
    assert sum(pool.used for pool in admission._texts.values()) == 0


def test_more_texts_than_the_queue_holds_are_rejected_permanently() -> None:
    admission = make_admission(max_texts=4, max_bytes=100)
    with (
        pytest.raises(RequestTooLargeError, match="has 5 texts, but the queue holds at most 4"),
        admission.slots("attention", 5),
    ):
        pass
    with (
        admission.slots("attention", 3),
        pytest.raises(OverloadedError, match="3 of at most 4 texts are waiting or running"),
        admission.slots("attention", 2),
    ):
        pass


WORD_INDICES = st.lists(st.tuples(st.none() | st.integers(0, 5), st.booleans(), st.booleans()), min_size=1)


@given(WORD_INDICES, st.sampled_from(["tokens", "words"]), st.sampled_from(["keep", "drop"]))
def test_shape_of_a_text_has_the_number_of_units_of_each_reduction(
    tokens: list[tuple[int | None, bool, bool]], level: Any, special_tokens: Any
) -> None:
    words, is_special, is_second = zip(*tokens, strict=True)
    units = TextUnits.of(words, is_special, is_second)
    reduction = AttentionReduction(level=level, special_tokens=special_tokens)
    encoded = replace(text(len(tokens)), units=units)
    assert encoded.shape.num_units(reduction) == Units.of(reduction, units, len(tokens)).num_units


def test_runs_of_texts_of_one_shape_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[str] = []

    def check_parts(field: str, *_: object) -> int:
        planned.append(field)
        return 0

    monkeypatch.setattr(SIZES, "check_parts", check_parts)
    pieces = cut_into_pieces([text(3), text(4)] * 500, PLAN, SIZES, max_bytes=1 << 30)
    assert planned == ["inputs[0]", "inputs[1]"]
    assert len([*pieces.graph_runs]) == 1000
    assert len({id(parts) for parts, _ in pieces.graph_runs}) == 1  # planned once for all texts
    first, second, *_ = islice(pieces.start(deadline=None), 3)
    assert (first.index, second.index) == (0, 1)
    assert first.item is not second.item
    assert first.item.requested is second.item.requested
