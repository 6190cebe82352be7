"""Queue of a graph and batch scheduling.

Clients take turns: each gets its share of the computed tokens, and the texts of one client run in the order
of their arrival.

A batch is padded to its longest text, or slightly longer if the runtime requires certain lengths. The
scheduler therefore groups texts of similar length. It limits the number of tokens of a batch, because time
and memory depend on it. The first text in the queue is always in the batch, so the number of batches that a
text waits for is at most the number of texts ahead of it.
"""

import bisect
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from threading import get_ident

from attnlens_server.clients import ANONYMOUS, Client
from attnlens_server.engine.batch import Batch, Item
from attnlens_server.errors import DeadlineError, ShuttingDownError

logger = logging.getLogger(__name__)

WINDOW = 512  # maximum number of waiting items to consider for a batch
MAX_CLIENTS = 1024  # clients without waiting items are forgotten if there are more
# If background items wait and no lane runs any, one batch in this many is a background batch.
BACKGROUND_INTERVAL = 16
# After the arrival of an interactive item, one lane runs no background items for this long.
INTERACTIVE_S = 2.0


Choose = Callable[[Sequence[int], int], Collection[int]]
"""Returns the indices of a batch, given the lengths of the waiting items and the number of idle lanes."""


class Turns:
    """Fair order of the items of several clients: start-time fair queuing (Goyal, Vin and Cheng, 1996).

    Turns are numbers in tokens of a client with share 1. An item's turn is the end of its client's previous
    item, or the turn that is being served if the client has nothing waiting. A client that sends more
    therefore delays only its own items: others wait for at most one batch and their own tokens in proportion
    to their share.
    """

    def __init__(self) -> None:
        self._current = 0.0
        self._ends: dict[str, float] = {}

    def assign(self, client: Client, num_tokens: int) -> float:
        """Return the turn of a client's next item."""
        turn = max(self._current, self._ends.get(client.name, 0.0))
        self._ends[client.name] = turn + num_tokens / client.share
        return turn

    def give_back(self, dropped: Collection[Item], waiting: Iterable[Item]) -> None:
        """Give the turns of items that did not run to the later items of their clients."""
        charges: dict[str, float] = {}  # of the dropped items up to the current one
        is_dropped = set(dropped).__contains__
        for item in sorted((*dropped, *waiting), key=attrgetter("turn")):
            name = item.client.name
            if is_dropped(item):
                charges[name] = charges.get(name, 0.0) + item.num_tokens / item.client.share
            else:
                item.turn -= charges.get(name, 0.0)
        for name, charge in charges.items():
            if name in self._ends:
                self._ends[name] -= charge

    def serve(self, turn: float) -> None:
        """Record that the item with this turn, the smallest one that waits, is served."""
        self._current = max(self._current, turn)
        if len(self._ends) > MAX_CLIENTS:
            self._ends = {name: end for name, end in self._ends.items() if end > turn}


class Slots:
    """Limits the number of concurrent batches. Threads that wait for a slot get it in the order of arrival.

    The graphs of a CPU engine share its slots, one per lane: more concurrent batches than cores would only
    delay each other, and the small texts of other clients.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._lock = threading.Lock()  # protects the fields below: a slot is free only if nobody waits
        self._num_used = 0
        self._waiting: deque[threading.Event] = deque()

    def acquire(self) -> None:
        """Wait for a free slot."""
        with self._lock:
            if self._num_used < self._num_slots:
                self._num_used += 1
                return
            passed = threading.Event()
            self._waiting.append(passed)
        passed.wait()

    def release(self) -> None:
        """Pass an acquired slot to the next waiting thread."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._num_used -= 1

    def open(self) -> None:
        """Add slots for all waiting and later threads, so that a hanging batch cannot delay a shutdown."""
        with self._lock:
            self._num_slots = sys.maxsize
            self._num_used += len(self._waiting)
            while self._waiting:
                self._waiting.popleft().set()

    @property
    def num_used(self) -> int:
        """Number of used slots. May already be stale."""
        return self._num_used


_position = attrgetter("is_background", "turn")


