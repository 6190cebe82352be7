"""Commands that run in the test process. Their changes to the process are undone."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def process_as_before() -> Iterator[None]:
    """Restore signal handlers, log handlers and log levels on exit."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signals = {number: signal.getsignal(number) for number in numbers}
    root, grpc = logging.getLogger(), logging.getLogger("grpc")
    handlers, levels = root.handlers[:], (root.level, grpc.level)
    try:
        yield
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
        root.handlers[:] = handlers
        for logger, level in zip((root, grpc), levels, strict=True):
            logger.setLevel(level)
