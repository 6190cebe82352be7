"""Driver for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar, cast

import grpc

from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_client.connection import Connection, grpc_options, specified, trace_metadata
from attnlens_client.core.events import Cancel, Ended, Event, Failed, Item, Reply, Start, Steps
from attnlens_client.errors import (
    AttnlensError,
    closed_error,
    other_loop_error,
    undecodable_reply_error,
)

_T = TypeVar("_T")


class AsyncDriver:
    """Makes calls over a gRPC channel in one event loop, that of the first call."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.metadata = connection.call_metadata
        self.calls: set[grpc.aio.Call] = set()  # running calls of all methods
        self.is_closed = False

    @property
    def stub(self) -> EncoderServiceStub:
        """Methods of the server.

        Raises:
            AttnlensError: The client belongs to another event loop.
        """
        loop = asyncio.get_running_loop()
        if self._channel is None:
            options, credentials = grpc_options(self._connection), self._connection.credentials
            self._loop, target = loop, self._connection.target
            self._channel = (
                grpc.aio.insecure_channel(target, options)
                if credentials is None
                else grpc.aio.secure_channel(target, credentials, options)
            )
            self._stub = EncoderServiceStub(self._channel)
        if self._loop is not loop:
            raise other_loop_error()
        return self._stub

    async def close(self) -> None:
        """Cancel all running calls and close the channel."""
        self.is_closed = True
        for call in tuple(self.calls):
            call.cancel()
        if self._channel is not None:
            await self._channel.close()

    def is_connected(self) -> bool:
        """Return whether there is a connection to a server."""
        return self._channel is not None and self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def specified(self, error: AttnlensError) -> AttnlensError:
        """Return an error that ends a method with the most specific cause."""
        return error if self.is_closed else await asyncio.to_thread(specified, self._connection, error)

    async def result(self, steps: Steps[_T]) -> _T:
        """Return the only item."""
        [result] = [item async for item in self.items(steps)]
        return result

    async def items(self, steps: Steps[_T]) -> AsyncGenerator[_T]:
        """Yield the items as they arrive."""
        running = _Running(self)
        event = None
        try:
            while True:
                try:
                    command = steps.send(event)
                except StopIteration:
                    return
                except AttnlensError as error:
                    raise await self.specified(error) from error.__cause__
                event = None
                if isinstance(command, Item):
                    yield command.value
                elif isinstance(command, Start):
                    running.start(command)
                elif isinstance(command, Cancel):
                    running.cancel()
                    running = _Running(self)
                else:
                    event = await running.wait(command.seconds)
        finally:
            running.cancel()
            steps.close()


class _Running:
    """Running calls of one method: several unary calls, or one stream."""

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver
        self._calls: set[grpc.aio.Call] = set()
        self._replies: set[asyncio.Task[Event | AttnlensError]] = set()
        self._ended: asyncio.Queue[asyncio.Task[Event | AttnlensError]] = asyncio.Queue()
        self._stream: tuple[int, Any] | None = None

    def start(self, command: Start) -> None:
        """Start a call."""
        if self._driver.is_closed:
            raise closed_error()
        method, call_id = getattr(self._driver.stub, command.method), command.call_id
        metadata = self._driver.metadata + trace_metadata()
        call = method(command.request, timeout=command.timeout_s, metadata=metadata)
        self._calls.add(call)
        self._driver.calls.add(call)
        if command.method == "EncodeStream":
            self._stream = call_id, call
        else:
            reply = asyncio.ensure_future(self._reply(call_id, call))
            reply.add_done_callback(self._ended.put_nowait)
            self._replies.add(reply)

    async def wait(self, seconds: float | None) -> Event | None:
        """Return the next event, or None after a timeout in seconds."""
        if self._stream is not None:
            call_id, stream = self._stream
            event = await self._event(call_id, stream.read())
            if not isinstance(event, Reply):
                self._stream = None
                self._end(stream)
        else:
            try:
                async with asyncio.timeout(seconds):
                    reply = await self._ended.get()
            except TimeoutError:
                return None
            self._replies.discard(reply)
            event = reply.result()
        if isinstance(event, AttnlensError):
            raise event
        return event

    async def _reply(self, call_id: int, call: Any) -> Event | AttnlensError:  # noqa: ANN401 - gRPC's call
        try:
            return await self._event(call_id, call)
        finally:
            self._end(call)

    async def _event(self, call_id: int, message: Awaitable[Any]) -> Event | AttnlensError:
        """Return the event of the next message, or the error that ends the method."""
        try:
            received = await message
        except grpc.RpcError as error:
            if self._driver.is_closed:
                return closed_error(error)
            is_late = cast("grpc.Call", error).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return Failed(call_id, error, is_connected=not is_late or self._driver.is_connected())
        except asyncio.CancelledError as error:  # `close` cancels calls; callers may cancel this task
            task = asyncio.current_task()
            if not self._driver.is_closed or (task is not None and task.cancelling()):
                raise
            return closed_error(error)
        if received is grpc.aio.EOF:
            return Ended(call_id)
        # grpc.aio returns None for an invalid message.
        return undecodable_reply_error() if received is None else Reply(call_id, received)

    def _end(self, call: grpc.aio.Call) -> None:
        call.cancel()
        self._calls.discard(call)
        self._driver.calls.discard(call)

    def cancel(self) -> None:
        """Cancel all running calls."""
        for call in tuple(self._calls):
            self._end(call)
        for task in self._replies:
            task.cancel()
