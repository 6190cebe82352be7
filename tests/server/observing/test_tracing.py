"""Traces of a real server process, received over OTLP."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from attnlens_client import AsyncClient, AttentionQuery, AttnlensError, Client
from attnlens_server.core.request_record import RequestRecord, parse_traceparent
from attnlens_server.errors import StartupError
from attnlens_server.observing.observer import open_tracer
from attnlens_server.observing.tracing import Tracer
from served import ServerProcess

SECRET = "Persephone"
TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
SAMPLED = f"00-{TRACE:032x}-{PARENT:016x}-01"
UNSAMPLED = f"00-{TRACE:032x}-{PARENT:016x}-00"


class Collector(TraceServiceServicer):
    """Receives traces over gRPC, as an OpenTelemetry Collector does."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []

    def Export(self, request: ExportTraceServiceRequest, _: Any) -> ExportTraceServiceResponse:  # noqa: N802
        self.requests.append(request)
        return ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource_spans in request.resource_spans
            for scope_spans in resource_spans.scope_spans
            for span in scope_spans.spans
        ]

    def trace_of(self, span: Span, count: int) -> dict[str, Span]:
        """Wait for the `count` children of a span, and return them by name."""
        until = time.monotonic() + 20
        while len(found := [each for each in self.spans if each.parent_span_id == span.span_id]) < count:
            assert time.monotonic() < until, [each.name for each in found]
            time.sleep(0.02)
        return {each.name: each for each in found}

    def next_server_span(self, after: int) -> Span:
        """Wait for the server span that follows the first `after` ones."""
        until = time.monotonic() + 20
        while len(found := [each for each in self.spans if each.kind == Span.SPAN_KIND_SERVER]) <= after:
            assert time.monotonic() < until, "no span was exported"
            time.sleep(0.02)
        return found[after]


class Traced:
    """A server process that exports traces, and the collector that receives them."""

    def __init__(self, collector: Collector, address: str, http_url: str) -> None:
        self.collector, self.address, self.http_url = collector, address, http_url
        self.num_seen = 0

    def next(self) -> Span:
        """Return the span of the next sampled request, except for the one in which a client reads limits."""
        while True:
            span = self.collector.next_server_span(self.num_seen)
            self.num_seen += 1
            if not span.name.endswith("Model"):
                return span


@pytest.fixture(scope="module")
def traced(minilm_bundle: Path) -> Iterator[Traced]:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")  # only if the client samples
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with ServerProcess(minilm_bundle, "--http-port", "0", "--access-log", "all") as process:
            yield Traced(collector, process.address, process.http_url())
            with Client(process.address, metadata=[("traceparent", SAMPLED)]) as client:
                client.embed([SECRET])  # exported when the server stops
            assert process.stop() == 0
            num_ended = sum(span.kind == Span.SPAN_KIND_SERVER for span in collector.spans)
            log = process.log()
    server.stop(None)
    lines = [json.loads(line) for line in log.splitlines()]
    sampled = [line for line in lines if line.get("sampled")]
    assert num_ended == len(sampled)
    assert {line["trace_id"] for line in sampled} == {span.trace_id.hex() for span in collector.spans}
    assert SECRET not in log
    assert not {SECRET, "private"}.intersection(re.findall(r"\w+", repr(collector.requests)))


