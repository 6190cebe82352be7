"""One line in the log for each request of any protocol, when it is over. Never its texts.

What comes from a client is cut and checked here, so that it can neither fill the log nor look like other
fields.
"""

import logging
import re
import time
from dataclasses import dataclass, field
from urllib.parse import unquote

from attnlens_server.serving.spent import Spent

logger = logging.getLogger(__name__)

_DEADLINE_SLACK_S = 0.02  # a client's timer may be ahead of ours
OK, CANCELLED = "OK", "CANCELLED"
_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)


@dataclass(slots=True)
class RequestRecord:
    """What is told of a request. It holds nothing of the protocol's.

    Attributes:
        method: its name in the protocol.
        peer: the address that it came from.
        request_id: as its client named it; empty: it did not, or by no plain word.
        request_bytes: of its message or body.
        reply_bytes: of all messages that were sent, or of the body.
        status: how it ended, in the protocol's word.
        reason: why it did not end well.
        deadline: on the clock of `time.monotonic`; None: none.
        spent: what it has used.
        started: when it had come in full, on the same clock.
    """

    method: str
    peer: str = ""
    request_id: str = ""
    request_bytes: int = 0
    reply_bytes: int = 0
    status: str = OK
    reason: str = ""
    deadline: float | None = None
    spent: Spent = field(default_factory=Spent)
    started: float = field(default_factory=time.monotonic)

    def ended(self, status: str, reason: str) -> None:
        """Note how it ends, unless it has ended badly before."""
        if self.status == OK:
            self.status, self.reason = status, reason

    def left(self) -> None:
        """Note that the client has left: by its deadline, where that is over or as good as over."""
        is_over = self.deadline is not None and time.monotonic() >= self.deadline - _DEADLINE_SLACK_S
        self.ended("DEADLINE_EXCEEDED" if is_over else CANCELLED, "")

    def write(self) -> None:
        """Write the line."""
        spent = self.spent
        logger.info(
            "request",
            extra={
                "method": self.method,
                "status": self.status,
                **({"reason": self.reason} if self.reason else {}),
                "peer": self.peer,
                **({"request_id": self.request_id} if self.request_id else {}),
                "inputs": spent.num_inputs,
                "tokens": spent.num_tokens,
                "tokenize_ms": _ms(spent.tokenize_s),
                "queue_ms": _ms(spent.queue_s),
                "compute_ms": _ms(spent.compute_s),
                "total_ms": _ms(time.monotonic() - self.started),
                "request_bytes": self.request_bytes,
                "reply_bytes": self.reply_bytes,
            },
        )


def peer_of(text: str) -> str:
    """Return a peer's address that gRPC has written, as HOST:PORT where it is one."""
    return unquote(text).removeprefix("ipv4:").removeprefix("ipv6:")[:128]


def request_id_of(value: str | bytes | None) -> str:
    """Return the name that a client gave a request, if it is one word of letters, digits and `.:/+=_-`."""
    return value if isinstance(value, str) and _REQUEST_ID.fullmatch(value) else ""


def can_be_seen() -> bool:
    """Tell whether the log shows the lines."""
    return logger.isEnabledFor(logging.INFO)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
