"""Lanes with scripted sessions: the fate of queued items when a session fails."""

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import pytest

from attnlens.pooling import Pooling, pool
from attnlens_server.bundle import Layout
from attnlens_server.clients import Client
from attnlens_server.engine import sessions as sessions_module
from attnlens_server.engine.batch import (
    GraphInputs,
    HeadSelection,
    HostOutputs,
    Item,
    RequestedOutput,
    TokenPooling,
    pad,
)
from attnlens_server.engine.engine import MAX_RETRY_S, MIN_RETRY_S, Lanes
from attnlens_server.engine.engine import logger as lanes_logger
from attnlens_server.engine.runtimes.runtime import Cancellation, Division
from attnlens_server.engine.scheduler import BatchLimits, Scheduler
from attnlens_server.engine.sessions import SAMPLES, Sessions
from attnlens_server.errors import InternalError, InvalidResultError

if TYPE_CHECKING:
    from attnlens_server.engine.runtimes.runtime import Session

HIDDEN = RequestedOutput("last_hidden_state")
BAD = 99  # token id
Run = Callable[[npt.NDArray[np.int64]], HostOutputs]


class ScriptedSession:
    """Runs a function instead of a graph."""

    providers = ("CPUExecutionProvider",)
    survives_cancellation = True

    def __init__(self, run: Run) -> None:
        self._run = run

    def run(
        self, inputs: GraphInputs, output_names: Sequence[str], cancellation: Cancellation
    ) -> HostOutputs:
        del output_names, cancellation
        return self._run(inputs.input_ids)


def make_lanes(run: Run, *, has_express_lane: bool = False) -> Lanes:
    session = cast("Session", ScriptedSession(run))
    sessions = Sessions(lambda _: session, threads=1, num_lanes=1)
    scheduler = Scheduler(BatchLimits(64))
    return Lanes(
        "scripted", sessions, scheduler, num_lanes=1, pad_token_id=0, has_express_lane=has_express_lane
    )


def hidden(input_ids: npt.NDArray[np.int64]) -> HostOutputs:
    """Token vectors (B, T, 2) filled with the token IDs."""
    return HostOutputs({"last_hidden_state": np.stack([input_ids] * 2, axis=-1).astype(np.float32)})


def make_item(*ids: int) -> Item:
    return Item(np.array(ids, dtype=np.int64), (HIDDEN,))


@pytest.mark.parametrize("is_open", [True, False])
def test_lone_text_uses_the_threads_of_one_lane_if_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, *, is_open: bool
) -> None:
    monkeypatch.setattr(sessions_module, "SHORT_S", 60.0)  # the times below also differ on a busy machine
    threads: list[int] = []

    def open_session(division: Division) -> "Session":
        def run(input_ids: npt.NDArray[np.int64]) -> HostOutputs:
            threads.append(division.threads)
            time.sleep(0.05 * (division.threads - 1))
            return hidden(input_ids)

        return cast("Session", ScriptedSession(run))

    sessions = Sessions(open_session, threads=2, num_lanes=2)
    if is_open:
        sessions.open_all()
    lanes = Lanes("scripted", sessions, Scheduler(BatchLimits(64)), num_lanes=2, pad_token_id=0)
    lanes.start()
    for _ in range(2 * SAMPLES + 5):
        while lanes.num_idle < 2:
            time.sleep(0.0001)
        lanes.submit([item := make_item(1, 2, 3)])
        item.future.result(30)
    lanes.close()
    # No session is opened for this, which would take longer than the text.
    assert threads == ([2] * SAMPLES + [1] * (SAMPLES + 5) if is_open else [2] * (2 * SAMPLES + 5))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("num_tokens", [1, 4096])
def test_text_whose_result_is_not_finite_fails_alone(value: float, num_tokens: int) -> None:
    def run(input_ids: npt.NDArray[np.int64]) -> HostOutputs:
        outputs = hidden(input_ids)
        outputs.arrays["last_hidden_state"][input_ids == BAD] = value
        return outputs

    lanes = make_lanes(run)
    items = [make_item(1), make_item(*[2] * (num_tokens - 1), BAD), make_item(3)]
    lanes.submit(items)
    lanes.start()
    with pytest.raises(InvalidResultError):
        items[1].future.result(timeout=30)
    assert [items[index].future.result(timeout=30).arrays[0][0, 0] for index in (0, 2)] == [1, 3]
    lanes.close()


