"""Health checks and metrics of a real server process."""

import http.client
import json
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from attnlens_client import AttnlensError, Client
from attnlens_server.config import ServerConfig
from attnlens_server.server import _hosts
from served import ServerProcess


class Ports(NamedTuple):
    server: ServerProcess
    http: int
    operations: int


@pytest.fixture(scope="module")
def ports(minilm_bundle: Path) -> Iterator[Ports]:
    with ServerProcess(minilm_bundle, "--http-port", "0", "--metrics-port", "0") as server:
        http_port = urlsplit(server.http_url()).port
        assert server.process.stdout is not None
        metrics = re.fullmatch(
            r"Metrics are at http://127.0.0.1:(\d+)/metrics\n", server.process.stdout.readline()
        )
        assert metrics is not None
        assert http_port is not None
        yield Ports(server, http_port, int(metrics[1]))


def ask(
    port: int, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, body, dict(headers or {}))
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply.status, content


def samples(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the metrics once they are stable: a request is counted shortly after its response."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    while True:
        status, content = ask(port, "GET", "/metrics")
        assert status == 200
        before, found = (
            found,
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(content.decode())
                for sample in family.samples
                if not sample.name.startswith("process_cpu")
            },
        )
        if found == before:
            return found


def value(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return found.get((name, frozenset(labels.items())), 0.0)


def test_health_is_reported_on_both_ports(ports: Ports) -> None:
    for port in (ports.http, ports.operations):
        for path in ("/healthz", "/readyz"):
            assert ask(port, "GET", path) == (200, b'{"status":"ok"}')
    status, body = ask(ports.operations, "GET", "/v1/models")
    assert status == 404
    assert b"GET /v1/models is not a route of this port: use GET /healthz, /readyz or /metrics" in body


REBOUND = {"Host": "rebound.example:8080", "Sec-Fetch-Site": "same-origin"}


def test_web_pages_of_others_can_read_nothing_by_dns_rebinding(ports: Ports) -> None:
    for port, path in (
        (ports.operations, "/metrics"),
        *(
            (ports.http, path)
            for path in ("/metrics", "/v1/models", "/v1/attnlens/models", "/info", "/", "/docs")
        ),
    ):
        status, body = ask(port, "GET", path, headers=REBOUND)
        assert (status, b"does not accept the host name" in body) == (421, True), path
    for port in (ports.http, ports.operations):
        assert ask(port, "GET", "/readyz", headers=REBOUND)[0] == 200


def test_metrics_port_has_a_host_of_its_own(minilm_bundle: Path) -> None:
    options = ("--host", "::", "--http-host", "::", "--metrics-host", "127.0.0.2")
    with ServerProcess(minilm_bundle, *options, "--http-port", "0", "--metrics-port", "0") as server:
        assert server.process.stdout is not None
        urls = [urlsplit(server.process.stdout.readline().split()[-1]) for _ in range(2)]
        assert [url.hostname for url in urls] == ["::", "127.0.0.2"]
        grpc_port = int(server.address.rpartition(":")[2])
        open_ports = [grpc_port, *(url.port or 0 for url in urls)]
        expected_by_host = {
            "::1": [True, True, False],
            "127.0.0.1": [True, True, False],
            "127.0.0.2": [True] * 3,
        }
        for host, expected in expected_by_host.items():
            assert [accepts(host, port) for port in open_ports] == expected, host
        text = server.log()
    assert "NO ACCESS CONTROL" in text
    assert "--host ::, --http-host ::)" in text  # nobody else reaches 127.0.0.2


def test_hosts_of_all_open_ports_are_checked_for_exposure() -> None:
    config = ServerConfig(bundle=Path(), host="a", http_host="b", metrics_host="c", http_port=1)
    assert _hosts(config) == {"--host": "a", "--http-host": "b"}
    config = replace(config, address="d:1", host="127.0.0.1", http_port=None, metrics_port=1)
    assert _hosts(config) == {"--address": "d", "--metrics-host": "c"}


def accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=20).close()
    except ConnectionRefusedError:
        return False
    return True


