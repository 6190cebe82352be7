"""Metrics in Prometheus' text format.

Requests are counted when they end, in plain dictionaries: the counters of prometheus_client take several
times as long, because each has a lock. Everything else is read from the service and the engine when
Prometheus asks, so it costs nothing in between.

No label contains text, ids or other values of clients. Names of clients are those that the operator has given
to keys and certificates.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from attnlens_server.bundle import Model
from attnlens_server.clients import Client
from attnlens_server.core.admission import Pool
from attnlens_server.core.request_record import RequestRecord
from attnlens_server.engine import Engine
from attnlens_server.errors import OverloadedError
from attnlens_server.observing.observer import Observer
from attnlens_server.operations.service import ModelService

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_CLIENTS = 100
"""Maximum number of clients with metrics of their own."""
ANONYMOUS, OTHER = "anonymous", "other"
"""Label of clients without an identity, and of those beyond `MAX_CLIENTS`."""
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class _Durations:
    """Distribution of durations in seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(_SECONDS) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.sum_s += seconds


@dataclass(slots=True)
class _Route:
    """Requests to one method or path."""

    durations: _Durations = field(default_factory=_Durations)
    statuses: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    reasons: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    num_inputs: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class _Usage:
    """Requests of one client."""

    num_requests: int = 0
    num_rejections: int = 0
    num_inputs: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0


