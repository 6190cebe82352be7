"""Measures the cost of access control and observation: CPU time of the event loop per request.

    python -m bench.studies.overhead BUNDLE [--starts 12] [--rounds 6] [--requests 400]

Two servers run at the same time, one with API keys, rates, metrics, an access log of errors, and traces of
one percent of requests, one without all of them. They get the same requests, `Embed` with one sentence, in
turn. Two servers with equal options differ by up to 20 us until they are started again, so both are started
several times. The result is the median of the differences of all starts, each of which is a median of rounds,
with a 95 % confidence interval by bootstrap. A second table shows the code of the observation without a
server, which is less noisy.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_server.access.keys import new_key
from attnlens_server.config import AccessLogSelection
from attnlens_server.core.request_record import RequestRecord
from attnlens_server.core.stages import mark
from attnlens_server.http_api.metrics import RequestCollector
from attnlens_server.observing.access_log import AccessLog
from attnlens_server.observing.observer import Observer
from attnlens_server.observing.tracing import Tracer
from bench.servers import RunningServer, attnlens_server

OPTIONS = ("--metrics-port", "0", "--access-log", "errors")
POLICY = "[default]\nmethods = ['Embed']\ntexts_per_second = 1e6\ntokens_per_second = 1e8\n"
SAMPLER = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}
REQUEST = pb.EmbedRequest(inputs=[pb.Input(text="A man is playing a guitar.")])
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
LOG = Path(".bench/logs")
CLIENTS = 4


class Collector(TraceServiceServicer):
    """Receives traces."""

    def __init__(self) -> None:
        self.num_spans = 0

    def Export(self, request: Any, _: Any) -> Any:  # noqa: ANN401, N802 - as gRPC calls it
        self.num_spans += sum(
            len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans
        )
        return otlp.ExportTraceServiceResponse()


class Discarding(SpanExporter):
    """Discards traces."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        del spans
        return SpanExportResult.SUCCESS


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of access control and observation.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--starts", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=400)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        collector, endpoint = stack.enter_context(collecting())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        key, line = new_key("client")
        (directory / "keys").write_text(line)
        (directory / "policy.toml").write_text(POLICY)
        access = ("--api-keys", str(directory / "keys"), "--policy", str(directory / "policy.toml"))
        off_us, on_us, differences = [], [], []
        for number in range(arguments.starts):
            with running(arguments.bundle, access, endpoint, is_first_on=bool(number % 2)) as (off, on):
                first, second = measure(off, on, key, arguments.rounds, arguments.requests)
            off_us += first
            on_us += second
            differences.append(float(np.median(np.array(second) - first)))
        num_spans = collector.num_spans  # servers export the last spans when they end
        parts = measure_parts()
    low, high = interval(np.array(differences))
    print("| event loop, us per request | median |\n|---|---|")
    print(f"| without both | {statistics.median(off_us):.1f} |")
    print(f"| with both | {statistics.median(on_us):.1f} |")
    print(f"| difference | {np.median(differences):.1f} [{low:.1f}, {high:.1f}] |")
    print(f"\n{num_spans} spans were received.\n")
    print("| the same code without a server | us per request |\n|---|---|")
    for name, us in parts.items():
        print(f"| {name} | {us:.2f} |")


@contextmanager
def running(
    bundle: Path, access: Sequence[str], endpoint: str, *, is_first_on: bool
) -> Iterator[tuple[RunningServer, RunningServer]]:
    """Start the server without and the one with access control and observation, in either order."""
    with ExitStack() as stack:
        servers = {}
        for is_on in (is_first_on, not is_first_on):
            variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **SAMPLER} if is_on else {}
            log, options = (LOG / "on.log", (*OPTIONS, *access)) if is_on else (LOG / "off.log", ())
            with pytest.MonkeyPatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                servers[is_on] = stack.enter_context(attnlens_server(bundle, "fp32", 1, log, *options))
        yield servers[False], servers[True]


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """Yield a collector and its endpoint."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


def measure(
    off: RunningServer, on: RunningServer, key: str, rounds: int, num_requests: int
) -> tuple[list[float], list[float]]:
    """Return the CPU time of both event loops per request in each round, in microseconds."""
    times: dict[int, list[float]] = {off.pid: [], on.pid: []}
    with grpc.insecure_channel(off.address) as first, grpc.insecure_channel(on.address) as second:
        stubs = {off: EncoderServiceStub(first), on: EncoderServiceStub(second)}
        for number in range(rounds + 2):  # the first two are a warm-up
            for server in (off, on) if number % 2 else (on, off):
                before = loop_ns(server)
                send(stubs[server], key, num_requests)
                if number > 1:
                    times[server.pid].append((loop_ns(server) - before) / num_requests / 1000)
    return times[off.pid], times[on.pid]


def send(stub: EncoderServiceStub, key: str, num_requests: int) -> None:
    """Send requests, of which a few run at the same time."""
    metadata = (("authorization", f"Bearer {key}"),)
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda _: stub.Embed(REQUEST, timeout=60, metadata=metadata), range(num_requests)))


def loop_ns(server: RunningServer) -> int:
    """Return the CPU time of the main thread, where the event loop is, in nanoseconds."""
    return int(Path(f"/proc/{server.pid}/task/{server.pid}/schedstat").read_text().split()[0])


def interval(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median."""
    random = np.random.default_rng(0)
    medians = np.median(random.choice(values, (10_000, len(values))), axis=1)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def measure_parts() -> dict[str, float]:
    """Return the CPU time per request of each part, each in addition to those above it, in microseconds."""
    observer, traceparent = Observer(), ""

    def observe() -> None:
        record = RequestRecord("Embed", "Embed", traceparent=traceparent)
        observer.begin(record)
        for stage in ("validate", "tokenize", "run", "build"):
            mark(stage)
        record.metrics.num_inputs = 1
        observer.end(record)

    times = {"a record and its stages": cpu_us(observe)}
    observer.count = RequestCollector().observe
    times["metrics"] = cpu_us(observe)
    observer.access_log = AccessLog(AccessLogSelection("errors"))
    times["access log of errors"] = cpu_us(observe)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SAMPLER.items():
            patch.setenv(name, value)
        observer.tracer = Tracer({"Embed": "attnlens.v1.EncoderService/Embed"}, Discarding())
    times["traces, 1 % sampled"] = cpu_us(observe)
    traceparent = TRACEPARENT
    times["traces, with a parent that is not sampled"] = cpu_us(observe)
    traceparent = f"{TRACEPARENT[:-1]}1"
    times["traces, all sampled"] = cpu_us(observe, 500)
    return times


def cpu_us(function: Callable[[], None], count: int = 20_000) -> float:
    """Return the CPU time of a call, the minimum of 7 rounds, in microseconds."""
    rounds = []
    for _ in range(7):
        started = time.thread_time_ns()
        for _ in range(count):
            function()
        rounds.append((time.thread_time_ns() - started) / count / 1000)
    return min(rounds)


if __name__ == "__main__":
    main()