def test_large_finite_results_are_no_error() -> None:
    lanes = make_lanes(lambda ids: HostOutputs({"last_hidden_state": np.full((*ids.shape, 2), 3e38, "f4")}))
    lanes.submit([item := make_item(1)])
    lanes.start()
    assert item.future.result(timeout=30).arrays[0].max() == np.float32(3e38)
    lanes.close()


def test_dying_lane_fails_queued_items_and_logs_it() -> None:
    class PanicError(BaseException):
        """Not a subclass of `Exception`, so no `except Exception` catches it."""

    go_on, died = threading.Event(), threading.Event()

    def die(_: npt.NDArray[np.int64]) -> HostOutputs:
        assert go_on.wait(timeout=30)
        raise PanicError

    lanes = make_lanes(die)
    lanes.on_death = died.set
    running, waiting = make_item(1), make_item(*range(64))
    lanes.submit([running])
    lanes.start()
    lanes.submit([waiting])
    go_on.set()
    assert died.wait(timeout=30)
    assert isinstance(running.future.exception(timeout=30), PanicError)
    assert isinstance(waiting.future.exception(timeout=30), InternalError)
    lanes.close()


def test_lane_dying_in_a_batch_completes_every_item() -> None:
    class PanicError(BaseException):
        """Not a subclass of `Exception`, so no `except Exception` catches it."""

    def die(input_ids: npt.NDArray[np.int64]) -> HostOutputs:
        raise RuntimeError if len(input_ids) > 1 else PanicError

    lanes = make_lanes(die)
    items = [make_item(1) for _ in range(4)]
    lanes.submit(items)
    lanes.start()
    assert [type(item.future.exception(timeout=30)) for item in items] == [PanicError] * 4
    lanes.close()