class ServerMetrics:
    """Metrics of one model.

    Args:
        service: Service of the model.
        engine: Engine of the model.
        model: The model.
        precision: Precision of embeddings.
        observer: Source of the number of log lines that were not written.
    """

    def __init__(
        self, service: ModelService, engine: Engine, model: Model, precision: str, observer: Observer
    ) -> None:
        self._requests = RequestCollector()
        self._registry = CollectorRegistry()
        self._registry.register(self._requests)
        self._registry.register(_StateCollector(service, engine, model, precision, observer))
        ProcessCollector(registry=self._registry)
        self.observe = self._requests.observe

    def add(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Add further metrics, which `read` returns. It runs in any thread."""
        self._registry.register(_FunctionCollector(read))

    def add_pool(self, name: str, help_: str, pool: Pool) -> None:
        """Add the use and the limit of a pool."""
        self.add(lambda: limited(name, help_, pool))

    def add_certificate(self, expires_at: Callable[[], float | None]) -> None:
        """Add the time when the TLS certificate expires, in seconds since the epoch."""
        name = "attnlens_certificate_expiry_timestamp_seconds"

        def read() -> Iterator[Metric]:
            if (value := expires_at()) is not None:
                yield gauge(name, "When the TLS certificate expires.", value)

        self.add(read)

    def add_lag(self, bounds_s: Sequence[float], counts: Sequence[int], sum_s: Callable[[], float]) -> None:
        """Add the distribution of the lag of the event loop. `counts` is read at each scrape."""
        name, help_ = (
            "attnlens_event_loop_lag_seconds",
            "Time by which due callbacks of the event loop run late.",
        )
        self.add(lambda: [HistogramMetricFamily(name, help_, buckets(bounds_s, list(counts)), sum_s())])

    def text(self) -> bytes:
        """Return all metrics. Thread-safe."""
        return generate_latest(self._registry)


class _FunctionCollector(Collector):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


class RequestCollector(Collector):
    """Counts requests. The event loop writes; other threads read copies, which may lack the last request."""

    def __init__(self) -> None:
        self._routes: dict[str, _Route] = defaultdict(_Route)
        self._clients: dict[str, _Usage] = {ANONYMOUS: _Usage(), OTHER: _Usage()}
        # Prometheus cannot compute the rate of the first rejection if its series begins with it.
        resources = ("calls", "memory", "texts")
        self._rejections = defaultdict(int, {(OverloadedError.reason, name): 0 for name in resources})
        self._tokenize = _Durations()
        self._queue = _Durations()
        self._compute = _Durations()

    def observe(self, record: RequestRecord) -> None:
        """Count a completed request."""
        route, metrics, client = self._routes[record.route], record.metrics, record.client
        route.statuses[record.status] += 1
        route.durations.add(record.elapsed_s)
        usage = self._clients[ANONYMOUS] if not client.is_identified else self._usage(client)
        usage.num_requests += 1
        usage.elapsed_s += record.elapsed_s
        usage.tokenize_s += metrics.tokenize_s
        usage.queue_s += metrics.queue_s
        usage.compute_s += metrics.compute_s
        if record.reason:
            route.reasons[record.reason] += 1
            if record.resource:
                self._rejections[record.reason, record.resource] += 1
                usage.num_rejections += 1
        elif metrics.num_inputs and record.has_succeeded:
            route.num_inputs += metrics.num_inputs
            route.num_tokens += metrics.num_tokens
            usage.num_inputs += metrics.num_inputs
            usage.num_tokens += metrics.num_tokens
            self._tokenize.add(metrics.tokenize_s)
            self._queue.add(metrics.queue_s)
            self._compute.add(metrics.compute_s)

    def _usage(self, client: Client) -> _Usage:
        usage = self._clients.get(client.name)
        if usage is None:
            if len(self._clients) >= MAX_CLIENTS + 2:
                return self._clients[OTHER]
            usage = self._clients[client.name] = _Usage()
        return usage

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        yield from self._collect_routes()
        stages = HistogramMetricFamily(
            "attnlens_stage_duration_seconds",
            "Time of successful requests in tokenization, waiting for a batch, and computation.",
            labels=("stage",),
        )
        for stage, durations in (
            ("tokenize", self._tokenize),
            ("queue", self._queue),
            ("compute", self._compute),
        ):
            stages.add_metric((stage,), buckets(_SECONDS, durations.counts), durations.sum_s)
        yield stages
        rejections = CounterMetricFamily(
            "attnlens_rejections", "Requests rejected because of a limit.", labels=("reason", "resource")
        )
        for labels, count in dict(self._rejections).items():
            rejections.add_metric(labels, count)
        yield rejections
        clients = dict(self._clients)
        for name, help_, attribute in (
            ("requests", "Ended requests by client.", "num_requests"),
            ("rejections", "Requests rejected because of a limit, by client.", "num_rejections"),
            ("inputs", "Texts and pairs of successful requests by client.", "num_inputs"),
            ("tokens", "Tokens of successful requests by client.", "num_tokens"),
            ("request_seconds", "Time of ended requests by client.", "elapsed_s"),
        ):
            values = {client: getattr(usage, attribute) for client, usage in clients.items()}
            yield _counter(f"attnlens_client_{name}", help_, "client", values)
        seconds = CounterMetricFamily(
            "attnlens_client_stage_seconds",
            "Time of ended requests in each stage by client.",
            labels=("client", "stage"),
        )
        for client, usage in clients.items():
            for stage in ("tokenize", "queue", "compute"):
                seconds.add_metric((client, stage), getattr(usage, f"{stage}_s"))
        yield seconds

    def _collect_routes(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("attnlens_requests", "Ended requests.", labels=("method", "status"))
        errors = CounterMetricFamily(
            "attnlens_request_errors", "Failed requests.", labels=("method", "reason")
        )
        seconds = HistogramMetricFamily(
            "attnlens_request_duration_seconds",
            "Time from the first byte of a request to the last byte of its response.",
            labels=("method",),
        )
        routes = dict(self._routes)
        for name, route in routes.items():
            for status, count in dict(route.statuses).items():
                requests.add_metric((name, status), count)
            for reason, count in dict(route.reasons).items():
                errors.add_metric((name, reason), count)
            seconds.add_metric((name,), buckets(_SECONDS, route.durations.counts), route.durations.sum_s)
        yield from (requests, errors, seconds)
        for name, help_, attribute in (
            ("attnlens_inputs", "Texts and pairs of successful requests.", "num_inputs"),
            ("attnlens_input_tokens", "Tokens of successful requests.", "num_tokens"),
        ):
            yield _counter(
                name, help_, "method", {method: getattr(route, attribute) for method, route in routes.items()}
            )


class _StateCollector(Collector):
    """Reads the state of the service and the engine."""

    def __init__(
        self, service: ModelService, engine: Engine, model: Model, precision: str, observer: Observer
    ) -> None:
        self._service = service
        self._engine = engine
        self._observer = observer
        self._info = {
            "model": model.name,
            "model_version": model.version,
            "engine": engine.runtime.name,
            "precision": precision,
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        yield InfoMetricFamily("attnlens_model", "Served model.", self._info)
        yield gauge("attnlens_ready", "Whether requests are accepted.", self._service.process.is_serving)
        yield from self._collect_limits()
        lanes = self._engine.lanes
        yield _gauges(
            "attnlens_queue_tokens",
            "Tokens that wait for a batch.",
            "graph",
            {kind: each.num_waiting_tokens for kind, each in lanes.items()},
        )
        for name, help_, attribute in (
            ("attnlens_batches", "Batches.", "num_batches"),
            ("attnlens_batch_inputs", "Texts in batches.", "num_items"),
            ("attnlens_compute_seconds", "Time of all batches.", "compute_s"),
            ("attnlens_stopped_batches", "Batches that were stopped because nobody waited.", "num_stopped"),
        ):
            yield _counter(
                name, help_, "graph", {kind: getattr(each, attribute) for kind, each in lanes.items()}
            )
        tokens = CounterMetricFamily("attnlens_batch_tokens", "Tokens in batches.", labels=("graph", "kind"))
        for kind, each in lanes.items():
            tokens.add_metric((kind, "text"), each.num_live_tokens)
            tokens.add_metric((kind, "padding"), each.num_computed_tokens - each.num_live_tokens)
        yield tokens
        yield gauge(
            "attnlens_lanes", "Number of batches that can run at the same time.", self._engine.num_lanes
        )
        yield _counter(
            "attnlens_log_lines_dropped",
            "Log lines that were not written.",
            "cause",
            self._observer.num_dropped_lines,
        )

    def _collect_limits(self) -> Iterator[Metric]:
        """Yield the use and the limit of each resource that requests share."""
        admission, workers = self._service.process.admission, self._service.process.workers
        yield from limited(
            "attnlens_reserved_memory_bytes", "Memory reserved by running requests", admission.memory
        )
        yield from limited("attnlens_calls", "Open calls", admission.calls)
        pools = {kind: admission.texts(kind) for kind in self._engine.lanes}
        yield _gauges(
            "attnlens_queue_inputs",
            "Waiting and running texts.",
            "graph",
            {kind: pool.used for kind, pool in pools.items()},
        )
        yield _gauges(
            "attnlens_queue_inputs_limit",
            "Limit of waiting and running texts.",
            "graph",
            {kind: pool.limit for kind, pool in pools.items()},
        )
        yield gauge("attnlens_active_clients", "Clients with open calls.", admission.calls.num_clients)
        yield gauge(
            "attnlens_worker_tasks", "Waiting and running tasks of worker threads.", workers.num_pending
        )
        yield gauge("attnlens_worker_threads", "Number of worker threads.", workers.num_threads)


def gauge(name: str, help_: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(name, help_, value=float(value))


def buckets(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Return the cumulative buckets of a histogram. `counts` has one more element than `bounds`."""
    names = (*map(floatToGoString, bounds), "+Inf")
    return list(zip(names, map(float, accumulate(counts)), strict=True))


def limited(name: str, help_: str, pool: Pool) -> Iterator[Metric]:
    """Yield the use and the limit of a pool."""
    yield gauge(name, f"{help_}.", pool.used)
    yield gauge(f"{name}_limit", f"Limit of {name}.", pool.limit)


def _gauges(name: str, help_: str, label: str, values: Mapping[str, float]) -> Metric:
    metric = GaugeMetricFamily(name, help_, labels=(label,))
    for key, value in values.items():
        metric.add_metric((key,), value)
    return metric


def _counter(name: str, help_: str, label: str, values: Mapping[str, float]) -> Metric:
    metric = CounterMetricFamily(name, help_, labels=(label,))
    for key, value in values.items():
        metric.add_metric((key,), value)
    return metric
