"""Host of an in-process model, with a thread and an event loop of its own."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from attnlens_client.core.events import Event, Start
from attnlens_client.errors import closed_error
from attnlens_server.config import ServerConfig
from attnlens_server.core.process import State
from attnlens_server.grpc_api.methods import handlers
from attnlens_server.in_process.call import LocalCall
from attnlens_server.served_model import ServedModel

logger = logging.getLogger(__name__)

_CANCEL_INTERVAL_S = 1.0
_MAX_CANCELS = 30


class Host:
    """Opens a model and runs calls until it is closed."""

    def __init__(self, config: ServerConfig) -> None:
        """Open the bundle and load its graphs.

        Raises:
            StartupError: The bundle is invalid, or a graph cannot be loaded.
            ConfigError: An option does not fit the bundle.
        """
        self._process_id = os.getpid()
        served = ServedModel(config)
        self._service, self._engine = served.service, served.engine
        self._handlers = handlers(served.methods, served.calls, config.max_inputs_per_request)
        self._tasks: set[asyncio.Task[None]] = set()  # used only by the loop's thread
        # Ensures that no call is passed to the loop after `close` has stopped it.
        self._starting = threading.Lock()
        # Held while the model is freed, so that a second `close` waits for the first.
        self._closing = threading.Lock()
        self._is_closed = False
        served.start()
        self._engine.watch(partial(setattr, self._service, "state", State.FAILED), lambda _: None)
        self._service.process.state = State.SERVING
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="attnlens-local", daemon=True)
        self._thread.start()
        self._supervising = asyncio.run_coroutine_threadsafe(served.supervisor.run(), self._loop)

    @property
    def is_closed(self) -> bool:
        """Whether new calls are rejected."""
        return self._is_closed

    def start(self, command: Start, events: SimpleQueue[Event]) -> "StartedCall":
        """Start a call, whose events are put into `events`.

        Raises:
            AttnlensError: The host is closed.
            RuntimeError: The host was created before this process was forked.
        """
        if os.getpid() != self._process_id:
            raise RuntimeError(
                f"the model was opened by process {self._process_id}, but this is its fork {os.getpid()}: "
                "call attnlens_server.local in each process after the fork"
            )
        with self._starting:
            if self._is_closed:
                raise closed_error(closed="model")
            call = LocalCall(command, self._handlers[command.method], events.put)
            running = StartedCall(call, self._loop)
            self._loop.call_soon_threadsafe(self._begin, running)
        return running

    def close(self) -> None:
        """Cancel all calls, wait for running batches, and free the model."""
        if os.getpid() != self._process_id:  # a fork does not have the threads
            return
        with self._starting:
            self._is_closed = True
        with self._closing:
            if self._loop.is_closed():
                return
            if self._thread.is_alive():  # not alive if a previous `close` was interrupted
                asyncio.run_coroutine_threadsafe(self._end_calls(), self._loop).result()
                self._engine.close()
                self._service.process.workers.close()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            self._loop.close()
            del self._engine, self._service, self._handlers  # frees sessions and weights

    def close_in_background(self) -> None:
        """Close without waiting, for the garbage collector, which may run in any thread."""
        with suppress(RuntimeError):  # threads cannot start during interpreter shutdown
            threading.Thread(target=self.close, name="attnlens-local-close").start()

    def _begin(self, running: "StartedCall") -> None:
        running.task = task = self._loop.create_task(running.call.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_calls(self) -> None:
        """Cancel all calls until they have ended, so that one lost cancellation does not block `close`."""
        self._service.process.state = State.DRAINING
        self._supervising.cancel()
        remaining = set(self._tasks)
        for _ in range(_MAX_CANCELS):
            for task in remaining:
                task.cancel()
            if remaining:
                _, remaining = await asyncio.wait(remaining, timeout=_CANCEL_INTERVAL_S)
        if remaining:
            logger.error("%d calls ignore their cancellation; the model is closed anyway", len(remaining))


class StartedCall:
    """A call that was started, for the thread that has started it."""

    def __init__(self, call: LocalCall, loop: asyncio.AbstractEventLoop) -> None:
        self.call = call
        self.task: asyncio.Task[None] | None = None  # the loop's thread sets it
        self._loop = loop

    def acknowledge(self) -> None:
        """Allow a stream to send its next message."""
        self._call_in_loop(self.call.acknowledge)

    def cancel(self) -> None:
        """Cancel the call."""
        self._call_in_loop(self._cancel)

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def _call_in_loop(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)
