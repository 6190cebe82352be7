"""Transfer of finished items from lane threads to the event loop, with a hand-written engine."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest

from attnlens_server.clients import ANONYMOUS, Client
from attnlens_server.engine import Item, ItemResult
from attnlens_server.serving.admission import Admission
from attnlens_server.serving.execution import ItemRunner

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


async def started(*calls: Any) -> list["asyncio.Task[Any]"]:
    """Start the calls, and let each submit its items."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    return tasks


async def test_results_keep_the_order_of_submission() -> None:
    lane = Lane()
    [call] = await started(runner(lane).run([an_item(), an_item()], "embeddings", ANONYMOUS))
    lane.items[1].future.set_result(a_result(1))
    lane.items[0].future.set_result(a_result(0))
    assert [result.queue_s for result in await call] == [0, 1]


async def test_items_completed_together_wake_the_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, loop = Lane(), asyncio.get_running_loop()
    running = runner(lane)
    calls = await started(*(running.run([an_item()], "embeddings", ANONYMOUS) for _ in range(8)))
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
    [call] = await started(runner(lane).run([an_item(), an_item()], "embeddings", ANONYMOUS))
    lane.items[0].future.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await call
    assert lane.items[1].future.cancelled()


async def test_cancelled_call_drops_only_its_own_queued_items() -> None:
    lane = Lane()
    running = runner(lane)
    left, other = await started(*(running.run([an_item()], "embeddings", ANONYMOUS) for _ in range(2)))
    left.cancel()
    await asyncio.wait([left])
    assert lane.items[0].future.cancelled()
    lane.items[1].future.set_result(a_result(1))
    [result] = await other
    assert result.queue_s == 1


async def test_no_result_is_lost_when_lanes_and_the_event_loop_race() -> None:
    lane = Lane()
    running = runner(lane)
    calls = await started(
        *(running.run([an_item(), an_item()], "embeddings", ANONYMOUS) for _ in range(2000))
    )
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