def test_failure_keeps_no_items_alive(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise, the data of a failed call would stay in memory until a full garbage collection."""
    caplog.set_level(logging.CRITICAL, lanes_logger.name)  # a captured log record would keep the error alive

    def fail(input_ids: npt.NDArray[np.int64]) -> HostOutputs:
        raise RuntimeError(str(input_ids.shape))

    lanes = make_lanes(fail)
    lanes.start()
    items = [make_item(1), make_item(1)]
    references = [weakref.ref(item.input_ids) for item in items]
    lanes.submit(items)
    for item in items:
        item.future.exception(timeout=30)
    while not lanes.num_idle:  # until the lane is idle again
        time.sleep(0.001)
    gc.disable()
    try:
        del item, items
        assert [found() for found in references] == [None, None]
    finally:
        gc.enable()
    lanes.close()


def test_idle_lane_keeps_no_results_alive() -> None:
    lanes = make_lanes(hidden)
    lanes.start()
    item = make_item(1, 2, 3)
    lanes.submit([item])
    result = item.future.result(timeout=30).arrays[0]
    np.testing.assert_array_equal(result[:, 0], [1, 2, 3])
    while not lanes.num_idle:  # until the lane is idle again
        time.sleep(0.001)
    forgotten = weakref.ref(result)
    del item, result
    gc.collect()
    assert forgotten() is None
    lanes.close()


def test_retry_delay_counts_lanes_once() -> None:
    lanes = make_lanes(hidden)
    assert lanes.retry_after_s() == MIN_RETRY_S
    lanes.submit([make_item(*range(60))] * 40)
    lanes._tokens_per_s = 600
    assert lanes.retry_after_s() == pytest.approx(4)
    lanes._tokens_per_s = 1
    assert lanes.retry_after_s() == MAX_RETRY_S


@pytest.mark.parametrize("pooling", list(Pooling))
def test_vectors_are_pooled_in_the_lane_and_keep_no_batch_alive(pooling: Pooling) -> None:
    batch = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)
    requested = RequestedOutput("last_hidden_state", keep=TokenPooling(pooling, num_excluded=1))
    vector = HostOutputs({"last_hidden_state": batch}).part(1, 4, requested)
    np.testing.assert_array_equal(vector, pool(batch[1, :4], pooling, 1))
    assert vector.base is None or vector.base.size == vector.size


def test_token_vectors_of_one_text_keep_no_batch_alive() -> None:
    batch = np.zeros((3, 5, 4), np.float32)
    vectors = HostOutputs({"last_hidden_state": batch}).part(1, 2, HIDDEN)
    assert vectors.shape == (2, 4)
    assert vectors.base is None


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (HeadSelection(), [0, 1, 2]),
        (HeadSelection((2, 0)), [2, 0]),
        (HeadSelection((1, 2), is_mean=True), None),
    ],
    ids=str,
)
def test_heads_are_selected_from_per_token_outputs(
    selection: HeadSelection, expected: list[int] | None
) -> None:
    batch = np.random.default_rng(0).random((2, 5, 3), dtype=np.float32)  # (B, T, H)
    part = HostOutputs({"gates": batch}).part(1, 4, RequestedOutput("gates", Layout.PER_TOKEN, selection))
    chosen = batch[1, :4][:, expected] if expected else batch[1, :4, 1:].mean(axis=1, keepdims=True)
    np.testing.assert_array_equal(part, chosen)


def test_outputs_may_repeat_and_keep_the_requested_order() -> None:
    lanes = make_lanes(hidden)
    lanes.start()
    mean = RequestedOutput("last_hidden_state", keep=TokenPooling(Pooling.MEAN))
    item = Item(np.array([1, 2, 3]), (mean, HIDDEN, mean))
    lanes.submit([item])
    first, second, third = item.future.result(timeout=30).arrays
    np.testing.assert_array_equal(second[:, 0], [1, 2, 3])
    assert first.tolist() == third.tolist() == [2, 2]
    lanes.close()


def test_token_types_are_padded_and_default_to_zeros() -> None:
    items = [make_item(1, 2, 3), Item(np.array([4, 5]), (HIDDEN,), np.array([0, 1]))]
    inputs = pad(items, 4, pad_token_id=9)
    assert inputs.input_ids.tolist() == [[1, 2, 3, 9], [4, 5, 9, 9]]
    assert inputs.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert inputs.token_type_ids.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0]]


def test_light_items_run_beside_a_running_batch() -> None:
    go_on, is_running = threading.Event(), threading.Event()

    def run(input_ids: npt.NDArray[np.int64]) -> HostOutputs:
        if input_ids.shape[1] == 64:
            is_running.set()
            assert go_on.wait(timeout=30)
        return hidden(input_ids)

    lanes = make_lanes(run, has_express_lane=True)
    lanes.start()
    running, waiting = make_item(*range(64)), make_item(*range(64))
    lanes.submit([running], Client("heavy"))
    assert is_running.wait(timeout=30)
    lanes.submit([waiting], Client("heavy"))
    for count in (1, 3, 1):
        light = [make_item(1, 2) for _ in range(count)]
        cancelled = make_item(1)
        for item in (*light, cancelled):
            item.is_light = True
        cancelled.future.cancel()
        lanes.submit([*light, cancelled], Client("light"))
        for item in light:
            np.testing.assert_array_equal(item.future.result(timeout=30).arrays[0][:, 0], [1, 2])
    assert not running.future.done()
    assert not waiting.future.done()
    assert lanes.num_waiting_tokens == 64
    go_on.set()
    waiting.future.result(timeout=30)
    lanes.close()
    assert lanes.num_waiting_tokens == 0


def test_light_items_are_not_lost_while_lanes_race() -> None:
    lanes = make_lanes(hidden, has_express_lane=True)
    lanes.start()
    items = [make_item(*range(1 + number % 8)) for number in range(4000)]
    for number, item in enumerate(items):
        item.is_light = number % 3 > 0
        lanes.submit([item], Client(str(number % 5)))
    for item in items:
        assert len(item.future.result(timeout=30).arrays[0]) == item.num_tokens
    lanes.close()
    assert lanes.num_waiting_tokens == 0
