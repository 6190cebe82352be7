"""Access log: one line per selected request, without its texts."""

import logging
import random
from typing import Any

from attnlens_server.config import AccessLogSelection
from attnlens_server.core.request_record import RequestRecord, format_peer, validate_request_id
from attnlens_server.observing.rate_limit import RateLimit

logger = logging.getLogger(__name__)


class AccessLog:
    """Writes the access log, at level info.

    Lines about errors are rate-limited per reason, except if all requests are logged.

    Args:
        selection: Requests to log.

    Attributes:
        num_suppressed: Number of lines that the rate limit has suppressed.
    """

    def __init__(self, selection: AccessLogSelection) -> None:
        self.num_suppressed = 0
        self._mode = selection.mode
        self._slow_s = selection.value if selection.mode == "slow" else float("inf")
        self._share = {"all": 1.0, "sampled": selection.value}.get(selection.mode, 0.0)
        self._limit = RateLimit()
        logger.setLevel(logging.INFO)  # also if other lines are only written from a higher level

    def write(self, record: RequestRecord) -> None:
        """Write the line of a completed request if it is selected."""
        if record.has_succeeded:
            if self._share <= random.random() and record.elapsed_s < self._slow_s:  # noqa: S311 - no secret
                return
            self._write(record, 0)
            return
        suppressed = 0 if self._mode == "all" else self._limit.take(record.reason or record.status)
        if suppressed is None:
            self.num_suppressed += 1
        else:
            self._write(record, suppressed)

    def _write(self, record: RequestRecord, suppressed: int) -> None:
        logger.info("request", extra=_fields(record, suppressed))


def _fields(record: RequestRecord, suppressed: int) -> dict[str, Any]:
    metrics, client = record.metrics, record.client
    optional = {
        "reason": record.reason,
        "resource": record.resource,
        "suppressed": suppressed,
        "identity": client.name if client.is_identified else "",
        "priority": "bulk" if client.is_bulk else "",
        "request_id": validate_request_id(record.request_id),
        "trace_id": record.trace_id,
        "sampled": record.stages is not None,
    }
    return {
        "protocol": record.protocol,
        "method": record.method,
        "status": record.status,
        "peer": format_peer(record.peer),
        **{name: value for name, value in optional.items() if value},
        "inputs": metrics.num_inputs,
        "tokens": metrics.num_tokens,
        "tokenize_ms": _ms(metrics.tokenize_s),
        "queue_ms": _ms(metrics.queue_s),
        "compute_ms": _ms(metrics.compute_s),
        "total_ms": _ms(record.elapsed_s),
        "request_bytes": record.request_bytes,
        "reply_bytes": record.reply_bytes,
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
