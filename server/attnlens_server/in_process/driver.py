"""Driver that executes the steps of the client's core as in-process calls."""

from queue import Empty, SimpleQueue

from google.protobuf.message_factory import GetMessageClass

from attnlens_client.core.events import Event, Failed, Reply, Start
from attnlens_client.drivers.blocking import StepsDriver
from attnlens_client.errors import closed_error
from attnlens_server.grpc_api.methods import DESCRIPTOR
from attnlens_server.in_process import host

_REPLIES = {method.name: GetMessageClass(method.output_type) for method in DESCRIPTOR.methods}


class LocalDriver(StepsDriver):
    """Runs steps on a host. Thread-safe."""

    def __init__(self, model_host: host.Host) -> None:
        self._host = model_host

    def running(self) -> "_Running":
        """Return an object that runs the calls of one method."""
        return _Running(self._host)

    def close(self) -> None:
        """Cancel all running calls and free the model."""
        self._host.close()


class _Running:
    """Running calls of one method."""

    def __init__(self, model_host: host.Host) -> None:
        self._host = model_host
        self._calls: dict[int, tuple[Start, host.StartedCall]] = {}
        self._events: SimpleQueue[Event] = SimpleQueue()

    def start(self, command: Start) -> None:
        """Start a call."""
        self._calls[command.call_id] = command, self._host.start(command, self._events)

    def wait(self, seconds: float | None) -> Event | None:
        """Return the next event, or None after a timeout in seconds."""
        try:
            event = self._events.get(timeout=seconds)
        except Empty:
            return None
        command, call = self._calls[event.call_id]
        if isinstance(event, Reply) and command.method == "EncodeStream":
            call.acknowledge()
        else:
            del self._calls[event.call_id]
        if isinstance(event, Failed) and self._host.is_closed:
            raise closed_error(closed="model") from event.error
        if isinstance(event, Reply):
            return Reply(event.call_id, _REPLIES[command.method].FromString(event.message))
        return event

    def cancel(self) -> None:
        """Cancel all running calls."""
        for _, call in self._calls.values():
            call.cancel()
