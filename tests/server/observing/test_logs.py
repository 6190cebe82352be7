"""Selection and rate of log lines, and a log that never blocks."""

import io
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_cli.frame.logs import JsonFormatter
from attnlens_server.clients import Client
from attnlens_server.config import AccessLogSelection, ConfigError, ServerConfig
from attnlens_server.core.request_record import RequestRecord
from attnlens_server.observing import background_log
from attnlens_server.observing.access_log import AccessLog
from attnlens_server.observing.background_log import MAX_LINES, BackgroundLog, log_in_background
from attnlens_server.observing.rate_limit import BURST, LINES_PER_S, RateLimit
from served import ServerProcess

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"


def ended(status: str = "OK", reason: str = "", seconds: float = 0.0) -> RequestRecord:
    record = RequestRecord("Embed", "Embed", status=status, reason=reason)
    record.ended = record.started + seconds
    return record


def lines_of(text: str, records: list[RequestRecord], caplog: pytest.LogCaptureFixture) -> list[Any]:
    log = AccessLog(AccessLogSelection.parse(text))
    caplog.clear()
    for record in records:
        log.write(record)
    return [vars(record) for record in caplog.records]


# --- Access log -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("errors", ["INTERNAL", "429"]),
        ("slow", ["INTERNAL", "429", "slow"]),
        ("slow:0.2", ["INTERNAL", "429", "slow", "medium"]),
        ("sampled:0", ["INTERNAL", "429"]),
        ("sampled:1", ["INTERNAL", "429", "slow", "medium", "fast"]),
        ("all", ["INTERNAL", "429", "slow", "medium", "fast"]),
    ],
)
def test_mode_selects_requests(text: str, expected: list[str], caplog: pytest.LogCaptureFixture) -> None:
    records = [
        ended("INTERNAL", "INTERNAL"),
        ended("429", "OVERLOADED"),
        *(
            RequestRecord(name, started=100.0, ended=100.0 + seconds)
            for name, seconds in (("slow", 1.0), ("medium", 0.3), ("fast", 0.1))
        ),
    ]
    found = lines_of(text, records, caplog)
    assert [line["method"] if line["status"] == "OK" else line["status"] for line in found] == expected


def test_share_of_sampled_requests_is_as_specified(caplog: pytest.LogCaptureFixture) -> None:
    found = lines_of("sampled:0.25", [ended()] * 2000, caplog)
    assert 0.18 < len(found) / 2000 < 0.32  # 7 standard deviations


def test_line_contains_identity_trace_and_resource(caplog: pytest.LogCaptureFixture) -> None:
    record = ended("RESOURCE_EXHAUSTED", "OVERLOADED", 0.5)
    record.client = Client("team-a", is_bulk=True, is_identified=True)
    record.peer, record.traceparent, record.resource = "ipv4:10.0.0.1:5", TRACEPARENT, "memory"
    record.request_id = "not valid"
    [line] = lines_of("errors", [record], caplog)
    found = {
        name: line.get(name) for name in ("identity", "priority", "peer", "trace_id", "resource", "sampled")
    }
    assert found == {
        "identity": "team-a",
        "priority": "bulk",
        "peer": "10.0.0.1:5",
        "trace_id": TRACEPARENT[3:35],
        "resource": "memory",
        "sampled": None,
    }
    assert "request_id" not in line
    assert line["total_ms"] == pytest.approx(500)


def test_access_log_is_written_at_any_log_level(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("attnlens_server"), "level", logging.ERROR)
    assert len(lines_of("all", [ended()], caplog)) == 1


def test_errors_are_limited_per_reason_and_the_rest_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog(AccessLogSelection("errors"))
    for _ in range(BURST + 5):
        log.write(ended("429", "OVERLOADED"))
    log.write(ended("400", "INVALID_FIELD"))
    reasons = [vars(record)["reason"] for record in caplog.records]
    assert reasons == ["OVERLOADED"] * BURST + ["INVALID_FIELD"]
    assert log.num_suppressed == 5
    assert len(lines_of("all", [ended("429", "OVERLOADED")] * 50, caplog)) == 50


@pytest.mark.parametrize("text", ["", "on", "slow:x", "slow:-1", "sampled:1.1", "sampled:nan", "all:1"])
def test_invalid_mode_is_rejected_with_the_valid_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"access_log is .*: use off, errors, slow, .* or all"):
        ServerConfig(bundle=Path(), access_log=text)


