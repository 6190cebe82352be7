"""Drivers for blocking code. `Driver` makes the calls over gRPC."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import grpc

from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_client.connection import Connection, grpc_options, trace_metadata
from attnlens_client.core.events import Cancel, Ended, Event, Failed, Item, Reply, Start, Steps
from attnlens_client.errors import closed_error

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
        options, credentials = grpc_options(connection), connection.credentials
        self.channel = (
            grpc.insecure_channel(connection.target, options)
            if credentials is None
            else grpc.secure_channel(connection.target, credentials, options)
        )
        self.stub = EncoderServiceStub(self.channel)
        self.metadata = connection.call_metadata
        self.is_closed = False

    def close(self) -> None:
        """Cancel all running calls and close the channel."""
        self.is_closed = True
        self.channel.close()

    def running(self) -> "_Running":  # noqa: D102 - inherited
        return _Running(self)


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
        return Failed(call_id, error)

    def cancel(self) -> None:
        for call in self._calls.values():
            call.cancel()
        if self._stream is not None:
            self._stream[1].cancel()
