"""A limit on what ONNX Runtime does while a graph is opened and tried."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self


class TimeLimit:
    """Ends the step that runs in its block when the time is over, or when `end` is called."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._timer = threading.Timer(seconds, self.end)
        self._timer.daemon = True
        # Protects: `_cancel` is called, once, if the limit is over and the step that it ends still runs.
        self._changing = threading.Lock()
        self._cancel: Callable[[], None] | None = None
        self.is_over = False

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def end(self) -> None:
        """End what runs, and what would start, now."""
        with self._changing:
            self.is_over = True
            if self._cancel is not None:
                self._cancel()

    @contextmanager
    def ending_with(self, cancel: Callable[[], None]) -> Iterator[None]:
        """While the block runs, `cancel` is what makes it end."""
        with self._changing:
            self._cancel = cancel
            if self.is_over:
                cancel()
        try:
            yield
        finally:
            with self._changing:
                self._cancel = None
