"""Traces in OpenTelemetry. Needs the extra `otel`.

An unsampled request only costs the decision of the sampler. The spans of a sampled request are created from
its record after the request.
"""

import os
import random
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from attnlens_server.core.request_record import RequestRecord, format_peer, parse_traceparent
from attnlens_server.core.stages import Stages, use_stages
from attnlens_server.errors import StartupError

FLUSH_S = 5.0  # maximum time to export the last spans when the server stops
_NO_PARENT = Context()
_ID_LIMIT = TraceIdRatioBased.TRACE_ID_LIMIT  # of the 64 bits of a trace id that decide
_propagator = TraceContextTextMapPropagator()


class _Ids(RandomIdGenerator):
    """Generates the trace ids that the sampler has seen.

    Attributes:
        trace_id: Trace id of the next root span.
    """

    trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id


class Tracer:
    """Exports the traces of requests. The standard variables OTEL_* configure it.

    Args:
        methods: Full name of each gRPC method by its name.
        exporter: Exporter. If None, the one for OTEL_EXPORTER_OTLP_PROTOCOL.
    """

    def __init__(self, methods: Mapping[str, str], exporter: SpanExporter | None = None) -> None:
        self._methods = methods
        self._ids = _Ids()
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler  # of OTEL_TRACES_SAMPLER
        self._root_bound = _root_bound(self._sampler)
        self._provider = TracerProvider(
            ALWAYS_ON, _resource(), shutdown_on_exit=False, id_generator=self._ids
        )
        self._processor = BatchSpanProcessor(exporter or _exporter())
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("attnlens_server")

    def begin(self, record: RequestRecord) -> None:
        """Decide whether a request is sampled, and mark its stages if it is."""
        sent = parse_traceparent(record.traceparent) if record.traceparent else None
        if sent is None:
            context, trace_id = _NO_PARENT, random.getrandbits(128)
            if trace_id & _ID_LIMIT >= self._root_bound:
                use_stages(None)
                return
        else:
            trace_id, span_id, flags = sent
            parent = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
            context = set_span_in_context(NonRecordingSpan(parent), _NO_PARENT)
        result = self._sampler.should_sample(context, trace_id, record.route, SpanKind.SERVER)
        if result.decision.is_sampled():
            record.stages = Stages(trace_id, record.started)
        use_stages(record.stages)

    def end(self, record: RequestRecord) -> None:
        """Create the spans of a completed request."""
        stages = record.stages
        assert stages is not None  # noqa: S101 - ensured by the caller
        offset_ns = time.time_ns() - time.monotonic_ns()

        def unix_ns(seconds: float) -> int:
            return offset_ns + int(seconds * 1e9)

        name = self._methods[record.route] if record.protocol == "grpc" else record.route
        self._ids.trace_id = stages.trace_id
        span = self._tracer.start_span(
            "HTTP" if name == "other" else name,
            _parent(record),
            SpanKind.SERVER,
            _attributes(record, name),
            start_time=unix_ns(record.started),
        )
        context = set_span_in_context(span, _NO_PARENT)
        for stage in stages.stages:
            child = self._tracer.start_span(stage.name, context, start_time=unix_ns(stage.started))
            child.end(unix_ns(stage.ended))
        if record.is_server_error:
            span.set_status(Status(StatusCode.ERROR))
        span.end(unix_ns(record.ended))

    def close(self) -> None:
        """Export the remaining spans, for at most `FLUSH_S`."""
        # The SDK waits for 30 s if the collector does not respond.
        closing = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(FLUSH_S)


def _root_bound(sampler: Sampler) -> int:
    """Return a bound: `sampler` drops each root span whose trace id has lower 64 bits at or above it.

    To call the sampler, which creates several objects, takes longer than the comparison.
    """
    root = getattr(sampler, "_root", sampler)  # of ParentBased
    return root.bound if type(root) is TraceIdRatioBased else _ID_LIMIT + 1


def _parent(record: RequestRecord) -> Context:
    """Return a context with the span of the client, if it has sent one."""
    if not record.traceparent:
        return _NO_PARENT
    headers = {"traceparent": record.traceparent, "tracestate": record.tracestate}
    return _propagator.extract(headers, _NO_PARENT)


def _attributes(record: RequestRecord, name: str) -> dict[str, Any]:
    """Return the attributes of a request's span, by the semantic conventions of OpenTelemetry."""
    metrics = record.metrics
    attributes: dict[str, Any] = {
        "client.address": format_peer(record.peer).rpartition(":")[0] or record.peer,
        "attnlens.inputs": metrics.num_inputs,
        "attnlens.tokens": metrics.num_tokens,
        "attnlens.request_bytes": record.request_bytes,
        "attnlens.reply_bytes": record.reply_bytes,
    }
    if record.protocol == "grpc":
        attributes |= {
            "rpc.system.name": "grpc",
            "rpc.method": name,
            "rpc.response.status_code": record.status,
        }
    else:
        method, _, route = name.partition(" ")
        attributes |= {"http.request.method": method, "http.route": route} if route else {}
        attributes |= {"http.response.status_code": int(record.status)} if record.status.isdigit() else {}
    if record.client.is_identified:
        attributes["enduser.id"] = record.client.name
    if not record.has_succeeded:
        attributes["error.type"] = record.reason or record.status
    if record.resource:
        attributes["attnlens.resource"] = record.resource
    return attributes


def _exporter() -> SpanExporter:
    """Return the exporter for OTEL_EXPORTER_OTLP_PROTOCOL, by default gRPC, which needs no further packages.

    Raises:
        StartupError: It is unknown, not installed, or a variable is invalid.
    """
    name = "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(name) or "grpc"
    packages = {"grpc": "grpc", "http/protobuf": "http"}
    if protocol not in packages:
        raise StartupError(f"{name} is {protocol!r}: use one of {', '.join(packages)}")
    package = packages[protocol]
    try:
        module = import_module(f"opentelemetry.exporter.otlp.proto.{package}.trace_exporter")
        exporter: SpanExporter = module.OTLPSpanExporter()
    except ModuleNotFoundError as error:
        raise StartupError(
            f"{name} is {protocol!r}, which is not installed: "
            f"install opentelemetry-exporter-otlp-proto-{package}, or use grpc"
        ) from error
    except Exception as error:  # the SDK has many exceptions for invalid variables
        raise StartupError(f"cannot export traces: {error}. Check the variables OTEL_*") from error
    return exporter


def _resource() -> Resource:
    """Return the resource of OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME. The default name is attnlens."""
    try:
        resource = Resource.create({SERVICE_VERSION: version("attnlens")})
    except PackageNotFoundError:  # the sources are used without an installation
        resource = Resource.create({})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return resource.merge(Resource({SERVICE_NAME: "attnlens"}))
    return resource
