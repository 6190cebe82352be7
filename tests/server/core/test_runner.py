"""Transfer of finished items from lane threads to the event loop, with a hand-written engine."""

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest

from attnlens_server.clients import ANONYMOUS, Client
from attnlens_server.core.admission import Admission
from attnlens_server.core.execution import ItemRunner
from attnlens_server.core.usage import CallMetrics, Clock, Timings
from attnlens_server.engine import Item, ItemResult
from attnlens_server.engine.batch import Elapsed
from attnlens_server.errors import DeadlineError, InvalidResultError

TIMEOUT_S = 60.0


class Lane:
    """Accepts items and completes them when the test does."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def submit(self, items: Sequence[Item], *, kind: str, client: Client) -> list[Future[ItemResult]]:
        del kind, client
        self.items += items
        return [item.future for item in items]


def runner(lane: Lane) -> ItemRunner:
    return ItemRunner(cast("Any", lane), Admission(1, 1, lambda _: 1.0))


def an_item() -> Item:
    return Item(np.ones(1, dtype=np.int64), ())


def a_result(number: int) -> ItemResult:
    return ItemResult((), queue_s=number, compute_s=0.0)


def run(running: ItemRunner, items: Sequence[Item]) -> Coroutine[Any, Any, list[ItemResult]]:
    return running.run(items, "embeddings", ANONYMOUS, Clock(CallMetrics()), "texts[{}]".format)


async def started(*calls: Any) -> list["asyncio.Task[Any]"]:
    """Start the calls, and let each submit its items."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    return tasks


async def test_results_keep_the_order_of_submission() -> None:
    lane = Lane()
    [call] = await started(run(runner(lane), [an_item(), an_item()]))
    lane.items[1].future.set_result(a_result(1))
    lane.items[0].future.set_result(a_result(0))
    assert [result.queue_s for result in await call] == [0, 1]


async def test_items_completed_together_wake_the_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, loop = Lane(), asyncio.get_running_loop()
    running = runner(lane)
    calls = await started(*(run(running, [an_item()]) for _ in range(8)))
    wake, num_wakes = loop.call_soon_threadsafe, 0

    def count(*args: Any) -> Any:
        nonlocal num_wakes
        num_wakes += 1
        return wake(*args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    for number, item in enumerate(lane.items):
        item.future.set_result(a_result(number))
    results = await asyncio.gather(*calls)
    assert [result.queue_s for [result] in results] == list(range(8))
    assert num_wakes == 1


async def test_failing_item_fails_its_call_and_drops_the_other_items() -> None:
    lane = Lane()
    [call] = await started(run(runner(lane), [an_item(), an_item()]))
    lane.items[0].future.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await call
    assert lane.items[1].future.cancelled()


async def test_invalid_result_names_its_text() -> None:
    lane = Lane()
    [call] = await started(run(runner(lane), [an_item(), an_item(), an_item()]))
    lane.items[1].future.set_exception(InvalidResultError())
    with pytest.raises(InvalidResultError, match=r"^texts\[1\] has NaN or infinity in its result"):
        await call


@pytest.mark.parametrize("is_expired", [False, True])
async def test_times_of_a_call_that_fails_are_those_until_then(*, is_expired: bool) -> None:
    lane, metrics, now = Lane(), CallMetrics(), time.monotonic()
    items = [an_item() for _ in range(3)]
    items[0].queued_at = items[1].queued_at = now - 30
    items[1].started_at = now - 20  # still running
    items[2].queued_at = now - 5
    clock = Clock(metrics)
    call = asyncio.ensure_future(runner(lane).run(items, "embeddings", ANONYMOUS, clock))
    await asyncio.sleep(0)
    if is_expired:
        items[0].future.set_exception(DeadlineError(""))
    else:
        call.cancel()
    await asyncio.wait([call])
    assert 30 <= metrics.queue_s < 40
    assert 20 <= metrics.compute_s < 30


def test_times_of_requests_of_one_call_are_added_and_those_of_its_runs_are_not() -> None:
    metrics = CallMetrics()
    for _ in range(2):
        clock = Clock(metrics)
        clock.add(tokenize_s=1)
        for seconds in (2, 5, 3):
            clock.add([Elapsed(seconds, seconds + 1)])
        assert clock.timings == Timings(1, 5, 6)
    assert (metrics.tokenize_s, metrics.queue_s, metrics.compute_s) == (2, 10, 12)


async def test_cancelled_call_drops_only_its_own_queued_items() -> None:
    lane = Lane()
    running = runner(lane)
    left, other = await started(*(run(running, [an_item()]) for _ in range(2)))
    left.cancel()
    await asyncio.wait([left])
    assert lane.items[0].future.cancelled()
    lane.items[1].future.set_result(a_result(1))
    [result] = await other
    assert result.queue_s == 1


async def test_no_result_is_lost_when_lanes_and_the_event_loop_race() -> None:
    lane = Lane()
    running = runner(lane)
    calls = await started(*(run(running, [an_item(), an_item()]) for _ in range(2000)))
    halves = [lane.items[0::2], lane.items[1::2]]
    threads = [threading.Thread(target=_end, args=(half,)) for half in halves]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(TIMEOUT_S):
        assert len(await asyncio.gather(*calls)) == len(calls)
    for thread in threads:
        thread.join()


def _end(items: Sequence[Item]) -> None:
    for item in items:
        item.future.set_result(a_result(0))