class ItemQueue:
    """Waiting items in the order of their turns, background items last.

    Any thread may put items; lanes take batches.

    A batch never mixes background items with others, so a short request never runs in a background batch.
    The queue itself is unbounded: admission control limits the number of waiting texts before tokenization.
    """

    def __init__(self, num_lanes: int = 1, slots: Slots | None = None) -> None:
        """Initialize a queue for `num_lanes` consumer threads.

        Args:
            num_lanes: Number of threads that call `take`.
            slots: Slots of the batches that `take` returns. If None, each consumer has its own.
        """
        self._num_lanes = num_lanes
        self._slots = slots or Slots(num_lanes)
        # Protects _waiting: one lane at a time chooses its batch. `put` never acquires this lock.
        self._choosing = threading.Lock()
        # Sorted by _position. Newer items are in _arrived.
        self._waiting: list[Item] = []
        self._num_overtaken = 0  # consecutive batches that overtook background items
        # Protects the fields below. _changed wakes lanes. _light wakes the express lane, which runs the
        # _num_light items of small calls. _turns are those of items and of background items.
        # _arrived contains the items that no lane has received yet. _num_tokens is
        # the total length of both lists. _num_idle is the number of lanes inside `take`. _background_lanes
        # contains the threads that run background items, which may use all lanes after _interactive_until.
        # No items are added once _closed is set.
        self._lock = threading.RLock()
        self._changed, self._light = threading.Condition(self._lock), threading.Condition(self._lock)
        self._num_light = 0
        self._is_express_busy = True
        self._turns = (Turns(), Turns())
        self._arrived: list[Item] = []
        self._num_tokens = 0
        self._num_idle = 0
        self._background_lanes: set[int] = set()
        self._interactive_until = 0.0
        self._closed = False

    @property
    def num_tokens(self) -> int:
        """Number of waiting tokens. May already be stale."""
        return self._num_tokens

    @property
    def num_idle(self) -> int:
        """Number of waiting lanes. May already be stale."""
        return self._num_idle

    def put(self, items: Sequence[Item], client: Client = ANONYMOUS) -> None:
        """Add items of a client and record the time.

        Raises:
            ShuttingDownError: The queue is closed.
        """
        now = time.monotonic()
        with self._lock:
            if self._closed:
                raise ShuttingDownError("the server is shutting down: use another server")
            for item in items:
                item.queued_at, item.client = now, client
                if client.is_bulk:
                    item.is_background, item.is_light = True, False
                if not item.is_background:
                    self._interactive_until = now + INTERACTIVE_S
                self._num_light += item.is_light
                self._num_tokens += item.num_tokens
                item.turn = self._turns[item.is_background].assign(client, item.num_tokens)
            self._arrived.extend(items)
            if items[0].is_light and not self._is_express_busy:
                self._light.notify()
            self._changed.notify()

    def take_light(self, choose: Choose) -> Batch | None:
        """Wait for items of small calls and return a batch of them, or None once closed.

        Only one thread, the express lane, may call this.
        """
        while True:
            with self._lock:
                self._is_express_busy = False
                while not (self._num_light or self._closed):
                    self._light.wait()
                self._is_express_busy = True
                if self._closed:
                    return None
            with self._choosing:
                self._receive_arrived()
                self._drop_dead()
                light = self._first_light()
                if not light:
                    continue
                lengths = [self._waiting[index].num_tokens for index in light[:WINDOW]]
                batch = self._remove({light[index] for index in self._chosen(choose, lengths, 1)})
                if batch:
                    return Batch(batch, has_whole_machine=False)

    def take(self, choose: Choose) -> Batch | None:
        """Wait for items and return the batch that `choose` selects, or None once closed and drained.

        The caller must release the slot of the batch. Canceled and expired items are dropped; expired ones
        fail with `DeadlineError`. The returned items can no longer be canceled.
        """
        with self._lock:
            self._num_idle += 1
            if get_ident() in self._background_lanes:
                self._background_lanes.remove(get_ident())
                self._changed.notify()
        try:
            while not self._is_drained():
                self._slots.acquire()  # before the choice, so that no chosen item waits for another graph
                batch = None
                try:
                    batch = self._take_now(choose)
                finally:
                    if not batch:
                        self._slots.release()
                if batch:
                    return batch
            return None
        finally:
            with self._lock:
                self._num_idle -= 1

    def give_back(self, items: Sequence[Item]) -> None:
        """Give the turns of taken items, which could not run, to the later items of their clients."""
        with self._choosing:
            self._give_back(items)

    def release(self) -> None:
        """Release the slot of a batch that `take` returned."""
        self._slots.release()

    def close(self) -> None:
        """Reject new items. Waiting items can still be taken."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            self._light.notify_all()

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """Reject new items and fail the waiting ones, each with its own exception."""
        self.close()
        with self._choosing:
            self._receive_arrived()
            for item in self._waiting:
                if item.future.set_running_or_notify_cancel():
                    item.future.set_exception(error())
            self._subtract_tokens(self._waiting)
            self._waiting = []

    def _is_drained(self) -> bool:
        """Wait for an item that this lane may run. Return whether none will come, because of `close`."""
        with self._lock:
            while not (self._closed or self._may_take()):
                self._changed.wait(self._time_to_background_s())
            return not (self._waiting or self._arrived)

    def _take_now(self, choose: Choose) -> Batch | None:
        """Return the next batch, or None if there are no items that this lane may run."""
        with self._choosing:
            self._receive_arrived()
            self._drop_dead()
            with self._lock:
                if not self._waiting or not (self._closed or self._may_take()):
                    return None
            batch = self._next_batch(choose)
        with self._lock:
            if self._waiting:
                self._changed.notify()
        return batch if batch.items else None

    # --- called by the lane that holds _choosing --------------------------------------------------

    def _receive_arrived(self) -> None:
        """Sort the new items into the queue."""
        with self._lock:
            for item in self._arrived:
                bisect.insort_right(self._waiting, item, key=_position)
            self._arrived = []

    def _may_take(self) -> bool:
        """Return whether there is an item that this lane may run."""
        if self._time_to_background_s() is None:
            return bool(self._waiting or self._arrived)
        return not all(item.is_background for item in (*self._waiting[:1], *self._arrived))

    def _time_to_background_s(self) -> float | None:
        """Return for how long the last lane must not run background items. None if it may."""
        if len(self._background_lanes) < max(1, self._num_lanes - 1):
            return None
        remaining_s = self._interactive_until - time.monotonic()
        return remaining_s if remaining_s > 0 else None

    def _drop_dead(self) -> None:
        now = time.monotonic()
        live: list[Item] = []
        dead: list[Item] = []
        for item in self._waiting:  # evaluate is_dead once: an item may be canceled at any time
            (dead if item.is_dead(now) else live).append(item)
        if not dead:
            return
        self._waiting = live
        self._give_back(dead)
        self._subtract_tokens(dead)
        for item in dead:
            _fail_expired(item)

    def _give_back(self, dropped: Sequence[Item], running: Sequence[Item] = ()) -> None:
        """Give the turns of dropped items to later ones, including those of a batch that will run."""
        with self._lock:
            others = (*running, *self._waiting, *self._arrived)
            for is_background, turns in enumerate(self._turns):
                turns.give_back(
                    [item for item in dropped if item.is_background == is_background],
                    [item for item in others if item.is_background == is_background],
                )
            self._waiting.sort(key=_position)

    def _first_light(self) -> list[int]:
        """Return the indices of the items of small calls, without background items if there are others."""
        light = [index for index, item in enumerate(self._waiting) if item.is_light]
        is_background = bool(light) and self._waiting[light[0]].is_background
        return [index for index in light if self._waiting[index].is_background == is_background]

    def _next_batch(self, choose: Choose) -> Batch:
        first = self._first_candidate()
        is_background = self._waiting[first].is_background
        window = self._waiting[first : first + WINDOW]
        lengths = [item.num_tokens for item in window if item.is_background == is_background]
        turn = self._waiting[first].turn
        chosen = self._chosen(choose, lengths, self._num_idle)
        live = self._remove({first + index for index in chosen})
        with self._lock:
            self._turns[is_background].serve(turn)
            if is_background:
                self._background_lanes.add(get_ident())
            is_all = not self._waiting and not self._arrived
            is_alone = self._num_idle == self._num_lanes and self._slots.num_used == 1
            return Batch(live, has_whole_machine=is_all and is_alone)

    def _first_candidate(self) -> int:
        """Return the index of the first item of the next batch."""
        waiting = self._waiting
        is_mixed = waiting[-1].is_background and not waiting[0].is_background
        if not is_mixed or self._background_lanes:
            self._num_overtaken = 0
            return 0
        self._num_overtaken += 1
        if self._num_overtaken < BACKGROUND_INTERVAL:
            return 0
        self._num_overtaken = 0
        return next(index for index, item in enumerate(waiting) if item.is_background)

    def _remove(self, chosen: Collection[int]) -> list[Item]:
        """Remove items from the queue. Return those that can no longer be cancelled."""
        batch = [item for index, item in enumerate(self._waiting) if index in chosen]
        self._waiting = [item for index, item in enumerate(self._waiting) if index not in chosen]
        live = [item for item in batch if item.future.set_running_or_notify_cancel()]
        if len(live) < len(batch):
            self._give_back([item for item in batch if item not in live], live)
        self._subtract_tokens(batch)
        return live

    def _chosen(self, choose: Choose, lengths: Sequence[int], num_idle: int) -> set[int]:
        try:
            return set(choose(lengths, num_idle))
        except Exception:
            logger.exception("no batch could be chosen: the first text runs alone")
            return {0}

    def _subtract_tokens(self, items: Sequence[Item]) -> None:
        with self._lock:
            self._num_tokens -= sum(item.num_tokens for item in items)
            self._num_light -= sum(item.is_light for item in items)
            if not self._num_tokens:  # no items wait, so nobody has to wait for others
                self._turns = (Turns(), Turns())


def _fail_expired(item: Item) -> None:
    if item.future.set_running_or_notify_cancel():
        item.future.set_exception(DeadlineError("the deadline passed before the text ran"))


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a batch. A single text that exceeds a limit runs alone.

    Attributes:
        max_tokens: Maximum number of tokens including padding: number of texts x longest length.
        max_padding_share: Maximum share of padding among all tokens.
        max_square_tokens: Maximum of number of texts x squared longest length, which is proportional to the
            size of attention weights. None means no limit.
    """

    max_tokens: int
    max_padding_share: float = 0.05
    max_square_tokens: int | None = None

    def allow(self, num_texts: int, num_live_tokens: int, max_length: int) -> bool:
        """Return whether a batch of these sizes is within the limits."""
        num_tokens = num_texts * max_length
        if num_tokens > self.max_tokens:
            return False
        if self.max_square_tokens is not None and num_tokens * max_length > self.max_square_tokens:
            return False
        return num_tokens - num_live_tokens <= self.max_padding_share * num_tokens


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Lengths to which batches are padded.

    Attributes:
        multiple: Each length is a multiple of this number, or `max_length`.
        max_length: Number of positions of the model.
    """

    multiple: int
    max_length: int

    def round_up(self, num_tokens: int) -> int:
        """Return the padded length of a batch whose longest text has `num_tokens` tokens."""
        rounded = math.ceil(num_tokens / self.multiple) * self.multiple
        return max(num_tokens, min(rounded, self.max_length))


@dataclass(frozen=True, slots=True)
class Scheduler:
    """Chooses batches for the lanes of a graph.

    Attributes:
        limits: Limits of a batch.
        buckets: Lengths to which batches are padded. None pads to the longest text.
        counts: Allowed numbers of texts per batch, ascending from 1. Empty allows any number.
    """

    limits: BatchLimits
    buckets: LengthBuckets | None = None
    counts: Sequence[int] = ()

    def choose(self, lengths: Sequence[int], num_idle: int) -> list[int]:
        """Return the indices of the texts of the next batch.

        Args:
            lengths: Number of tokens of each waiting text, in the order of the queue.
            num_idle: Number of idle lanes, including the calling one.
        """
        padded = [self.padded_length(length) for length in lengths]
        chosen = pack(padded, share(padded, self.limits, num_idle))
        return chosen[: self._round_down(len(chosen))]

    def padded_length(self, num_tokens: int) -> int:
        """Return the padded length of a batch whose longest text has `num_tokens` tokens."""
        return self.buckets.round_up(num_tokens) if self.buckets else num_tokens

    def _round_down(self, num_texts: int) -> int:
        return max((count for count in self.counts if count <= num_texts), default=num_texts)


def share(lengths: Sequence[int], limits: BatchLimits, num_idle: int) -> BatchLimits:
    """Return the limits of a batch that leaves a fair share of the waiting texts to the other idle lanes.

    Args:
        lengths: Number of tokens of each waiting text.
        limits: Limits of a batch.
        num_idle: Number of idle lanes.
    """
    fair_tokens = math.ceil(sum(lengths) / num_idle)
    return replace(limits, max_tokens=min(limits.max_tokens, fair_tokens))


def pack(lengths: Sequence[int], limits: BatchLimits) -> list[int]:
    """Choose the texts of the next batch.

    Starting from the first text, add the text with the most similar length until the next shorter and the
    next longer text would both exceed a limit.

    Args:
        lengths: Number of tokens of each waiting text, in the order of the queue. Must not be empty.
        limits: Limits of a batch.

    Returns:
        Indices into `lengths` in ascending order, always including 0.
    """
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    low = high = by_length.index(0)  # the batch is by_length[low : high + 1]
    live_tokens = max_length = lengths[0]
    while True:
        neighbors = []  # (index in by_length, longest length of the batch with this text)
        if low > 0:
            neighbors.append((low - 1, max_length))
        if high + 1 < len(by_length):
            neighbors.append((high + 1, lengths[by_length[high + 1]]))
        fitting = [
            (abs(lengths[by_length[position]] - lengths[0]), position, longest)
            for position, longest in neighbors
            if limits.allow(high - low + 2, live_tokens + lengths[by_length[position]], longest)
        ]
        if not fitting:
            return sorted(by_length[low : high + 1])
        _, position, max_length = min(fitting)
        live_tokens += lengths[by_length[position]]
        low, high = min(low, position), max(high, position)