def attributes_of(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def test_request_has_spans_for_its_stages(traced: Traced) -> None:
    with Client(traced.address, metadata=[("traceparent", SAMPLED)]) as client:
        before = time.time_ns()
        client.embed([SECRET, "a"])
        after = time.time_ns()
    span = traced.next()
    assert span.name == "attnlens.v1.EncoderService/Embed"
    assert (int.from_bytes(span.trace_id), int.from_bytes(span.parent_span_id)) == (TRACE, PARENT)
    found = attributes_of(span.attributes)
    assert found["rpc.system.name"] == "grpc"
    assert found["rpc.method"] == span.name
    assert found["rpc.response.status_code"] == "OK"
    assert found["client.address"] == "127.0.0.1"
    assert found["attnlens.inputs"] == 2
    assert span.status.code == Status.STATUS_CODE_UNSET
    stages = traced.collector.trace_of(span, 5)
    assert set(stages) == {"validate", "tokenize", "queue", "run", "build"}
    times = [
        before,
        span.start_time_unix_nano,
        stages["validate"].start_time_unix_nano,
        stages["validate"].end_time_unix_nano,
        stages["tokenize"].end_time_unix_nano,
        stages["queue"].start_time_unix_nano,
        stages["run"].start_time_unix_nano,
        stages["run"].end_time_unix_nano,
        stages["build"].end_time_unix_nano,
        span.end_time_unix_nano,
    ]
    assert times == sorted(times)
    assert stages["run"].end_time_unix_nano - stages["run"].start_time_unix_nano > 100_000
    assert stages["build"].end_time_unix_nano < after
    [resource_spans] = traced.collector.requests[-1].resource_spans
    resource = attributes_of(resource_spans.resource.attributes)
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("attnlens", "test")


def test_requests_without_a_sampled_parent_are_not_exported(traced: Traced) -> None:
    for metadata in ([("traceparent", UNSAMPLED)], [("traceparent", "garbled")], []):
        with Client(traced.address, metadata=metadata) as client:
            client.embed(["a"])
    with Client(traced.address, metadata=[("traceparent", SAMPLED)]) as client:
        client.tokenize(["a"])
    assert traced.next().name == "attnlens.v1.EncoderService/Tokenize"


def test_failure_is_an_attribute_and_only_faults_of_the_server_are_errors(traced: Traced) -> None:
    with (
        Client(traced.address, metadata=[("traceparent", SAMPLED)]) as client,
        pytest.raises(AttnlensError),
    ):
        client.embed(["word " * 400])
    span = traced.next()
    found = attributes_of(span.attributes)
    assert (found["rpc.response.status_code"], found["error.type"]) == ("INVALID_ARGUMENT", "INPUT_TOO_LONG")
    assert span.status.code == Status.STATUS_CODE_UNSET


def test_http_requests_have_spans(traced: Traced) -> None:
    headers = {"traceparent": SAMPLED, "tracestate": "vendor=1", "Content-Type": "application/json"}
    body = json.dumps({"input": [SECRET]}).encode()
    urlopen(Request(f"{traced.http_url}v1/embeddings", body, headers)).close()
    span = traced.next()
    found = attributes_of(span.attributes)
    assert span.name == "POST /v1/embeddings"
    assert (found["http.request.method"], found["http.route"]) == ("POST", "/v1/embeddings")
    assert found["http.response.status_code"] == 200
    assert span.trace_state == "vendor=1"
    assert {"validate", "tokenize", "queue", "run", "build"} == set(traced.collector.trace_of(span, 5))
    with pytest.raises(HTTPError):
        urlopen(Request(f"{traced.http_url}nowhere/private", headers=headers))
    span = traced.next()
    assert span.name == "HTTP"
    assert attributes_of(span.attributes)["http.response.status_code"] == 404


def test_streams_and_explanations_have_spans_for_each_run(traced: Traced) -> None:
    with Client(traced.address, metadata=[("traceparent", SAMPLED)]) as client:
        for _ in client.encode_stream([SECRET, "a"], attention=AttentionQuery()):
            pass
        names = list(traced.collector.trace_of(traced.next(), 6))
        client.explain([SECRET], to="a")
        names += traced.collector.trace_of(traced.next(), 5)
    assert {"validate", "tokenize", "queue", "run", "build"} <= set(names)


async def test_clients_propagate_the_current_span(traced: Traced) -> None:
    tracer = TracerProvider(ALWAYS_ON, shutdown_on_exit=False).get_tracer("test")
    with Client(traced.address) as client, tracer.start_as_current_span("caller") as span:
        client.embed(["a"])
    found = traced.next()
    assert int.from_bytes(found.parent_span_id) == span.get_span_context().span_id
    async with AsyncClient(traced.address) as async_client:
        with tracer.start_as_current_span("caller") as span:
            await async_client.embed(["a"])
    found = traced.next()
    assert int.from_bytes(found.parent_span_id) == span.get_span_context().span_id


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_TRACES_EXPORTER", "none"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
    ],
)
def test_traces_are_off_unless_the_environment_has_an_endpoint(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    assert open_tracer({}) is None


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("always_on", 1.0),
        ("parentbased_always_off", 0.0),
        ("traceidratio", 0.3),
        ("parentbased_traceidratio", 0.3),
    ],
)
def test_the_configured_sampler_decides(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", name)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", str(share))
    tracer = Tracer({}, InMemorySpanExporter())
    records = [RequestRecord("Embed", "Embed") for _ in range(2000)]
    for record in records:
        tracer.begin(record)
    ids = [record.stages.trace_id for record in records if record.stages]
    assert len(ids) / 2000 == pytest.approx(share, abs=0.05 if 0 < share < 1 else 0)
    sampler = TracerProvider().sampler
    assert all(sampler.should_sample(None, each, "Embed").decision.is_sampled() for each in ids)
    tracer.close()


def test_invalid_protocol_is_a_startup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    with pytest.raises(StartupError, match=r"is 'carrier-pigeon': use one of grpc, http/protobuf"):
        open_tracer({})


@pytest.mark.parametrize(
    "value",
    [
        "",
        "ff" + SAMPLED[2:],
        SAMPLED + "-x",
        SAMPLED[:-1],
        SAMPLED.upper(),
        SAMPLED.replace(f"{TRACE:032x}", 32 * "0"),
    ],
)
def test_invalid_trace_context_is_ignored(value: str) -> None:
    assert parse_traceparent(value) is None


def test_trace_context_of_a_later_version_is_accepted() -> None:
    assert parse_traceparent(f"01{SAMPLED[2:]}-more") == parse_traceparent(SAMPLED) == (TRACE, PARENT, 1)
