"""Where items wait for a lane."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from attnlens_server.engine.item import Item
from attnlens_server.errors import DeadlineError, ShuttingDownError

WINDOW = 512  # of the items that wait, how many are looked at for a batch


class Batch(NamedTuple):
    """What runs together."""

    items: list[Item]
    """Oldest first."""
    is_alone: bool
    """True where nothing else waits or runs: the machine is all its own."""


class ItemQueue:
    """Waiting items, oldest first. Any thread puts; a number of lanes take.

    How many may wait is not decided here but before tokenization, by the engine's admission.
    """

    def __init__(self, choose: Callable[[Sequence[int], int], list[int]], num_lanes: int = 1) -> None:
        """Make a queue.

        Args:
            choose: picks a batch from the waiting lengths, given how many lanes are idle; see `pack`.
            num_lanes: the number of threads that call `take`.
        """
        self._choose = choose
        self._num_lanes = num_lanes
        # Protects: _items holds exactly what was put and neither taken nor dropped, in order of
        # arrival, and _num_tokens is the sum of its lengths. Nothing is put once _closed is set.
        # _num_idle is the number of lanes inside `take`.
        self._changed = threading.Condition()
        self._items: list[Item] = []
        self._num_tokens = 0
        self._num_idle = 0
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
        """Add items.

        Raises:
            ShuttingDownError: the queue is closed.
        """
        with self._changed:
            if self._closed:
                raise ShuttingDownError("the server is shutting down: ask another one")
            self._items.extend(items)
            self._num_tokens += sum(item.num_tokens for item in items)
            self._changed.notify(len(items))

    def take(self) -> Batch:
        """Wait for items and return a batch of them; an empty one once closed and drained.

        Cancelled and expired items are dropped on the way; expired ones fail with DeadlineError.
        """
        while True:
            with self._changed:
                self._num_idle += 1
                self._changed.wait_for(lambda: self._items or self._closed)
                now = time.monotonic()
                dead = [item for item in self._items if item.is_dead(now)]
                if dead:
                    self._items = [item for item in self._items if not item.is_dead(now)]
                batch = Batch(self._take_chosen(), not self._items and self._num_idle == self._num_lanes)
                self._num_tokens = sum(item.num_tokens for item in self._items)
                self._num_idle -= 1
                done = self._closed and not self._items
            for item in dead:
                _fail_expired(item)
            if batch.items or done:
                return batch

    def close(self) -> None:
        """Refuse new items. Those that wait can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take_chosen(self) -> list[Item]:
        if not self._items:
            return []
        lengths = [item.num_tokens for item in self._items[:WINDOW]]
        chosen = set(self._choose(lengths, self._num_idle))
        batch = [item for index, item in enumerate(self._items) if index in chosen]
        self._items = [item for index, item in enumerate(self._items) if index not in chosen]
        return batch


def _fail_expired(item: Item) -> None:
    if item.future.set_running_or_notify_cancel():
        item.future.set_exception(DeadlineError("the deadline passed before the text was run"))
