"""Drivers for blocking code. `Driver` makes the calls over gRPC."""

import os
from abc import ABC, abstractmethod
from collections.abc import Generator
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar, cast

import grpc

from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_client.connection import (
    Connection,
    grpc_options,
    is_connected,
    open_channel,
    specified,
    trace_metadata,
)
from attnlens_client.core.events import Cancel, Ended, Event, Failed, Item, Reply, Start, Steps
from attnlens_client.errors import AttnlensError, closed_error, forked_error

_T = TypeVar("_T")


class Running(Protocol):
    """Running calls of one method: several unary calls, or one stream."""

    def start(self, command: Start) -> None:
        """Start a call."""

    def wait(self, seconds: float | None) -> Event | None:
        """Return the next event, or None after a timeout in seconds."""

    def cancel(self) -> None:
        """Cancel all running calls."""


class StepsDriver(ABC):
    """Executes steps in the calling thread. Thread-safe."""

    @abstractmethod
    def running(self) -> Running:
        """Return an object that runs the calls of one method."""

    @abstractmethod
    def close(self) -> None:
        """Cancel all running calls and reject new ones."""

    def specified(self, error: AttnlensError) -> AttnlensError:
        """Return an error that ends a method with the most specific cause."""
        return error

    def result(self, steps: Steps[_T]) -> _T:
        """Return the only item."""
        [result] = self.items(steps)
        return result

    def items(self, steps: Steps[_T]) -> Generator[_T]:
        """Yield the items as they arrive."""
        running = self.running()
        event = None
        try:
            while True:
                try:
                    command = steps.send(event)
                except StopIteration:
                    return
                except AttnlensError as error:
                    raise self.specified(error) from error.__cause__
                event = None
                if isinstance(command, Item):
                    yield command.value
                elif isinstance(command, Start):
                    running.start(command)
                elif isinstance(command, Cancel):
                    running.cancel()
                    running = self.running()
                else:
                    event = running.wait(command.seconds)
        finally:
            running.cancel()
            steps.close()


class Driver(StepsDriver):
    """Makes calls over a gRPC channel and blocks the calling thread. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.metadata = connection.call_metadata
        self.is_closed = False
        self._is_used = False
        self._open()

    def _open(self) -> None:
        options, credentials = grpc_options(self._connection), self._connection.credentials
        self.channel = open_channel(self._connection.target, credentials, options)
        self._stub = EncoderServiceStub(self.channel)
        self._process_id = os.getpid()

    @property
    def stub(self) -> EncoderServiceStub:
        """Methods of the server.

        Raises:
            AttnlensError: The client was used before a fork. Its calls would hang, even after their deadline.
        """
        if self._process_id != os.getpid() and not self.is_closed:
            if self._is_used:
                raise forked_error()
            self._open()
        self._is_used = True
        return self._stub

    def close(self) -> None:
        """Cancel all running calls and close the channel."""
        self.is_closed = True
        self.channel.close()

    def running(self) -> "_Running":  # noqa: D102 - inherited
        return _Running(self)

    def specified(self, error: AttnlensError) -> AttnlensError:  # noqa: D102 - inherited
        return error if self.is_closed else specified(self._connection, error)


class _Running:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._calls: dict[int, Any] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()  # IDs of ended calls, filled by gRPC's threads
        self._stream: tuple[int, Any] | None = None

    def start(self, command: Start) -> None:
        method, call_id = getattr(self._driver.stub, command.method), command.call_id
        metadata = self._driver.metadata + trace_metadata()
        options = {"timeout": command.timeout_s, "metadata": metadata}
        try:
            if command.method == "EncodeStream":
                self._stream = call_id, method(command.request, **options)
            else:
                call = self._calls[call_id] = method.future(command.request, **options)
                call.add_done_callback(lambda _: self._ended.put(call_id))
        except ValueError as error:  # raised by gRPC if the channel is closed
            if not self._driver.is_closed:
                raise
            raise closed_error() from error

    def wait(self, seconds: float | None) -> Event | None:
        if self._stream is not None:
            return self._next_message(*self._stream)
        try:
            call_id = self._ended.get(timeout=seconds)
        except Empty:
            return None
        call = self._calls.pop(call_id)
        if call.code() is grpc.StatusCode.OK:
            return Reply(call_id, call.result())
        return self._failed(call_id, call)

    def _next_message(self, call_id: int, stream: Any) -> Event:  # noqa: ANN401 - gRPC's call
        try:
            return Reply(call_id, next(stream))
        except StopIteration:
            self._stream = None
            return Ended(call_id)
        except grpc.RpcError as error:
            self._stream = None
            return self._failed(call_id, error)

    def _failed(self, call_id: int, error: grpc.RpcError) -> Failed:
        if self._driver.is_closed:
            raise closed_error() from error
        is_late = cast("grpc.Call", error).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return Failed(call_id, error, is_connected=not is_late or is_connected(self._driver.channel))

    def cancel(self) -> None:
        for call in self._calls.values():
            call.cancel()
        if self._stream is not None:
            self._stream[1].cancel()
