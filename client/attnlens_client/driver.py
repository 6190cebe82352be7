"""How `Client` carries out the steps of the core: with blocking calls. See async_driver.py.

Beside that: `check_health`, one question that needs no client.
"""

import time
from collections.abc import Generator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_client.connection import SERVICE, Connection, checked_address, grpc_options
from attnlens_client.core.events import Cancel, Ended, Event, Failed, Item, Reply, Start, Steps
from attnlens_client.errors import (
    BadReplyError,
    DeadlineExceededError,
    UnavailableError,
    closed_error,
    from_rpc_error,
)

_T = TypeVar("_T")

HealthStatus: TypeAlias = Literal["unknown", "serving", "not_serving", "service_unknown"]

ATTENTIONS = f"{SERVICE}.attentions"
_HEALTH_METHOD = "/grpc.health.v1.Health/Check"
# By their numbers in grpc.health.v1.HealthCheckResponse.
_STATUSES: dict[int, HealthStatus] = {0: "unknown", 1: "serving", 2: "not_serving", 3: "service_unknown"}
_PAUSE_S = 0.2
_HEALTH_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1_000))


class Driver:
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

    def result(self, steps: Steps[_T]) -> _T:
        """Return the only item of a method."""
        [result] = self.items(steps)
        return result

    def items(self, steps: Steps[_T]) -> Generator[_T]:
        """Yield the items of a method as they come."""
        running = _Running(self)
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
                    running = _Running(self)
                else:
                    event = running.wait(command.seconds)
        finally:
            running.cancel()


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


def check_health(
    address: str,
    *,
    service: str = SERVICE,
    timeout_s: float = 5.0,
    wait_s: float = 0.0,
    credentials: grpc.ChannelCredentials | None = None,
    channel_options: Sequence[tuple[str, Any]] = (),
) -> HealthStatus:
    """Return what the server at `address` says of `service`, by gRPC's health protocol.

    grpcio-health-checking is not needed: messages of grpc.health.v1 are those of two wrappers of protobuf,
    byte by byte. A request is a string with the number 1, a response an enumeration with the number 1.

    Args:
        address: as of `Client`.
        service: the name of a service: that of attnlens, or `ATTENTIONS`, its graph for attention weights.
        timeout_s: the deadline of one question.
        wait_s: ask again until the answer is "serving", for so many seconds at most.
        credentials: as of `Client`.
        channel_options: as of `Client`.

    Raises:
        ValueError: the address is none.
        BadReplyError: the reply is no answer.
        AttnlensError: there is no server, or another program, at the end of `wait_s`.

    >>> check_health(address)
    'serving'
    """
    checked_address(address)
    options = [*_HEALTH_OPTIONS, *channel_options]
    deadline = time.monotonic() + wait_s
    with (
        grpc.insecure_channel(address, options)
        if credentials is None
        else grpc.secure_channel(address, credentials, options)
    ) as channel:
        while True:
            is_last = time.monotonic() >= deadline
            try:
                status = _ask_health(channel, service, timeout_s)
            except (DeadlineExceededError, UnavailableError):
                if is_last:
                    raise
            else:
                if is_last or status == "serving":
                    return status
            time.sleep(max(0.0, min(_PAUSE_S, deadline - time.monotonic())))


def _ask_health(channel: grpc.Channel, service: str, timeout_s: float) -> HealthStatus:
    ask: grpc.UnaryUnaryMultiCallable[StringValue, bytes]
    ask = channel.unary_unary(_HEALTH_METHOD, request_serializer=StringValue.SerializeToString)
    try:
        reply = ask(StringValue(value=service), timeout=timeout_s)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return "service_unknown"
        raise from_rpc_error(error) from error
    try:
        return _STATUSES[Int32Value.FromString(reply).value]
    except (DecodeError, KeyError) as error:
        raise BadReplyError("the reply is wrong: its bytes are no answer about health") from error
