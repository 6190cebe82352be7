"""The queue loses no items and skips items that are cancelled or expired."""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
import pytest

from attnlens_server.clients import Client
from attnlens_server.engine.batch import Batch, Item
from attnlens_server.engine.scheduler import (
    BACKGROUND_INTERVAL,
    MAX_CLIENTS,
    BatchLimits,
    ItemQueue,
    Scheduler,
    Slots,
)
from attnlens_server.errors import DeadlineError, ShuttingDownError


class Queue(ItemQueue):
    """A queue and the batch selection of its lanes."""

    def __init__(self, max_tokens: int = 64, num_lanes: int = 1, slots: Slots | None = None) -> None:
        super().__init__(num_lanes, slots)
        self._scheduler = Scheduler(BatchLimits(max_tokens))

    def take_and_release(self) -> Batch | None:
        batch = self.take(self._scheduler.choose)
        if batch:
            self.release()
        return batch

    def taken(self) -> list[Item]:
        batch = self.take_and_release()
        return batch.items if batch else []


def make_queue(max_tokens: int = 64, num_lanes: int = 1) -> Queue:
    return Queue(max_tokens, num_lanes)


def make_item(length: int, deadline: float | None = None) -> Item:
    return Item(np.ones(length, dtype=np.int64), (), deadline=deadline)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_batches_are_taken_oldest_first() -> None:
    queue = make_queue()
    items = [make_item(32) for _ in range(5)]
    queue.put(items)
    assert queue.num_tokens == 160
    assert queue.taken() == items[:2]
    assert queue.taken() == items[2:4]
    assert queue.num_tokens == 32
    assert queue.taken() == items[4:]
    assert queue.num_tokens == 0


def test_cancelled_item_is_never_taken() -> None:
    queue = make_queue()
    cancelled, live = make_item(8), make_item(8)
    queue.put([cancelled, live])
    assert cancelled.future.cancel()
    assert queue.taken() == [live]


def test_expired_item_fails_with_its_reason_and_is_never_taken() -> None:
    queue = make_queue()
    expired, live = make_item(8, deadline=time.monotonic() - 1), make_item(8, time.monotonic() + 60)
    queue.put([expired, live])
    assert queue.taken() == [live]
    with pytest.raises(DeadlineError):
        expired.future.result(timeout=0)


def test_take_waits_for_an_item() -> None:
    queue, item = make_queue(), make_item(4)
    taken: list[list[Item]] = []
    taker = threading.Thread(target=lambda: taken.append(queue.taken()))
    taker.start()
    wait_until(lambda: queue.num_idle == 1)
    queue.put([item])
    taker.join(timeout=10)
    assert taken == [[item]]


def test_take_keeps_waiting_when_all_items_are_dead() -> None:
    queue, live, expired = make_queue(), make_item(4), make_item(4, deadline=time.monotonic() - 1)
    taken: list[list[Item]] = []
    taker = threading.Thread(target=lambda: taken.append(queue.taken()))
    queue.put([expired])
    taker.start()
    assert isinstance(expired.future.exception(timeout=10), DeadlineError)
    queue.put([live])
    taker.join(timeout=10)
    assert taken == [[live]]


def test_closed_queue_drains_and_rejects_new_items() -> None:
    queue, item = make_queue(), make_item(4)
    queue.put([item])
    queue.close()
    with pytest.raises(ShuttingDownError):
        queue.put([make_item(4)])
    assert queue.taken() == [item]
    assert queue.taken() == []


def make_background(length: int) -> Item:
    return Item(np.ones(length, dtype=np.int64), (), is_background=True)


def test_background_items_run_last_and_in_separate_batches() -> None:
    queue = make_queue(max_tokens=64)
    background = [make_background(8) for _ in range(4)]
    early, late = make_item(8), make_item(8)
    queue.put([*background[:2], early, *background[2:]])
    queue.put([late])
    assert queue.taken() == [early, late]
    assert queue.taken() == background
    assert queue.num_tokens == 0


def test_background_items_are_not_starved() -> None:
    queue, background = make_queue(max_tokens=8), [make_background(8), make_background(8)]
    queue.put([*background, *(make_item(8) for _ in range(2 * BACKGROUND_INTERVAL))])
    taken = [queue.taken() for _ in range(2 * BACKGROUND_INTERVAL)]
    background_positions = [index + 1 for index, items in enumerate(taken) if items[0].is_background]
    assert background_positions == [BACKGROUND_INTERVAL, 2 * BACKGROUND_INTERVAL]


def test_one_lane_stays_free_of_background_items_after_other_work() -> None:
    queue = make_queue(max_tokens=8, num_lanes=2)
    queue.put([make_item(8)])
    assert len(queue.taken()) == 1
    background, taken = [make_background(8) for _ in range(3)], SimpleQueue[list[Item]]()
    queue.put(background)
    assert queue.taken() == background[:1]
    threading.Thread(target=lambda: taken.put(queue.taken()), daemon=True).start()
    wait_until(lambda: queue.num_idle == 1)
    item = make_item(8)
    queue.put([item])
    assert taken.get(timeout=10) == [item]
    assert queue.taken() == background[1:2]  # this lane no longer runs anything else


