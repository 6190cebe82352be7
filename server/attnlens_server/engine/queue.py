"""Where items wait for a lane."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from threading import get_ident

from attnlens_server.engine.batch import Batch
from attnlens_server.engine.item import Item
from attnlens_server.errors import DeadlineError, ShuttingDownError

logger = logging.getLogger(__name__)

WINDOW = 512  # of the items that wait, how many are looked at for a batch
# If no lane runs background items while they wait, one batch in this many does, whatever else waits.
BACKGROUND_INTERVAL = 16
# After any other item, one lane is kept free of background items for this long.
INTERACTIVE_S = 2.0


Choose = Callable[[Sequence[int], int], Collection[int]]
"""Gets the lengths of waiting items and how many lanes are idle; returns which items run together."""


class ItemQueue:
    """Waiting items, oldest first, background items last. Any thread puts; a number of lanes take.

    A batch has either background items only or none, so that a short request never runs in a batch of them.
    How many may wait is not decided here but before tokenization, by admission.
    """

    def __init__(self, num_lanes: int = 1) -> None:
        """Make a queue that `num_lanes` threads take from."""
        self._num_lanes = num_lanes
        # Protects _waiting: one lane at a time chooses its batch. `put` never waits for it.
        self._choosing = threading.Lock()
        # Sorted by is_background, then by arrival; those that were put after them are in _arrived.
        self._waiting: list[Item] = []
        self._num_overtaken = 0  # batches since background items were passed over first
        # Protects: _arrived holds what was put and no lane has seen, _num_tokens is the sum of the lengths
        # in both lists, _num_idle the number of lanes inside `take`, _background_lanes has the threads that
        # run background items, and _interactive_until is when these may use all lanes again. Nothing is put
        # once _closed is set.
        self._changed = threading.Condition()
        self._arrived: list[Item] = []
        self._num_tokens = 0
        self._num_idle = 0
        self._background_lanes: set[int] = set()
        self._interactive_until = 0.0
        self._closed = False

    @property
    def num_tokens(self) -> int:
        """The tokens that wait. Exact when read, perhaps not a moment later."""
        return self._num_tokens

    @property
    def num_idle(self) -> int:
        """The lanes that wait. Exact when read, perhaps not a moment later."""
        return self._num_idle

    def put(self, items: Sequence[Item]) -> None:
        """Add items; their time in the queue begins.

        Raises:
            ShuttingDownError: the queue is closed.
        """
        now = time.monotonic()
        for item in items:
            item.queued_at = now
        with self._changed:
            if self._closed:
                raise ShuttingDownError("the server is shutting down: ask another one")
            self._arrived.extend(items)
            if not all(item.is_background for item in items):
                self._interactive_until = now + INTERACTIVE_S
            self._num_tokens += sum(item.num_tokens for item in items)
            self._changed.notify()

    def take(self, choose: Choose) -> Batch | None:
        """Wait for items and return those that `choose` picks; None once closed and drained.

        Cancelled and expired items are dropped on the way; expired ones fail with DeadlineError. What is
        returned can't be cancelled any more.
        """
        with self._changed:
            self._num_idle += 1
            if get_ident() in self._background_lanes:
                self._background_lanes.remove(get_ident())
                self._changed.notify()
        try:
            with self._choosing:
                while True:
                    is_last = self._receive()
                    self._drop_dead()
                    if self._waiting and (batch := self._next_batch(choose)).items:
                        return batch
                    if is_last and not self._waiting:
                        return None
        finally:
            with self._changed:
                self._num_idle -= 1

    def close(self) -> None:
        """Refuse new items. Those that wait can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """Refuse new items, and fail those that wait, each with an exception of its own."""
        self.close()
        with self._choosing:
            self._receive()
            for item in self._waiting:
                if item.future.set_running_or_notify_cancel():
                    item.future.set_exception(error())
            self._forget(self._waiting)
            self._waiting = []

    # --- by the lane that holds _choosing ---------------------------------------------------------

    def _receive(self) -> bool:
        """Wait until something waits, and take over what has arrived. True: no more will."""
        with self._changed:
            while not (self._closed or self._may_take()):
                self._changed.wait(self._time_to_background_s())
            if self._arrived:
                self._waiting += self._arrived
                self._waiting.sort(key=attrgetter("is_background"))
                self._arrived = []
            return self._closed

    def _may_take(self) -> bool:
        """Return whether an item waits that this lane may run."""
        if self._time_to_background_s() is None:
            return bool(self._waiting or self._arrived)
        return not all(item.is_background for item in (*self._waiting[:1], *self._arrived))

    def _time_to_background_s(self) -> float | None:
        """Return how long the last free lane is still kept free of background items. None: It is not."""
        if len(self._background_lanes) < max(1, self._num_lanes - 1):
            return None
        remaining_s = self._interactive_until - time.monotonic()
        return remaining_s if remaining_s > 0 else None

    def _drop_dead(self) -> None:
        now = time.monotonic()
        live: list[Item] = []
        dead: list[Item] = []
        for item in self._waiting:  # once: an item may be cancelled at any time
            (dead if item.is_dead(now) else live).append(item)
        self._waiting = live
        self._forget(dead)
        for item in dead:
            _fail_expired(item)

    def _next_batch(self, choose: Choose) -> Batch:
        first = self._first_candidate()
        is_background = self._waiting[first].is_background
        window = self._waiting[first : first + WINDOW]
        lengths = [item.num_tokens for item in window if item.is_background == is_background]
        chosen = {first + index for index in self._chosen(choose, lengths)}
        batch = [item for index, item in enumerate(self._waiting) if index in chosen]
        self._waiting = [item for index, item in enumerate(self._waiting) if index not in chosen]
        self._forget(batch)
        live = [item for item in batch if item.future.set_running_or_notify_cancel()]
        with self._changed:
            if is_background:
                self._background_lanes.add(get_ident())
            is_all = not self._waiting and not self._arrived
            return Batch(live, has_whole_machine=is_all and self._num_idle == self._num_lanes)

    def _first_candidate(self) -> int:
        """Return the index of the oldest item of the next batch."""
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

    def _chosen(self, choose: Choose, lengths: Sequence[int]) -> set[int]:
        try:
            return set(choose(lengths, self._num_idle))
        except Exception:
            logger.exception("no batch could be chosen: the oldest text runs by itself")
            return {0}

    def _forget(self, items: Sequence[Item]) -> None:
        with self._changed:
            self._num_tokens -= sum(item.num_tokens for item in items)


def _fail_expired(item: Item) -> None:
    if item.future.set_running_or_notify_cancel():
        item.future.set_exception(DeadlineError("the deadline passed before the text was run"))
