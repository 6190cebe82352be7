"""A worker whose sessions do as a test says: what happens to its items when something goes wrong."""

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

from attnlens.pooling import pool
from attnlens.v1.manifest_pb2 import Pooling
from attnlens_server.engine.item import Item, TokenPooling
from attnlens_server.engine.outputs import HostOutputs, slice_item
from attnlens_server.engine.pack import BatchLimits
from attnlens_server.engine.sessions import Sessions
from attnlens_server.engine.worker import MAX_RETRY_S, MIN_RETRY_S, SessionWorker
from attnlens_server.engine.worker import logger as worker_logger
from attnlens_server.errors import InternalError

if TYPE_CHECKING:
    from attnlens_server.engine.session import Session

HIDDEN = ("last_hidden_state",)
Run = Callable[[npt.NDArray[np.int64]], HostOutputs]


class ScriptedSession:
    """Runs a function in place of a graph."""

    providers = ("CPUExecutionProvider",)

    def __init__(self, run: Run) -> None:
        self._run = run

    def run(
        self,
        input_ids: npt.NDArray[np.int64],
        attention_mask: npt.NDArray[np.int64],
        output_names: Sequence[str],
    ) -> HostOutputs:
        del attention_mask, output_names
        return self._run(input_ids)


def make_worker(run: Run) -> SessionWorker:
    session = cast("Session", ScriptedSession(run))
    sessions = Sessions(lambda _: session, threads=1, num_lanes=1)
    return SessionWorker("scripted", sessions, BatchLimits(64), num_lanes=1, pad_token_id=0)


def hidden(input_ids: npt.NDArray[np.int64]) -> HostOutputs:
    """Token vectors (B, T, 2) that hold the ids."""
    return HostOutputs({"last_hidden_state": np.stack([input_ids] * 2, axis=-1).astype(np.float32)})


def make_item(*ids: int) -> Item:
    return Item(np.array(ids, dtype=np.int64), HIDDEN)


def test_a_lane_that_dies_fails_what_waits_and_says_so() -> None:
    class PanicError(BaseException):
        """What no handler of exceptions catches."""

    go_on, died = threading.Event(), threading.Event()

    def die(_: npt.NDArray[np.int64]) -> HostOutputs:
        assert go_on.wait(timeout=30)
        raise PanicError

    worker = make_worker(die)
    worker.on_death = died.set
    running, waiting = make_item(1), make_item(*range(64))
    worker.queue.put([running])
    worker.start()
    worker.queue.put([waiting])
    go_on.set()
    assert died.wait(timeout=30)
    assert isinstance(running.future.exception(timeout=30), PanicError)
    assert isinstance(waiting.future.exception(timeout=30), InternalError)
    worker.close()


def test_a_lane_that_dies_in_a_batch_leaves_none_of_its_texts_without_an_end() -> None:
    class PanicError(BaseException):
        """What no handler of exceptions catches."""

    def die(input_ids: npt.NDArray[np.int64]) -> HostOutputs:
        raise RuntimeError if len(input_ids) > 1 else PanicError

    worker = make_worker(die)
    items = [make_item(1) for _ in range(4)]
    worker.queue.put(items)
    worker.start()
    assert [type(item.future.exception(timeout=30)) for item in items] == [PanicError] * 4
    worker.close()


def test_a_failure_holds_no_items(caplog: pytest.LogCaptureFixture) -> None:
    """Or what a failed call has brought would stay until a full garbage collection."""
    caplog.set_level(logging.CRITICAL, worker_logger.name)  # a record of the warning would hold the error

    def fail(input_ids: npt.NDArray[np.int64]) -> HostOutputs:
        raise RuntimeError(str(input_ids.shape))

    worker = make_worker(fail)
    worker.start()
    items = [make_item(1), make_item(1)]
    brought = [weakref.ref(item.input_ids) for item in items]
    worker.queue.put(items)
    for item in items:
        item.future.exception(timeout=30)
    while not worker.queue.num_idle:  # until the lane waits again
        time.sleep(0.001)
    gc.disable()
    try:
        del item, items
        assert [found() for found in brought] == [None, None]
    finally:
        gc.enable()
    worker.close()


def test_an_idle_lane_keeps_no_results() -> None:
    worker = make_worker(hidden)
    worker.start()
    item = make_item(1, 2, 3)
    worker.queue.put([item])
    result = item.future.result(timeout=30).outputs["last_hidden_state"]
    np.testing.assert_array_equal(result[:, 0], [1, 2, 3])
    while not worker.queue.num_idle:  # until the lane waits again
        time.sleep(0.001)
    forgotten = weakref.ref(result)
    del item, result
    gc.collect()
    assert forgotten() is None
    worker.close()


def test_the_hint_for_those_who_come_later_counts_lanes_once() -> None:
    worker = make_worker(hidden)
    assert worker.retry_after_s() == MIN_RETRY_S
    worker.queue.put([make_item(*range(60))] * 40)
    worker._tokens_per_s = 600
    assert worker.retry_after_s() == pytest.approx(4)
    worker._tokens_per_s = 1
    assert worker.retry_after_s() == MAX_RETRY_S


@pytest.mark.parametrize("pooling", list(Pooling.values())[1:])
def test_vectors_are_pooled_in_the_lane_and_hold_no_batch(pooling: Pooling.ValueType) -> None:
    batch = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)
    item = Item(np.arange(4), HIDDEN, pooling=TokenPooling(pooling, num_excluded=1))
    vector = slice_item(HostOutputs({"last_hidden_state": batch}), 1, item)["last_hidden_state"]
    np.testing.assert_array_equal(vector, pool(batch[1, :4], pooling, 1))
    assert vector.base is None or vector.base.size == vector.size


def test_the_token_vectors_of_one_text_hold_no_batch() -> None:
    batch = np.zeros((3, 5, 4), np.float32)
    vectors = slice_item(HostOutputs({"last_hidden_state": batch}), 1, make_item(1, 2))["last_hidden_state"]
    assert vectors.shape == (2, 4)
    assert vectors.base is None
