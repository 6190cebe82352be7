"""Connections and HTTP/2 frames without a purpose. test_proxy.py repeats the attacks through a proxy."""

import contextlib
import socket
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from bench.studies.attackers import ATTACKS, attacking
from bench.studies.proxied import latencies
from hostile.target import HELLO, Target
from served import ServerProcess


@pytest.mark.parametrize("attack", ATTACKS)
def test_client_is_answered_during_an_attack_that_takes_no_memory(target: Target, attack: str) -> None:
    with attacking(attack, target.address, 1) as attacker:
        latencies(target.address, 1.2)
        assert attacker.stdout is not None
        assert int(attacker.stdout.read()) > 0
    assert target.peak_growth_mib < 150


NUM_FILES = 1000


def test_health_at_the_metrics_port_does_not_depend_on_grpc(minilm_bundle: Path) -> None:
    """Silent connections take neither all files of the process nor the port for health checks."""
    server = ServerProcess(
        minilm_bundle, "--http-port", "0", "--metrics-port", "0", "--max-connections", "64"
    )
    server.command = ["bash", "-c", f'ulimit -n {NUM_FILES}; exec "$@"', "bash", *server.command]
    with server, ExitStack() as stack:
        http_url = server.http_url()
        assert server.process.stdout is not None
        metrics_url = server.process.stdout.readline().split()[-1]
        assert f"this process may only open {NUM_FILES} files" in server.log()
        for port in (int(server.address.rpartition(":")[2]), int(http_url.rstrip("/").rpartition(":")[2])):
            for _ in range(NUM_FILES):
                silent = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
                silent.settimeout(0.001)
        for _ in range(3):
            for url in (metrics_url.replace("metrics", "readyz"), f"{http_url}readyz"):
                with urllib.request.urlopen(url, timeout=20) as response:
                    assert response.status == 200
        with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(server.address) as channel:
            EncoderServiceStub(channel).Embed(HELLO, timeout=1)
        num_files = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
        assert num_files < NUM_FILES - 50
