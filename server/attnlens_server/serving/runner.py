"""Running items for calls: into the engine, and back from the threads of its lanes to the event loop."""

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from attnlens_server.bundle import Kind
from attnlens_server.engine import Engine, Item, ItemResult

if TYPE_CHECKING:
    from concurrent.futures import Future


class ItemRunner:
    """Runs items on an engine, for calls of one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Items that are done, each with its call: lanes append, the event loop takes out. To wake the loop
        # costs more than to hand a result over, so the items of a batch wake it once. A lane appends before
        # it looks at the flag, the loop clears the flag before it takes out: no item is left behind.
        self._done: deque[tuple[_Waiting, Future[ItemResult]]] = deque()
        self._loop_will_look = False

    async def run(self, items: Sequence[Item], kind: Kind) -> list[ItemResult]:
        """Run all items. Where one fails or the call is cancelled, those that still wait are dropped."""
        futures = self._engine.submit(items, kind=kind)
        try:
            await self._all_of(futures)
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()  # no effect on what runs or is done
            del items, futures, future  # a failure holds on to this frame

    def _all_of(self, futures: "Sequence[Future[ItemResult]]") -> "asyncio.Future[None]":
        """Return what is done when all are, or the first one has failed."""
        waiting = _Waiting(len(futures))
        for future in futures:
            future.add_done_callback(partial(self._note, waiting))
        return waiting.end

    def _note(self, waiting: "_Waiting", future: "Future[ItemResult]") -> None:
        """Let the event loop know that an item is done; in any thread."""
        self._done.append((waiting, future))
        if not self._loop_will_look and not waiting.loop.is_closed():
            self._loop_will_look = True
            waiting.loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._loop_will_look = False
        while self._done:
            waiting, future = self._done.popleft()
            waiting.note(future)


class _Waiting:
    """A call that waits for items.

    Attributes:
        loop: the event loop that it runs on.
        end: done when all items are, or the first one has failed.
    """

    def __init__(self, num_items: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.end: asyncio.Future[None] = self.loop.create_future()
        self._num_missing = num_items

    def note(self, future: "Future[ItemResult]") -> None:
        """Count an item that is done."""
        self._num_missing -= 1
        if self.end.done():
            return
        if future.cancelled():
            self.end.cancel()
        elif (error := future.exception()) is not None:
            self.end.set_exception(error)
        elif self._num_missing == 0:
            self.end.set_result(None)
