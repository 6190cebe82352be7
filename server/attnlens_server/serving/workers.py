"""Threads for what takes longer than some milliseconds, so that the event loop stays free."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Workers:
    """A number of threads that run functions for calls."""

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="worker")

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function in a thread.

        Where the caller is cancelled before a thread has begun, the function is not run. Where it has begun,
        this returns when it is done: until then it takes a thread and memory that must stay counted.
        """
        future = self._executor.submit(function, *args, **kwargs)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancelled():
                done = asyncio.wrap_future(future)
                await asyncio.wait([done])
                done.exception()  # or asyncio would complain that nobody asked
            raise
        finally:
            del future  # a failure holds on to this frame

    async def run_if(
        self,
        is_slow: bool,
        function: Callable[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run a function: in a thread where it is slow, else at once.

        A thread takes a core from a batch twice, when it begins and when the event loop goes on, which costs
        more than the little that there is to do for a short text (docs/performance.md).
        """
        return await self.run(function, *args, **kwargs) if is_slow else function(*args, **kwargs)

    def close(self) -> None:
        """Drop what waits, and wait for what runs."""
        self._executor.shutdown(cancel_futures=True)
