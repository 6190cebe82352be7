"""Metrics in Prometheus' text format.

Requests are counted when they end. Everything else is read from the service and the engine when Prometheus
asks, so it costs nothing in between. No label contains text, ids or other values of clients.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from attnlens_server.bundle import Model
from attnlens_server.engine import Engine
from attnlens_server.serving.request_log import OK, RequestRecord
from attnlens_server.serving.service import ModelService

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STAGES = ("tokenize", "queue", "compute")


class ServerMetrics:
    """Metrics of one model.

    Args:
        service: Service of the model.
        engine: Engine of the model.
        model: The model.
        precision: Precision of embeddings.
    """

    def __init__(self, service: ModelService, engine: Engine, model: Model, precision: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StateCollector(service, engine, model, precision))
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            "attnlens_requests", "Ended requests.", ("method", "status"), registry=self._registry
        )
        self._errors = Counter(
            "attnlens_request_errors", "Failed requests.", ("method", "reason"), registry=self._registry
        )
        self._inputs = Counter(
            "attnlens_inputs", "Texts and pairs of successful requests.", ("method",), registry=self._registry
        )
        self._tokens = Counter(
            "attnlens_input_tokens", "Tokens of successful requests.", ("method",), registry=self._registry
        )
        self._seconds = Histogram(
            "attnlens_request_duration_seconds",
            "Time from the first byte of a request to the last byte of its response.",
            ("method",),
            registry=self._registry,
            buckets=_SECONDS,
        )
        stages = Histogram(
            "attnlens_stage_duration_seconds",
            "Time of successful requests in tokenization, waiting for a batch, and computation.",
            ("stage",),
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._stages = [stages.labels(stage) for stage in _STAGES]

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        route, metrics = record.route, record.metrics
        self._requests.labels(route, record.status).inc()
        self._seconds.labels(route).observe(record.elapsed_s)
        if record.reason:
            self._errors.labels(route, record.reason).inc()
        elif metrics.num_inputs and record.status in (OK, "200"):
            self._inputs.labels(route).inc(metrics.num_inputs)
            self._tokens.labels(route).inc(metrics.num_tokens)
            for stage, seconds in zip(
                self._stages, (metrics.tokenize_s, metrics.queue_s, metrics.compute_s), strict=True
            ):
                stage.observe(seconds)

    def text(self) -> bytes:
        """Return all metrics. Thread-safe."""
        return generate_latest(self._registry)


class _StateCollector(Collector):
    """Reads the state of the service and the engine."""

    def __init__(self, service: ModelService, engine: Engine, model: Model, precision: str) -> None:
        self._service = service
        self._engine = engine
        self._info = {
            "model": model.name,
            "model_version": model.version,
            "engine": engine.runtime.name,
            "precision": precision,
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        yield InfoMetricFamily("attnlens_model", "Served model.", self._info)
        state = GaugeMetricFamily("attnlens_ready", "Whether requests are accepted.")
        state.add_metric((), float(self._service.is_serving))
        yield state
        memory = GaugeMetricFamily("attnlens_reserved_memory_bytes", "Memory reserved by running requests.")
        memory.add_metric((), self._service.admission.memory.used)
        yield memory
        queue = GaugeMetricFamily("attnlens_queue_inputs", "Waiting and running texts.", labels=("graph",))
        waiting = GaugeMetricFamily(
            "attnlens_queue_tokens", "Tokens that wait for a batch.", labels=("graph",)
        )
        batches = CounterMetricFamily("attnlens_batches", "Batches.", labels=("graph",))
        items = CounterMetricFamily("attnlens_batch_inputs", "Texts in batches.", labels=("graph",))
        tokens = CounterMetricFamily("attnlens_batch_tokens", "Tokens in batches.", labels=("graph", "kind"))
        compute = CounterMetricFamily("attnlens_compute_seconds", "Time of all batches.", labels=("graph",))
        for kind, lanes in self._engine.lanes.items():
            queue.add_metric((kind,), self._service.admission.num_texts(kind))
            waiting.add_metric((kind,), lanes.num_waiting_tokens)
            batches.add_metric((kind,), lanes.num_batches)
            items.add_metric((kind,), lanes.num_items)
            tokens.add_metric((kind, "text"), lanes.num_live_tokens)
            tokens.add_metric((kind, "padding"), lanes.num_computed_tokens - lanes.num_live_tokens)
            compute.add_metric((kind,), lanes.compute_s)
        yield from (queue, waiting, batches, items, tokens, compute)
