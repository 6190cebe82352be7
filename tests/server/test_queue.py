"""The queue: nobody waits for what nobody wants, nothing is lost."""

import threading
import time

import numpy as np
import pytest

from attnlens_server.engine.item import Item
from attnlens_server.engine.pack import BatchLimits, pack
from attnlens_server.engine.queue import ItemQueue
from attnlens_server.errors import DeadlineError, ShuttingDownError


def make_queue(max_tokens: int = 64) -> ItemQueue:
    return ItemQueue(lambda lengths: pack(lengths, BatchLimits(max_tokens)))


def make_item(length: int, deadline: float | None = None) -> Item:
    return Item(np.ones(length, dtype=np.int64), ("last_hidden_state",), deadline)


def test_items_come_out_in_batches_oldest_first() -> None:
    queue = make_queue()
    items = [make_item(32) for _ in range(5)]
    queue.put(items)
    assert queue.num_tokens == 160
    assert queue.take() == items[:2]
    assert queue.take() == items[2:4]
    assert queue.num_tokens == 32
    assert queue.take() == items[4:]
    assert queue.num_tokens == 0


def test_a_cancelled_item_never_comes_out() -> None:
    queue = make_queue()
    cancelled, live = make_item(8), make_item(8)
    queue.put([cancelled, live])
    assert cancelled.future.cancel()
    assert queue.take() == [live]


def test_an_expired_item_fails_with_its_reason_and_never_comes_out() -> None:
    queue = make_queue()
    expired, live = make_item(8, deadline=time.monotonic() - 1), make_item(8, time.monotonic() + 60)
    queue.put([expired, live])
    assert queue.take() == [live]
    with pytest.raises(DeadlineError):
        expired.future.result(timeout=0)


def test_a_taker_waits_for_an_item() -> None:
    queue, item = make_queue(), make_item(4)
    taken: list[list[Item]] = []
    taker = threading.Thread(target=lambda: taken.append(queue.take()))
    taker.start()
    assert not taken
    queue.put([item])
    taker.join(timeout=10)
    assert taken == [[item]]


def test_a_taker_is_not_woken_for_good_by_dead_items_alone() -> None:
    queue, live = make_queue(), make_item(4)
    taken: list[list[Item]] = []
    taker = threading.Thread(target=lambda: taken.append(queue.take()))
    queue.put([make_item(4, deadline=time.monotonic() - 1)])
    taker.start()
    queue.put([live])
    taker.join(timeout=10)
    assert taken == [[live]]


def test_a_closed_queue_gives_what_it_has_then_nothing_and_takes_no_more() -> None:
    queue, item = make_queue(), make_item(4)
    queue.put([item])
    queue.close()
    with pytest.raises(ShuttingDownError):
        queue.put([make_item(4)])
    assert queue.take() == [item]
    assert queue.take() == []


def test_many_threads_lose_and_double_nothing() -> None:
    queue = make_queue()
    batches = [[make_item(length) for length in range(1, 20)] for _ in range(8)]
    putters = [threading.Thread(target=queue.put, args=(batch,)) for batch in batches]
    for putter in putters:
        putter.start()
    for putter in putters:
        putter.join()
    queue.close()
    taken: list[Item] = []
    while batch := queue.take():
        taken += batch
    assert len(taken) == 8 * 19
    assert {id(item) for item in taken} == {id(item) for batch in batches for item in batch}
