"""HAProxy with deploy/haproxy.cfg in front of three servers: a restart and a kill under load."""

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attnlens_client import Client
from attnlens_client.connection import grpc_options
from bench.studies.proxied import Ports, free_ports, haproxy
from hostile.haproxy import require_haproxy
from several_servers import Load, restarted, running

pytestmark = pytest.mark.extended


def test_no_call_fails_while_one_server_restarts_and_after_another_is_killed(
    minilm_bundle: Path, tmp_path: Path
) -> None:
    require_haproxy()
    numbers = free_ports(9)
    ports = [Ports(*numbers[first : first + 3]) for first in (0, 3, 6)]
    with (
        running(minilm_bundle, *(each.options for each in ports)) as servers,
        haproxy(ports[0], None, tmp_path / "haproxy.log", others=ports[1:]) as proxy,
        Load(proxy.address) as load,
    ):
        load.wait_for_calls()
        servers[0] = restarted(minilm_bundle, servers[0], *ports[0].options)
        load.wait_for_calls(servers)
        servers[1].process.kill()
        load.wait_for_calls()
        load.check()


def test_clients_that_watch_the_health_send_calls_through_the_proxy(
    minilm_bundle: Path, tmp_path: Path
) -> None:
    require_haproxy()
    ports = Ports(*free_ports(3))
    with (
        running(minilm_bundle, ports.options),
        haproxy(ports, None, tmp_path / "haproxy.log") as proxy,
        Client(f"{proxy.address},127.0.0.1:1", max_attempts=1) as client,
        grpc.insecure_channel(proxy.address) as channel,
    ):
        assert "healthCheckConfig" in dict(grpc_options(client))["grpc.service_config"]
        assert client.embed(["It rained."]).shape == (1, 384)
        with pytest.raises(grpc.RpcError) as caught:
            list(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=10))
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
