"""One call in the process: what a handler of `grpc_api` sees as a call of gRPC, and its events.

A call runs on the host's event loop. Events go to the thread that waits for them by a queue.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import grpc

from attnlens_client.core.events import Ended, Event, Failed, Reply, Start
from attnlens_server.grpc_api.methods import Handler

if TYPE_CHECKING:
    from queue import SimpleQueue

    from attnlens_server.grpc_api.calls import Context

_MESSAGES_AHEAD = 1  # of a stream, that nobody has taken yet


class CallError(grpc.RpcError):
    """How a call has ended that has no reply: what the client's core reads of gRPC's own."""

    def __init__(
        self, code: grpc.StatusCode, message: str = "", trailers: Sequence[tuple[str, str | bytes]] = ()
    ) -> None:
        super().__init__(message)
        self._code, self._message, self._trailers = code, message, trailers

    def code(self) -> grpc.StatusCode:
        """Return the status."""
        return self._code

    def details(self) -> str:
        """Return the message."""
        return self._message

    def trailing_metadata(self) -> Any:  # noqa: ANN401 - gRPC's own type
        """Return the trailers."""
        return self._trailers


class LocalCall:
    """A call that is to run, or runs.

    It is the context that its handler gets, as far as handlers use one.

    Args:
        command: which method, with what.
        handle: what answers it.
        events: where its events go; replies as bytes.
    """

    def __init__(self, command: Start, handle: Handler, events: "SimpleQueue[Event]") -> None:
        self._id = command.call_id
        self._data: bytes = command.request.SerializeToString()
        self._timeout_s = command.timeout_s
        self._deadline = None if command.timeout_s is None else time.monotonic() + command.timeout_s
        self._handle = handle
        self._events = events
        self._room = asyncio.Semaphore(_MESSAGES_AHEAD)

    async def run(self) -> None:
        """Answer the call. Its last event says how it has ended."""
        event: Event
        try:
            async with asyncio.timeout(self._timeout_s):
                data, self._data = self._data, b""
                reply = await self._handle(data, cast("Context", self))
        except TimeoutError:
            event = Failed(self._id, CallError(grpc.StatusCode.DEADLINE_EXCEEDED))
        except CallError as error:
            event = Failed(self._id, error)
        except asyncio.CancelledError:
            event = Failed(self._id, CallError(grpc.StatusCode.CANCELLED, "the call was cancelled"))
        else:
            event = Ended(self._id) if reply is None else Reply(self._id, reply)
        self._events.put(event)

    def give_room(self) -> None:
        """Let the stream go on: one of its messages was taken."""
        self._room.release()

    # --- what a handler uses of its context -------------------------------------------------------

    def time_remaining(self) -> float | None:
        """Return the seconds to the deadline; None: there is none."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    async def send_initial_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Do nothing: there is no connection."""

    async def write(self, message: bytes) -> None:
        """Send a message of a stream, as soon as the one before was taken."""
        await self._room.acquire()
        self._events.put(Reply(self._id, message))

    async def abort(
        self, code: grpc.StatusCode, message: str, trailers: Sequence[tuple[str, str | bytes]]
    ) -> None:
        """End the call with a status."""
        raise CallError(code, message, trailers)
