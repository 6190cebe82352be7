"""Other hosts of a model that the requests are sent to: in this process, and as an ASGI application."""

from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from attnlens_client.core.events import Ended, Event, Failed, Reply, Start
from attnlens_server.config import ServerConfig
from attnlens_server.in_process.host import Host
from mounted import KEY, PREFIX, Mounted
from recorded_requests.play import LIMITS, SERVICES, Record, form, grpc_error, requested

_SETTINGS: dict[str, Any] = {name.replace("-", "_"): limit for name, limit in LIMITS.items()}
ABSENT: Record = {"status": "absent"}
"""Record of a request that a host does not serve."""


class LocalTarget:
    """A model in this process, which `attnlens_server.local` opens."""

    def __init__(self, bundle: Path) -> None:
        self._host = Host(ServerConfig(bundle=bundle, threads=1, lanes=1, **_SETTINGS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._host.close()

    def call(self, service: str, method: str, message: bytes) -> Record:
        """Send a gRPC request."""
        described = SERVICES[service].methods_by_name[method]
        try:
            request = GetMessageClass(described.input_type).FromString(message)
        except DecodeError:
            return ABSENT  # callers pass messages
        if service == "oip":
            return ABSENT
        events: SimpleQueue[Event] = SimpleQueue()
        running = self._host.start(Start(0, method, request, 60.0), events)  # type: ignore[arg-type]
        replies = []
        while isinstance(event := events.get(timeout=60), Reply):
            replies.append(GetMessageClass(described.output_type).FromString(event.message))
            if not described.server_streaming:
                break
            running.acknowledge()
        if isinstance(event, Failed):
            return grpc_error(event.error)
        assert isinstance(event, Ended | Reply)
        return {"status": "OK", "reply": form(replies if described.server_streaming else replies[0], method)}

    def request(self, *_: object) -> Record:
        """Return `ABSENT`."""
        return ABSENT


class MountedTarget:
    """A model in a Starlette application, which serves it under a prefix."""

    def __init__(self, bundle: Path) -> None:
        self._mounted = Mounted(bundle, **_SETTINGS)

    def __enter__(self) -> Self:
        self._mounted.__enter__()
        self._connection = self._mounted.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._mounted.__exit__()

    def request(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> Record:
        """Send an HTTP request."""
        sent = {"Authorization": f"Bearer {KEY}".encode().decode("latin-1"), **headers}
        return requested(self._connection, method, PREFIX + path, body, sent)

    def call(self, *_: object) -> Record:
        """Return `ABSENT`."""
        return ABSENT
