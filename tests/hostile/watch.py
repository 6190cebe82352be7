"""Run the command line and report slow event-loop callbacks and the largest reservation of memory.

    python tests/hostile/watch.py FILE serve BUNDLE ARGS

appends lines to FILE: `callback SECONDS CALLBACK` and `reserved BYTES`.
"""

import asyncio
import sys
import threading
import time
from pathlib import Path

from attnlens_cli.main import main
from attnlens_server.core.admission import Reservation

MAX_CALLBACK_S = 0.05
"""CPU time, which does not depend on other processes."""
REPORTED_BYTES = 1 << 20


def watch(report: Path) -> None:
    """Report from this process."""
    run, grow, loop_thread = asyncio.Handle._run, Reservation.grow, threading.current_thread()
    file = report.open("a", buffering=1)
    peak_bytes = 0

    def timed_run(handle: asyncio.Handle) -> None:
        callback, started = handle._callback, time.thread_time()  # type: ignore[attr-defined]
        run(handle)
        seconds = time.thread_time() - started
        if seconds > MAX_CALLBACK_S and threading.current_thread() is loop_thread:
            file.write(f"callback {seconds:.3f} {callback!r}\n")

    def reported_grow(reservation: Reservation, size_bytes: int) -> None:
        nonlocal peak_bytes
        pool = reservation._pool
        if pool.used == 0:
            peak_bytes = 0
        grow(reservation, size_bytes)
        if pool.used > peak_bytes + REPORTED_BYTES:
            peak_bytes = pool.used
            file.write(f"reserved {peak_bytes}\n")

    asyncio.Handle._run = timed_run  # type: ignore[method-assign,assignment]
    Reservation.grow = reported_grow  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    watch(Path(sys.argv.pop(1)))
    main()
