"""Observes the requests of all protocols."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from attnlens_server.core.request_record import RequestRecord
from attnlens_server.observing.access_log import AccessLog

if TYPE_CHECKING:
    from attnlens_server.observing.background_log import BackgroundLog
    from attnlens_server.observing.tracing import Tracer


logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Observer:
    """Notified when each request begins and ends.

    Args:
        access_log: Access log. If None, none is written.

    Attributes:
        access_log: See above.
        tracer: Exports traces, or None.
        log: Log of this process, if it is written in the background.
        count: Called with the record of each completed request, for metrics.
    """

    def __init__(self, access_log: AccessLog | None = None) -> None:
        self.access_log = access_log
        self.tracer: Tracer | None = None
        self.log: BackgroundLog | None = None
        self.count: Callable[[RequestRecord], None] = lambda _: None

    @property
    def needs_headers(self) -> bool:
        """Whether records must contain the peer and the headers of requests."""
        return self.access_log is not None or self.tracer is not None

    @property
    def num_dropped_lines(self) -> dict[str, int]:
        """Number of log lines that were not written, by cause."""
        log, access = self.log, self.access_log
        suppressed = (log.num_suppressed if log else 0) + (access.num_suppressed if access else 0)
        return {"queue_full": log.num_dropped if log else 0, "rate_limit": suppressed}

    def begin(self, record: RequestRecord) -> None:
        """Decide whether the trace of a request is sampled. Call in the task of the request."""
        if self.tracer is not None:
            self.tracer.begin(record)

    def end(self, record: RequestRecord) -> None:
        """Count and write a completed request."""
        record.ended = time.monotonic()
        self.count(record)
        if self.tracer is not None and record.stages is not None:
            self.tracer.end(record)
        if self.access_log is not None:
            self.access_log.write(record)


def open_tracer(methods: Mapping[str, str]) -> "Tracer | None":
    """Return a tracer if the environment configures one.

    Args:
        methods: Full name of each gRPC method by its name.

    Raises:
        StartupError: A variable is invalid.
    """
    endpoint = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if endpoint is None or is_disabled or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    try:
        from attnlens_server.observing.tracing import Tracer  # noqa: PLC0415 - an optional dependency
    except ModuleNotFoundError as error:
        logger.warning(
            "%s is set, but %s is not installed, so no traces are exported: install attnlens[otel]",
            endpoint,
            error.name,
        )
        return None
    return Tracer(methods)
