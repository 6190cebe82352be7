"""How `Client` carries out the steps of the core: with blocking calls over gRPC. See awaited.py."""

from queue import Empty, SimpleQueue
from typing import Any

import grpc

from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_client.connection import Connection, grpc_options
from attnlens_client.core.events import Ended, Event, Failed, Reply, Start
from attnlens_client.drivers.steps import StepsDriver
from attnlens_client.errors import closed_error


class Driver(StepsDriver):
    """A channel whose calls block the calling thread. Any number of threads may use it."""

    def __init__(self, connection: Connection) -> None:
        options, credentials = grpc_options(connection), connection.credentials
        self.channel = (
            grpc.insecure_channel(connection.address, options)
            if credentials is None
            else grpc.secure_channel(connection.address, credentials, options)
        )
        self.stub = EncoderServiceStub(self.channel)
        self.metadata = tuple(connection.metadata)
        self.is_closed = False

    def close(self) -> None:
        """Cancel what is running, and close the channel."""
        self.is_closed = True
        self.channel.close()

    def running(self) -> "_Running":
        """Return a place for the calls of one method."""
        return _Running(self)


class _Running:
    """The calls of one method that are under way: several with one reply each, or one stream."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._calls: dict[int, Any] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()  # of those calls, filled by gRPC's threads
        self._stream: tuple[int, Any] | None = None

    def start(self, command: Start) -> None:
        """Start a call."""
        method, call_id = getattr(self._driver.stub, command.method), command.call_id
        options = {"timeout": command.timeout_s, "metadata": self._driver.metadata}
        try:
            if command.method == "EncodeStream":
                self._stream = call_id, method(command.request, **options)
            else:
                call = self._calls[call_id] = method.future(command.request, **options)
                call.add_done_callback(lambda _: self._ended.put(call_id))
        except ValueError as error:  # what gRPC says of a closed channel
            if not self._driver.is_closed:
                raise
            raise closed_error() from error

    def wait(self, seconds: float | None) -> Event | None:
        """Return the next event. None: there was none for so many seconds."""
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
        """End whatever still runs."""
        for call in self._calls.values():
            call.cancel()
        if self._stream is not None:
            self._stream[1].cancel()