# --- Rate limit -----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 5), st.sampled_from("ab")), max_size=200))
def test_rate_limit_allows_a_burst_and_then_its_rate(events: list[tuple[float, str]]) -> None:
    now = 0.0
    limit = RateLimit(lambda: now)
    allowed: dict[str, list[float]] = {"a": [], "b": []}
    num_suppressed = {"a": 0, "b": 0}
    reported = {"a": 0, "b": 0}
    for delay, key in events:
        now += delay
        suppressed = limit.take(key)
        if suppressed is None:
            num_suppressed[key] += 1
        else:
            reported[key] += suppressed
            allowed[key].append(now)
    for key, times in allowed.items():
        for first in range(len(times)):
            for last in range(first, len(times)):
                assert last - first + 1 <= BURST + LINES_PER_S * (times[last] - times[first]) + 1e-6
        assert reported[key] <= num_suppressed[key]
    if events:
        assert allowed[events[0][1]]


def test_rate_limit_has_bounded_memory() -> None:
    limit = RateLimit()
    for number in range(10_000):
        limit.take(str(number))
    assert len(limit._states) < 300


# --- Log in the background ------------------------------------------------------------------------


class StalledHandler(logging.Handler):
    """Blocks until it may write."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.may_write.wait()
        self.lines.append(record.getMessage())


@pytest.fixture
def stalled() -> Iterator[StalledHandler]:
    handler = StalledHandler()
    yield handler
    handler.may_write.set()


def emit(log: BackgroundLog, level: int, message: str, *args: object) -> None:
    log.handle(logging.LogRecord("attnlens_server", level, "", 0, message, args, None))


def test_lines_are_dropped_and_counted_when_the_reader_stalls(stalled: StalledHandler) -> None:
    log = BackgroundLog([stalled])
    for number in range(MAX_LINES + 50):
        emit(log, logging.INFO, "line %d", number)
    # The thread may take one line from the queue before it is full.
    assert log.num_dropped in (49, 50)
    stalled.may_write.set()
    log.close()
    assert stalled.lines[:2] == ["line 0", "line 1"]
    assert len(stalled.lines) == MAX_LINES + 50 - log.num_dropped


def test_closing_does_not_wait_for_a_stalled_reader(
    stalled: StalledHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_log, "STOP_S", 0.05)
    log = BackgroundLog([stalled])
    for _ in range(MAX_LINES + 2):
        emit(log, logging.INFO, "line")
    log.close()
    assert stalled.lines == []


def test_repeated_errors_are_suppressed_and_counted(stalled: StalledHandler) -> None:
    stalled.may_write.set()
    log = BackgroundLog([stalled])
    for number in range(BURST + 7):
        emit(log, logging.ERROR, "%s failed", number)
        emit(log, logging.WARNING, "warning")
    emit(log, logging.ERROR, "another")
    emit(log, logging.INFO, "info")
    log.close()
    errors = [line for line in stalled.lines if line != "warning"]
    assert errors == [*(f"{number} failed" for number in range(BURST)), "another", "info"]
    assert len(stalled.lines) - len(errors) == BURST + 7
    assert log.num_suppressed == 7


def test_traceback_is_written_without_keeping_its_frames() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    before = root.handlers[:]
    root.handlers[:] = [handler]
    try:
        with log_in_background():
            try:
                dict[str, int]()["missing"]
            except KeyError:
                logging.getLogger("attnlens_server").exception("%s failed", "Embed")
        assert root.handlers == [handler]
    finally:
        root.handlers[:] = before
    [line] = map(json.loads, stream.getvalue().splitlines())
    assert line["message"] == "Embed failed"
    assert line["exception"].endswith("KeyError: 'missing'")


def test_server_answers_while_nobody_reads_its_log(minilm_bundle: Path) -> None:
    server = ServerProcess(minilm_bundle, "--access-log", "all")
    reading, writing = os.pipe()
    process = subprocess.Popen(server.command, stdout=subprocess.PIPE, stderr=writing, text=True)
    os.close(writing)
    assert process.stdout is not None
    address = process.stdout.readline().partition(" is ready at ")[2].partition(": ")[0]
    with grpc.insecure_channel(address) as channel:
        stub = EncoderServiceStub(channel)
        for _ in range(400):  # more lines than the pipe holds
            stub.ListModels(pb.ListModelsRequest(), timeout=30)
    process.terminate()
    started = time.monotonic()
    assert process.wait(30) == 0
    assert time.monotonic() - started < 15
    log = os.read(reading, 1 << 20)
    assert len(log) > 60_000
    os.close(reading)
    process.stdout.close()


def test_lines_that_wait_are_bounded() -> None:
    waiting: list[logging.LogRecord] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            waiting.append(record)

    log = BackgroundLog([Keeper()])
    error = ValueError("x" * 13_000_000)
    log.handle(logging.LogRecord("a", logging.ERROR, "", 0, "%s", ("y" * 13_000_000,), None))
    log.handle(logging.LogRecord("a", logging.ERROR, "", 0, "b", (), (ValueError, error, None)))
    log.close()
    assert [len(record.getMessage()) + len(record.exc_text or "") < 10_000 for record in waiting] == [
        True
    ] * 2
