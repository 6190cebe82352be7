"""In-process calls, which handlers of `grpc_api` see as gRPC calls.

A call runs on the event loop of its host, which receives its events.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import grpc

from attnlens_client.core.events import Ended, Event, Failed, Reply, Start
from attnlens_server.grpc_api.methods import Handler

if TYPE_CHECKING:
    from attnlens_server.grpc_api.calls import Context

_MAX_UNREAD_MESSAGES = 1  # per stream


class CallError(grpc.RpcError):
    """Status of a failed call, with the methods of grpc.Call that the client uses."""

    def __init__(
        self, code: grpc.StatusCode, message: str = "", trailers: Sequence[tuple[str, str | bytes]] = ()
    ) -> None:
        super().__init__(message)
        self._code, self._message, self._trailers = code, message, trailers

    def code(self) -> grpc.StatusCode:
        """Return the status code."""
        return self._code

    def details(self) -> str:
        """Return the message."""
        return self._message

    def trailing_metadata(self) -> Any:  # noqa: ANN401 - as in gRPC
        """Return the trailers."""
        return self._trailers


class LocalCall:
    """An in-process call. It is also the context of its handler.

    Args:
        command: Command of the client's core.
        handle: Handler of the method.
        emit: Called with each event, on the event loop. Replies are serialized.
    """

    def __init__(self, command: Start, handle: Handler, emit: Callable[[Event], None]) -> None:
        self._id = command.call_id
        self._data: bytes = command.request.SerializeToString()
        self._timeout_s = command.timeout_s
        self._deadline = None if command.timeout_s is None else time.monotonic() + command.timeout_s
        self._handle = handle
        self._emit = emit
        self._room = asyncio.Semaphore(_MAX_UNREAD_MESSAGES)

    async def run(self) -> None:
        """Run the call. Its last event is its result."""
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
        self._emit(event)

    def acknowledge(self) -> None:
        """Allow the stream to send its next message."""
        self._room.release()

    # --- Context of the handler -------------------------------------------------------------------

    def peer(self) -> str:
        """Return the same name for all calls."""
        return "in-process"

    def invocation_metadata(self) -> None:
        """Return None, since there is no connection."""

    def time_remaining(self) -> float | None:
        """Return the remaining time in seconds, or None if there is no deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    async def send_initial_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Do nothing, since there is no connection."""

    async def write(self, message: bytes) -> None:
        """Send a message of a stream once the previous one was received."""
        await self._room.acquire()
        self._emit(Reply(self._id, message))

    async def abort(
        self, code: grpc.StatusCode, message: str, trailers: Sequence[tuple[str, str | bytes]]
    ) -> None:
        """End the call with a status."""
        raise CallError(code, message, trailers)