def test_background_items_use_all_lanes_after_an_idle_period() -> None:
    queue = make_queue(max_tokens=8, num_lanes=2)
    background, taken = [make_background(8) for _ in range(2)], SimpleQueue[list[Item]]()
    queue.put(background)
    assert queue.taken() == background[:1]
    threading.Thread(target=lambda: taken.put(queue.taken()), daemon=True).start()
    assert taken.get(timeout=10) == background[1:]


def test_idle_lanes_share_queued_items() -> None:
    """Two idle lanes get half of the items each, even if one batch could hold all of them."""
    queue = make_queue(max_tokens=1024, num_lanes=2)
    taken: SimpleQueue[list[Item]] = SimpleQueue()
    lanes = [threading.Thread(target=lambda: taken.put(queue.taken())) for _ in range(2)]
    for lane in lanes:
        lane.start()
    wait_until(lambda: queue.num_idle == 2)
    items = [make_item(16) for _ in range(8)]
    queue.put(items)
    batches = [taken.get(timeout=10) for _ in range(2)]
    assert sorted(len(batch) for batch in batches) == [4, 4]


def test_lane_takes_a_full_batch_while_the_others_are_busy() -> None:
    queue = make_queue(max_tokens=1024, num_lanes=2)
    queue.put([make_item(16) for _ in range(8)])
    assert len(queue.taken()) == 8


def test_batch_runs_on_all_threads_when_nothing_else_is_queued_or_running() -> None:
    one_lane, two_lanes = make_queue(), make_queue(num_lanes=2)
    for queue in (one_lane, two_lanes):
        queue.put([make_item(64), make_item(64)])
    batches = [queue.take_and_release() for queue in (one_lane, one_lane, two_lanes, two_lanes)]
    # With two lanes, the other lane is busy.
    assert [batch and batch.has_whole_machine for batch in batches] == [False, True, False, False]


def test_batch_runs_on_one_thread_while_another_graph_runs() -> None:
    slots = Slots(2)
    queue, other = Queue(slots=slots), Queue(slots=slots)
    queue.put([make_item(64), make_item(64)])
    queue.taken()
    other.put([make_item(64)])
    assert other.take(other._scheduler.choose)
    batch = queue.take_and_release()
    assert batch
    assert not batch.has_whole_machine
    other.release()
    queue.put([make_item(64)])
    batch = queue.take_and_release()
    assert batch
    assert batch.has_whole_machine


def test_graphs_get_shared_slots_in_order_of_arrival() -> None:
    slots = Slots(1)
    queues = [Queue(slots=slots) for _ in range(3)]
    order: SimpleQueue[int] = SimpleQueue()

    def run(index: int) -> None:
        assert queues[index].take(queues[index]._scheduler.choose)
        order.put(index)
        queues[index].release()

    slots.acquire()
    for index, queue in enumerate(queues):
        queue.put([make_item(1)])
        threading.Thread(target=run, args=(index,)).start()
        wait_until(lambda: len(slots._waiting) == index + 1)  # noqa: B023 - called in this iteration
    slots.release()
    assert [order.get(timeout=10) for _ in queues] == [0, 1, 2]
    wait_until(lambda: slots.num_used == 0)


def test_items_that_arrive_while_a_lane_waits_for_a_slot_join_its_batch() -> None:
    slots = Slots(1)
    queue = Queue(slots=slots)
    batches: SimpleQueue[list[Item]] = SimpleQueue()
    slots.acquire()
    first, cancelled, second = (make_item(4) for _ in range(3))
    queue.put([first, cancelled])
    threading.Thread(target=lambda: batches.put(queue.taken())).start()
    wait_until(lambda: len(slots._waiting) == 1)
    cancelled.future.cancel()
    queue.put([second])
    slots.release()
    assert batches.get(timeout=10) == [first, second]


def test_opened_slots_let_every_thread_pass() -> None:
    slots = Slots(1)
    slots.acquire()  # of a hanging batch
    waiting = threading.Thread(target=slots.acquire)
    waiting.start()
    wait_until(lambda: len(slots._waiting) == 1)
    slots.open()
    waiting.join(timeout=10)
    slots.acquire()
    assert slots.num_used == 3


def test_concurrent_threads_neither_lose_nor_duplicate_items() -> None:
    queue = make_queue()
    batches = [[make_item(length) for length in range(1, 20)] for _ in range(8)]
    putters = [threading.Thread(target=queue.put, args=(batch,)) for batch in batches]
    for putter in putters:
        putter.start()
    for putter in putters:
        putter.join()
    queue.close()
    taken: list[Item] = []
    while batch := queue.taken():
        taken += batch
    assert len(taken) == 8 * 19
    assert {id(item) for item in taken} == {id(item) for batch in batches for item in batch}


