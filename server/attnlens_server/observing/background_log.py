"""Writes log lines in a thread of its own, so that a slow reader of the log never blocks the server."""

import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler
from typing import Any

from attnlens_server.observing.rate_limit import RateLimit

MAX_LINES = 4096
"""Maximum number of lines that wait to be written. Further lines are dropped."""
STOP_S = 2.0  # maximum time to write the remaining lines at the end
MAX_CHARACTERS, _END = 8192, 1024
"""Maximum number of characters of a message or traceback. The lines that wait would otherwise take memory."""
_formatter = logging.Formatter()


def _bounded(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    start = MAX_CHARACTERS - _END
    return f"{text[:start]} ... {len(text) - MAX_CHARACTERS} more characters ... {text[-_END:]}"


class BackgroundLog(QueueHandler):
    """Handler that passes records to a thread, which writes them with other handlers.

    Errors are rate-limited per message, before its arguments are inserted.

    Args:
        handlers: Handlers that write the lines.

    Attributes:
        num_dropped: Number of lines that were dropped because too many were waiting.
        num_suppressed: Number of lines that the rate limit has suppressed.
    """

    def __init__(self, handlers: list[logging.Handler]) -> None:
        self._lines: queue.Queue[Any] = queue.Queue(MAX_LINES)
        super().__init__(self._lines)
        self.num_dropped = self.num_suppressed = 0
        self._handlers = handlers
        self._limit = RateLimit()
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Insert the arguments, and format the traceback, which would keep the frames of a request alive."""
        record.msg, record.args = _bounded(record.getMessage()), None
        if record.exc_info:
            record.exc_text, record.exc_info = _bounded(_formatter.formatException(record.exc_info)), None
        return record

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record, or drop it. Never blocks."""
        if record.levelno >= logging.ERROR:
            suppressed = self._limit.take(f"{record.name} {record.msg}")
            if suppressed is None:
                self.num_suppressed += 1
                return
            if suppressed:
                record.suppressed = suppressed
        try:
            self.enqueue(self.prepare(record))
        except queue.Full:
            self.num_dropped += 1
        except Exception:  # noqa: BLE001 - as in all handlers of the standard library
            self.handleError(record)

    def close(self) -> None:
        """Write the remaining lines, unless their reader has stalled."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=STOP_S)
            self._thread.join(STOP_S)
        super().close()

    @property
    def is_stalled(self) -> bool:
        """Whether the remaining lines could not be written within `STOP_S`, after `close`."""
        return self._thread.is_alive()

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            for handler in self._handlers:
                if record.levelno >= handler.level:
                    handler.handle(record)


@contextmanager
def log_in_background() -> Iterator[BackgroundLog]:
    """Write the log in a thread while the block runs."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    log = BackgroundLog(handlers)
    root.handlers[:] = [log]
    try:
        yield log
    finally:
        root.handlers[:] = handlers
        log.close()
