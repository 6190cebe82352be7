"""Request log: one line per finished request of any protocol, never with its texts.

Values from clients are truncated and validated here, so that they can neither flood the log nor imitate other
fields.
"""

import logging
import re
import time
from dataclasses import dataclass, field
from urllib.parse import unquote

from attnlens_server.clients import ANONYMOUS, Client
from attnlens_server.serving.results import CallMetrics

logger = logging.getLogger(__name__)

OK, CANCELLED = "OK", "CANCELLED"
_DEADLINE_SLACK_S = 0.02
"""A client's timer may be ahead of the server's."""
_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)


@dataclass(slots=True)
class RequestRecord:
    """Log record of a request. It references no objects of the protocol.

    Attributes:
        method: Method name or path.
        route: Method name or path of the route, for metrics. Unlike `method`, it never comes from the client.
        peer: Client address.
        client: Sender of the request.
        request_id: Identifier that the client sent. Empty if there is none or it is invalid.
        request_bytes: Size of the request message or body.
        reply_bytes: Size of all response messages, or of the body.
        status: Status code of the protocol.
        reason: Error reason, if the request failed.
        deadline: Deadline on the monotonic clock, or None.
        metrics: Resource use of the request.
        started: Time when the request was received completely, on the monotonic clock.
    """

    method: str
    route: str = "other"
    peer: str = ""
    client: Client = ANONYMOUS
    request_id: str = ""
    request_bytes: int = 0
    reply_bytes: int = 0
    status: str = OK
    reason: str = ""
    deadline: float | None = None
    metrics: CallMetrics = field(default_factory=CallMetrics)
    started: float = field(default_factory=time.monotonic)

    def end(self, status: str, reason: str) -> None:
        """Record the status, unless an earlier error was recorded."""
        if self.status == OK:
            self.status, self.reason = status, reason

    def disconnect(self) -> None:
        """Record that the client left. If its deadline has passed (or almost), that is the reason."""
        is_over = self.deadline is not None and time.monotonic() >= self.deadline - _DEADLINE_SLACK_S
        self.end("DEADLINE_EXCEEDED" if is_over else CANCELLED, "")

    @property
    def elapsed_s(self) -> float:
        """Time since the request was received, in seconds."""
        return time.monotonic() - self.started

    def write(self) -> None:
        """Write the log line."""
        metrics = self.metrics
        logger.info(
            "request",
            extra={
                "method": self.method,
                "status": self.status,
                **({"reason": self.reason} if self.reason else {}),
                "peer": self.peer,
                **({"request_id": self.request_id} if self.request_id else {}),
                "inputs": metrics.num_inputs,
                "tokens": metrics.num_tokens,
                "tokenize_ms": _ms(metrics.tokenize_s),
                "queue_ms": _ms(metrics.queue_s),
                "compute_ms": _ms(metrics.compute_s),
                "total_ms": _ms(self.elapsed_s),
                "request_bytes": self.request_bytes,
                "reply_bytes": self.reply_bytes,
            },
        )


def format_peer(text: str) -> str:
    """Return gRPC's description of a peer as HOST:PORT, if it is an IP address."""
    return unquote(text).removeprefix("ipv4:").removeprefix("ipv6:")[:128]


def validate_request_id(value: str | bytes | None) -> str:
    """Return a client's request identifier if it consists of letters, digits and `.:/+=_-`, otherwise ""."""
    return value if isinstance(value, str) and _REQUEST_ID.fullmatch(value) else ""


def is_enabled() -> bool:
    """Return whether the request log is written."""
    return logger.isEnabledFor(logging.INFO)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