def test_requests_of_both_protocols_are_counted(ports: Ports) -> None:
    before = samples(ports.operations)
    texts = ["A man is playing a guitar.", "a"]
    with Client(ports.server.address) as client:
        client.embed(texts)
        with pytest.raises(AttnlensError):
            client.embed(["word " * 400])
    body = json.dumps({"input": texts}).encode()
    assert ask(ports.http, "POST", "/v1/embeddings", body)[0] == 200
    assert ask(ports.http, "POST", "/v1/embeddings", b"{")[0] == 400
    assert ask(ports.http, "GET", "/nowhere/private-text")[0] == 404
    after = samples(ports.operations)

    def change(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert change("attnlens_requests_total", method="Embed", status="OK") == 1
    assert change("attnlens_requests_total", method="Embed", status="INVALID_ARGUMENT") == 1
    assert change("attnlens_request_errors_total", method="Embed", reason="INPUT_TOO_LONG") == 1
    assert change("attnlens_requests_total", method="POST /v1/embeddings", status="200") == 1
    assert change("attnlens_requests_total", method="POST /v1/embeddings", status="400") == 1
    assert change("attnlens_requests_total", method="other", status="404") == 1
    num_tokens = 9 + 3
    for method in ("Embed", "POST /v1/embeddings"):
        assert change("attnlens_inputs_total", method=method) == 2
        assert change("attnlens_input_tokens_total", method=method) == num_tokens
    assert change("attnlens_batch_inputs_total", graph="embeddings") == 4
    assert change("attnlens_batch_tokens_total", graph="embeddings", kind="text") == 2 * num_tokens
    assert 1 <= change("attnlens_batches_total", graph="embeddings") <= 4
    assert change("attnlens_stage_duration_seconds_count", stage="compute") == 2
    assert value(after, "attnlens_reserved_memory_bytes") == 0
    assert value(after, "attnlens_queue_inputs", graph="embeddings") == 0
    assert change("attnlens_client_inputs_total", client="anonymous") == 4
    limits = {
        "attnlens_calls_limit": 4096 + 256,  # with the reserve
        "attnlens_http_connections_limit": 512 + 32,
        "attnlens_reserved_memory_bytes_limit": (512 + 32) << 20,
        "attnlens_worker_threads": 2,
    }
    assert {name: value(after, name) for name in limits} == limits
    assert value(after, "attnlens_queue_inputs_limit", graph="embeddings") == 4096 + 256
    assert ("attnlens_event_loop_lag_seconds_count", frozenset()) in after
    assert value(after, "attnlens_worker_tasks") == value(after, "attnlens_calls") == 0
    assert value(after, "process_resident_memory_bytes") > 1e8
    assert "private" not in ask(ports.operations, "GET", "/metrics")[1].decode()


def test_not_ready_before_and_after_serving(minilm_bundle: Path) -> None:
    with ServerProcess(minilm_bundle, "--metrics-port", "0") as server:
        assert server.process.stdout is not None
        port = int(server.process.stdout.readline().rsplit(":", 1)[1].partition("/")[0])
        assert ask(port, "GET", "/readyz")[0] == 200
        assert server.stop() == 0
        with pytest.raises(ConnectionRefusedError):
            ask(port, "GET", "/healthz")


def test_http_without_its_extra_aborts_startup(minilm_bundle: Path) -> None:
    server = ServerProcess(minilm_bundle, "--http-port", "0")
    code = "import sys; sys.modules['uvicorn'] = None; from attnlens_cli.main import main; main()"
    server.command[1:3] = ["-c", code]
    with pytest.raises(RuntimeError, match=r"HTTP needs uvicorn.*install attnlens\[http\]"), server:
        pass
