"""Execution of slow work outside the event loop: functions in worker threads, items in the engine."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import ParamSpec, TypeVar

from attnlens_server.bundle import Kind
from attnlens_server.clients import Client
from attnlens_server.core.admission import Admission
from attnlens_server.core.stages import mark_run
from attnlens_server.core.usage import Clock
from attnlens_server.engine import Engine, Item, ItemResult, lower_priority
from attnlens_server.errors import InvalidResultError

P = ParamSpec("P")
R = TypeVar("R")
LIGHT_TOKENS = 128  # a call with so few tokens need not wait for a running batch


class Workers:
    """Thread pool for functions that take longer than a few milliseconds.

    Attributes:
        num_threads: Number of threads.
        num_pending: Number of waiting and running functions.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.num_pending = 0
        self._executor = ThreadPoolExecutor(num_threads, "worker", lower_priority)
        # Start all threads now: a process without free memory cannot start any.
        are_started = Barrier(num_threads)
        for _ in range(num_threads):
            self._executor.submit(are_started.wait)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function in a thread.

        If the caller is cancelled before the function has started, the function does not run. Otherwise this
        method returns when the function has finished, because it occupies a thread and memory until then.
        """
        future = self._executor.submit(function, *args, **kwargs)
        self.num_pending += 1
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancelled():
                done = asyncio.wrap_future(future)
                await asyncio.wait([done])
                done.exception()  # retrieve it, otherwise asyncio logs an error
            raise
        finally:
            self.num_pending -= 1
            del future  # an exception keeps this frame alive

    async def run_if(
        self,
        is_slow: bool,
        function: Callable[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run a function in a thread if it is slow, otherwise immediately.

        A thread takes a core from the running batch twice, when it starts and when the event loop resumes.
        For short texts, that costs more than the function itself (docs/performance.md).
        """
        return await self.run(function, *args, **kwargs) if is_slow else function(*args, **kwargs)

    def close(self) -> None:
        """Cancel waiting functions and wait for running ones."""
        self._executor.shutdown(cancel_futures=True)


class ItemRunner:
    """Runs items in an engine, for calls of one event loop."""

    def __init__(self, engine: Engine, admission: Admission) -> None:
        self._engine = engine
        self._admission = admission
        # Finished items with their calls: lanes append, the event loop removes. Waking the event loop costs
        # more than passing on a result, so the items of a batch wake it once. A lane appends before it reads
        # the flag, and the loop clears the flag before it removes, so no item is left behind.
        self._done: deque[tuple[_PendingCall, Future[ItemResult]]] = deque()
        self._is_wake_up_scheduled = False

    async def run(
        self,
        items: Sequence[Item],
        kind: Kind,
        client: Client,
        clock: Clock,
        name: Callable[[int], str] = lambda _: "",
    ) -> list[ItemResult]:
        """Run all items. If one fails or the call is cancelled, the others are abandoned.

        Args:
            items: Items of a request.
            kind: Graph that runs them.
            client: Sender of the request.
            clock: Durations of the request.
            name: Returns the path of an item's text, given the index of the item.

        Raises:
            InvalidResultError: The result of an item contains NaN or infinity.
        """
        if self._admission.has_single_call_under_load(client):
            is_light = sum(item.num_tokens for item in items) <= LIGHT_TOKENS
            for item in items:
                item.is_light = is_light
        submitted = time.monotonic()
        futures = self._engine.submit(items, kind=kind, client=client)
        try:
            await self._all_done(futures)
            results = [future.result() for future in futures]
        except BaseException as error:
            for item in items:
                item.abandon()
            del item
            runs = [item.elapsed(time.monotonic()) for item in items]
            clock.add(runs)
            mark_run(runs, submitted)
            if isinstance(error, InvalidResultError):
                raise InvalidResultError(name(_index_of(error, futures))) from None
            raise
        else:
            clock.add(results)
            mark_run(results, submitted)
            return results
        finally:
            del items, futures  # an exception keeps this frame alive

    def _all_done(self, futures: "Sequence[Future[ItemResult]]") -> "asyncio.Future[None]":
        """Return a future that is done when all items are done, or when the first one has failed."""
        call = _PendingCall(len(futures))
        for future in futures:
            future.add_done_callback(partial(self._on_done, call))
        return call.end

    def _on_done(self, call: "_PendingCall", future: "Future[ItemResult]") -> None:
        """Wake the event loop. Called in any thread."""
        self._done.append((call, future))
        if not self._is_wake_up_scheduled and not call.loop.is_closed():
            self._is_wake_up_scheduled = True
            call.loop.call_soon_threadsafe(self._distribute)

    def _distribute(self) -> None:
        self._is_wake_up_scheduled = False
        while self._done:
            call, future = self._done.popleft()
            call.add(future)


def _index_of(error: BaseException, futures: "Sequence[Future[ItemResult]]") -> int:
    return next(
        index
        for index, future in enumerate(futures)
        if future.done() and not future.cancelled() and future.exception() is error
    )


class _PendingCall:
    """A call that waits for items.

    Attributes:
        loop: The call's event loop.
        end: Done when all items are done, or when the first one has failed.
    """

    def __init__(self, num_items: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.end: asyncio.Future[None] = self.loop.create_future()
        self._num_missing = num_items

    def add(self, future: "Future[ItemResult]") -> None:
        """Count a finished item."""
        self._num_missing -= 1
        if self.end.done():
            return
        if future.cancelled():
            self.end.cancel()
        elif (error := future.exception()) is not None:
            self.end.set_exception(error)
        elif self._num_missing == 0:
            self.end.set_result(None)