def test_error_in_batch_selection_fails_the_batch_but_not_the_lane(caplog: pytest.LogCaptureFixture) -> None:
    def fail(lengths: Sequence[int], num_idle: int) -> list[int]:
        raise RuntimeError(f"{lengths} {num_idle}")

    queue, items = ItemQueue(num_lanes=2), [make_item(4), make_item(4)]
    queue.put(items)
    batches = [queue.take(fail) for _ in items]
    assert [batch and batch.items for batch in batches] == [[items[0]], [items[1]]]
    assert "no batch could be chosen" in caplog.text
    assert queue.num_idle == 0


def test_put_does_not_wait_for_batch_selection() -> None:
    choosing, go_on = threading.Event(), threading.Event()

    def choose(lengths: Sequence[int], num_idle: int) -> list[int]:
        del num_idle
        choosing.set()
        assert go_on.wait(timeout=30)
        return list(range(len(lengths)))

    queue, first, second = ItemQueue(num_lanes=2), make_item(4), make_item(4)
    queue.put([first])
    taken: list[Batch | None] = []
    lane = threading.Thread(target=lambda: taken.append(queue.take(choose)))
    lane.start()
    assert choosing.wait(timeout=30)
    queue.put([second])  # would hang here
    assert queue.num_tokens == 8
    go_on.set()
    lane.join(timeout=30)
    taken.append(queue.take(choose))
    assert [batch and batch.items for batch in taken] == [[first], [second]]


def test_queue_time_starts_when_the_item_is_queued() -> None:
    queue, item = make_queue(), make_item(4)
    made_at = item.queued_at = time.monotonic() - 100  # as if it had waited for a slow consumer
    queue.put([item])
    assert item.queued_at >= made_at + 100


def test_failing_queue_gives_each_item_a_separate_error() -> None:
    queue, items = make_queue(), [make_item(4), make_item(4)]
    queue.put(items)
    queue.fail_all(lambda: DeadlineError("none"))
    errors = [item.future.exception(timeout=0) for item in items]
    assert [type(error) for error in errors] == [DeadlineError, DeadlineError]
    assert errors[0] is not errors[1]
    assert queue.num_tokens == 0
    with pytest.raises(ShuttingDownError):
        queue.put([make_item(4)])


def test_item_cancelled_during_inspection_is_counted_once() -> None:
    class CancelledLater(Item):
        """Alive on the first check and dead afterwards."""

        def is_dead(self, now: float) -> bool:
            del now
            is_alive, self.deadline = self.deadline is not None, 0.0
            return is_alive

    queue, item = make_queue(), CancelledLater(np.ones(5, dtype=np.int64), ())
    queue.put([item])
    assert queue.taken() == [item]
    assert queue.num_tokens == 0


def test_clients_are_forgotten_when_nothing_waits() -> None:
    queue = make_queue()
    for number in range(3 * MAX_CLIENTS):
        queue.put([make_item(4), make_item(4)], Client(str(number)))
        assert len(queue.taken()) == 2
    assert len(queue._turns[0]._ends) <= 1


def make_light(length: int) -> Item:
    return Item(np.ones(length, dtype=np.int64), (), is_light=True)


def test_client_with_cancelled_items_is_served_before_items_that_others_sent_later() -> None:
    queue, client = make_queue(max_tokens=8), Client("impatient")
    queue.put([make_item(8)], Client("busy"))
    abandoned = [make_item(8) for _ in range(100)]
    queue.put(abandoned, client)
    for item in abandoned:
        item.abandon()
    wanted = make_item(8)
    queue.put([wanted], client)
    queue.put([make_item(8) for _ in range(9)], Client("busy"))
    assert wanted in [*queue.taken(), *queue.taken()]


def test_express_lane_takes_no_items_of_bulk_clients() -> None:
    queue, bulk = make_queue(), Client("nightly", is_bulk=True)
    small, interactive = make_light(8), make_light(8)
    queue.put([small], bulk)
    assert queue._num_light == 0
    queue.put([interactive], Client("user"))
    batch = queue.take_light(queue._scheduler.choose)
    assert batch
    assert batch.items == [interactive]
    assert queue.taken() == [small]


def test_express_lane_does_not_mix_background_items_with_others() -> None:
    queue, light, background = make_queue(), make_light(8), make_light(8)
    background.is_background = True
    queue.put([background])
    queue.put([light])
    batch = queue.take_light(queue._scheduler.choose)
    assert batch
    assert batch.items == [light]


def test_light_item_is_taken_while_both_kinds_of_lanes_are_idle() -> None:
    queue = make_queue(num_lanes=2)
    taken: SimpleQueue[list[Item]] = SimpleQueue()

    def run_express_lane() -> None:
        while batch := queue.take_light(lambda lengths, _: range(len(lengths))):
            taken.put(batch.items)

    def run_lane() -> None:
        while items := queue.taken():
            taken.put(items)

    threads = [threading.Thread(target=run) for run in (run_express_lane, run_lane)]
    for thread in threads:
        thread.start()
    wait_until(lambda: queue.num_idle == 1 and not queue._is_express_busy)
    try:
        for _ in range(100):
            item = make_item(4)
            item.is_light = True
            queue.put([item])
            assert taken.get(timeout=10) == [item]
    finally:
        queue.close()
        for thread in threads:
            thread.join()
