"""Record of a request of any protocol, for metrics, the access log and traces. It never contains texts.

Values from clients are truncated and validated here, so that they can neither flood the log nor imitate other
fields.
"""

import re
import time
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote

from attnlens_server.clients import ANONYMOUS, Client
from attnlens_server.core.stages import Stages
from attnlens_server.core.usage import CallMetrics
from attnlens_server.errors import (
    GraphUnavailableError,
    NotReadyError,
    OverloadedError,
    RequestError,
    ShuttingDownError,
)

OK, CANCELLED = "OK", "CANCELLED"
_DEADLINE_SLACK_S = 0.02
"""A client's timer may be ahead of the server's."""
_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
_TRACEPARENT = re.compile(
    r"(?!ff|00-.{52}-)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_MAX_PEER = 128
_NOT_CHARGED = (OverloadedError, GraphUnavailableError, NotReadyError, ShuttingDownError)


@dataclass(slots=True)
class RequestRecord:
    """Record of a request. It references no objects of the protocol.

    Attributes:
        method: Method name or path.
        route: Method name or path of the route, for metrics. Unlike `method`, it never comes from the client.
        protocol: Protocol of the request.
        peer: Client address, as gRPC or `host:port` describe it.
        client: Sender of the request.
        request_id: Identifier that the client sent. See `validate_request_id`.
        traceparent: W3C trace context from the client, or an empty string.
        tracestate: Its vendor-specific part.
        request_bytes: Size of the request message or body.
        reply_bytes: Size of all response messages, or of the body.
        status: Status code of the protocol.
        reason: Error reason, if the request failed.
        resource: Resource that has reached its limit, if the request was rejected for this reason.
        deadline: Deadline on the monotonic clock, or None.
        metrics: Resource use of the request.
        stages: Stages of the request, if its trace is sampled.
        started: Time when the request was received completely, on the monotonic clock.
        ended: Time when the request ended, on the monotonic clock. 0 while it is running.
    """

    method: str
    route: str = "other"
    protocol: Literal["grpc", "http"] = "grpc"
    peer: str = ""
    client: Client = ANONYMOUS
    request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""
    request_bytes: int = 0
    reply_bytes: int = 0
    status: str = OK
    reason: str = ""
    resource: str = ""
    deadline: float | None = None
    metrics: CallMetrics = field(default_factory=CallMetrics)
    stages: Stages | None = None
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0

    def end(self, status: str, reason: str) -> None:
        """Record the status, unless an earlier error was recorded."""
        if self.status == OK:
            self.status, self.reason = status, reason

    def fail(self, error: RequestError) -> None:
        """Record which limit an error is about, if any. Requests that cannot be served now cost nothing."""
        self.resource = error.metadata.get("resource", "")
        rates, metrics = self.client.rates, self.metrics
        if rates is not None and isinstance(error, _NOT_CHARGED) and not self.reply_bytes:
            rates.give_back(metrics.num_charged, metrics.num_charged_tokens)
            metrics.num_charged = metrics.num_charged_tokens = 0

    def disconnect(self) -> None:
        """Record that the client left. If its deadline has passed (or almost), that is the reason."""
        is_over = self.deadline is not None and time.monotonic() >= self.deadline - _DEADLINE_SLACK_S
        self.end("DEADLINE_EXCEEDED" if is_over else CANCELLED, "")

    @property
    def elapsed_s(self) -> float:
        """Duration of the request in seconds. While it is running, the time since its start."""
        return (self.ended or time.monotonic()) - self.started

    @property
    def has_succeeded(self) -> bool:
        """Whether the request has not failed."""
        return self.status == OK or self.status[0] in "123"

    @property
    def is_server_error(self) -> bool:
        """Whether the server is at fault, by the conventions of OpenTelemetry for gRPC and HTTP."""
        return self.status in _SERVER_ERRORS or self.status[0] == "5"

    @property
    def trace_id(self) -> str:
        """Trace id of the request if it is sampled, otherwise the client's, or an empty string."""
        if self.stages is not None:
            return f"{self.stages.trace_id:032x}"
        sent = parse_traceparent(self.traceparent)
        return f"{sent[0]:032x}" if sent else ""


_SERVER_ERRORS = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)


def format_peer(text: str) -> str:
    """Return a description of a peer as HOST:PORT, if it is an IP address."""
    return unquote(text).removeprefix("ipv4:").removeprefix("ipv6:")[:_MAX_PEER]


def validate_request_id(value: str | bytes | None) -> str:
    """Return a client's request identifier if it consists of letters, digits and `.:/+=_-`, otherwise ""."""
    return value if isinstance(value, str) and _REQUEST_ID.fullmatch(value) else ""


def parse_traceparent(value: str) -> tuple[int, int, int] | None:
    """Return trace id, span id and flags of a W3C header, or None if it is invalid.

    The propagator of OpenTelemetry returns the same, but takes 7 us.
    """
    found = _TRACEPARENT.fullmatch(value)
    return None if found is None else (int(found[1], 16), int(found[2], 16), int(found[3], 16))
