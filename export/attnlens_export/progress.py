"""Progress callbacks of exports and checks, and measurements that run at the same time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event
from typing import TypeVar

Progress = Callable[[str, str, int, int], None]
"""Called before each step with the stage, a detail such as an input shape (may be empty), the number of
completed steps of the stage, and the total."""

StageProgress = Callable[[str, int, int], None]
"""`Progress` within one stage: detail, number of completed steps, total."""

T = TypeVar("T")


def no_progress(_stage: str, _detail: str, _done: int, _total: int) -> None:
    """Report nothing."""


def no_stage_progress(_detail: str, _done: int, _total: int) -> None:
    """Report nothing."""


def report_each(
    items: Sequence[T] | Mapping[T, object], progress: StageProgress, detail: str | None = None
) -> Iterator[T]:
    """Yield the items and report each before it is processed.

    Args:
        items: Cases, paths or other steps of the stage.
        progress: Called before each item.
        detail: Constant detail. If None, the item itself.
    """
    for index, item in enumerate(items):
        progress(str(item) if detail is None else detail, index, len(items))
        yield item


@contextmanager
def beside(
    function: Callable[[Progress], T], progress: Progress, *, in_thread: bool = True
) -> Iterator[Callable[[], T]]:
    """Run a function in a thread while the context is active.

    The progress of the function is reported in the thread of the caller, and only while its result is
    awaited: until then, the caller reports its own.

    Args:
        function: Function to run. Called with the callback for its progress. If the context ends before the
            result is awaited, the next call of the callback raises an exception.
        progress: Called while the result is awaited.
        in_thread: Whether to use a thread. Otherwise, the function runs when its result is awaited.

    Yields:
        A function that waits for the result, and raises the exception of `function`.
    """
    if not in_thread:
        yield lambda: function(progress)
        return
    reports: SimpleQueue[tuple[str, str, int, int] | None] = SimpleQueue()
    has_ended = Event()

    def report(stage: str, detail: str, done: int, total: int) -> None:
        if has_ended.is_set():
            raise CancelledError
        reports.put((stage, detail, done, total))

    def result() -> T:
        for _ in range(reports.qsize() - 1):  # only the last one still holds
            reports.get()
        while (last := reports.get()) is not None:
            progress(*last)
        return future.result()

    with ThreadPoolExecutor(1, "attnlens-measurement") as executor:
        future = executor.submit(function, report)
        future.add_done_callback(lambda _: reports.put(None))
        try:
            yield result
        finally:
            has_ended.set()
