"""Server process: opens the model while the rest of the server is imported, then serves."""

import asyncio
import gc
import logging
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from attnlens_server.config import ServerConfig
from attnlens_server.observing.background_log import log_in_background
from attnlens_server.opening import Opening

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnlens_server.server import Ready

logger = logging.getLogger(__name__)


def serve(config: ServerConfig, on_ready: "Callable[[Ready], None]") -> None:
    """Serve a bundle until a stop signal is received.

    Raises:
        StartupError: The server cannot start with this configuration.
        ConfigError: An option does not fit the bundle.
    """
    gc.disable()  # until the server is ready: imports create many permanent objects and little garbage
    _use_batch_scheduling()
    with log_in_background() as log, Opening(config) as opening:
        from attnlens_server.server import Server  # noqa: PLC0415 - while the other thread opens the model

        server = Server(config, opening)
        server.observer.log = log
        asyncio.run(server.run(on_ready))
        if server.has_hanging_lane:
            logger.critical("a graph hangs and cannot be interrupted: the process ends without it")
    # The runtime would wait for the graph, and the interpreter for the reader of the log.
    if server.has_hanging_lane or log.is_stalled:
        os._exit(int(server.has_hanging_lane))


def _use_batch_scheduling() -> None:
    """Set SCHED_BATCH, so that events preempt running batches less often. Call before any thread starts.

    Preemption evicts the caches that a batch has filled (docs/performance.md). An existing policy is kept.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError):  # unsupported by some sandboxes and C libraries
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
