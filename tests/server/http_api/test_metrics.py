"""Counting of requests, compared with the counters and histograms of prometheus_client."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from attnlens_server.clients import Client
from attnlens_server.core.request_record import RequestRecord
from attnlens_server.core.usage import CallMetrics
from attnlens_server.http_api.metrics import _SECONDS, MAX_CLIENTS, RequestCollector

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(registry: CollectorRegistry) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def counted(records: list[RequestRecord]) -> Samples:
    collector, registry = RequestCollector(), CollectorRegistry()
    for record in records:
        collector.observe(record)
    registry.register(collector)
    return samples_of(registry)


def record_of(
    route: str,
    status: str,
    reason: str,
    seconds: float,
    num_inputs: int,
    client: str = "",
    resource: str = "",
) -> RequestRecord:
    metrics = CallMetrics(num_inputs, 3 * num_inputs, seconds / 8, seconds / 4, seconds / 2)
    return RequestRecord(
        route,
        route,
        client=Client(client or "10.0.0.1", is_identified=bool(client)),
        status=status,
        reason=reason,
        resource=resource,
        metrics=metrics,
        started=1024.0,  # so that the duration is exact
        ended=1024.0 + seconds,
    )


OUTCOMES = st.sampled_from([("OK", ""), ("200", ""), ("UNAVAILABLE", "NOT_READY"), ("CANCELLED", "")])
RECORDS = st.builds(
    lambda route, outcome, ticks, num_inputs: record_of(
        route, outcome[0], outcome[1], ticks / 1024, num_inputs
    ),
    st.sampled_from(["Embed", "POST /v1/embeddings"]),
    OUTCOMES,
    st.integers(0, 40_000),
    st.integers(0, 5),
)


@given(st.lists(RECORDS, max_size=30))
def test_requests_are_counted_as_by_prometheus_client(records: list[RequestRecord]) -> None:
    registry = CollectorRegistry()
    new: Any = {"registry": registry}
    requests = Counter("attnlens_requests", "-", ("method", "status"), **new)
    errors = Counter("attnlens_request_errors", "-", ("method", "reason"), **new)
    seconds = Histogram("attnlens_request_duration_seconds", "-", ("method",), buckets=_SECONDS, **new)
    stages = Histogram("attnlens_stage_duration_seconds", "-", ("stage",), buckets=_SECONDS, **new)
    for stage in ("tokenize", "queue", "compute"):
        stages.labels(stage)
    for record in records:
        requests.labels(record.route, record.status).inc()
        seconds.labels(record.route).observe(record.elapsed_s)
        if record.reason:
            errors.labels(record.route, record.reason).inc()
        elif record.metrics.num_inputs and record.status in ("OK", "200"):
            stages.labels("tokenize").observe(record.metrics.tokenize_s)
            stages.labels("queue").observe(record.metrics.queue_s)
            stages.labels("compute").observe(record.metrics.compute_s)
    expected, found = samples_of(registry), counted(records)
    assert {key: found.get(key) for key in expected} == expected


def test_usage_is_counted_per_client() -> None:
    found = counted(
        [
            record_of("Embed", "OK", "", 0.1, 2, "team-a"),
            record_of("Embed", "OK", "", 0.1, 3, "team-a"),
            record_of("Embed", "RESOURCE_EXHAUSTED", "OVERLOADED", 0.1, 4, "team-a", "texts"),
            record_of("Embed", "INVALID_ARGUMENT", "INPUT_TOO_LONG", 0.1, 1, "team-a"),
            record_of("Embed", "OK", "", 0.1, 1),
        ]
    )

    def value(name: str, client: str) -> float:
        return found[f"attnlens_client_{name}_total", frozenset({("client", client)})]

    names = ("requests", "rejections", "inputs", "tokens")
    assert [value(name, "team-a") for name in names] == [4, 1, 5, 15]
    assert [value(name, "anonymous") for name in names] == [1, 0, 1, 3]
    assert value("request_seconds", "team-a") == pytest.approx(0.4)
    stages = {"tokenize": 0.05, "queue": 0.1, "compute": 0.2}
    for stage, seconds in stages.items():
        labels = frozenset({("client", "team-a"), ("stage", stage)})
        assert found["attnlens_client_stage_seconds_total", labels] == pytest.approx(seconds)
    assert "10.0.0.1" not in str(found)
    labels = frozenset({("reason", "OVERLOADED"), ("resource", "texts")})
    assert found["attnlens_rejections_total", labels] == 1


def test_number_of_client_labels_is_bounded() -> None:
    records = [record_of("Embed", "OK", "", 0.1, 1, f"team-{number}") for number in range(MAX_CLIENTS + 50)]
    found = counted(records)
    labels = {dict(key)["client"] for name, key in found if name == "attnlens_client_requests_total"}
    assert len(labels) == MAX_CLIENTS + 2
    assert found["attnlens_client_requests_total", frozenset({("client", "other")})] == 50
