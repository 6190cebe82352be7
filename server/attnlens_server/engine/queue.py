"""Where items wait for a session."""

import threading
import time
from collections.abc import Callable, Sequence

from attnlens_server.engine.item import Item
from attnlens_server.errors import DeadlineError, ShuttingDownError


class ItemQueue:
    """Waiting items, oldest first. Any thread puts; one worker thread takes.

    How many may wait is not decided here but before tokenization, by the engine's admission.
    """

    def __init__(self, choose: Callable[[Sequence[int]], list[int]]) -> None:
        """Make a queue whose batches `choose` picks from the waiting lengths (see `pack`)."""
        self._choose = choose
        # Protects: _items holds exactly what was put and neither taken nor dropped, in order of
        # arrival, and _num_tokens is the sum of its lengths. Nothing is put once _closed is set.
        self._changed = threading.Condition()
        self._items: list[Item] = []
        self._num_tokens = 0
        self._closed = False

    @property
    def num_tokens(self) -> int:
        """The tokens that wait. Exact when read, perhaps not a moment later."""
        return self._num_tokens

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
            self._changed.notify()

    def take(self) -> list[Item]:
        """Wait for items and return a batch of them; an empty list once closed and drained.

        Cancelled and expired items are dropped on the way; expired ones fail with DeadlineError.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closed)
                now = time.monotonic()
                dead = [item for item in self._items if item.is_dead(now)]
                if dead:
                    self._items = [item for item in self._items if not item.is_dead(now)]
                batch = self._take_chosen()
                self._num_tokens = sum(item.num_tokens for item in self._items)
                done = self._closed and not self._items
            for item in dead:
                _fail_expired(item)
            if batch or done:
                return batch

    def close(self) -> None:
        """Refuse new items. Those that wait can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take_chosen(self) -> list[Item]:
        if not self._items:
            return []
        chosen = set(self._choose([item.num_tokens for item in self._items]))
        batch = [item for index, item in enumerate(self._items) if index in chosen]
        self._items = [item for index, item in enumerate(self._items) if index not in chosen]
        return batch


def _fail_expired(item: Item) -> None:
    if item.future.set_running_or_notify_cancel():
        item.future.set_exception(DeadlineError("the deadline passed before the text was run"))
