"""One client and several servers: distribution, health, restarts, kills, connection age."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from attnlens_client import (
    AsyncClient,
    AttentionPart,
    AttentionQuery,
    Client,
    TextPart,
    check_health,
)
from attnlens_client.core.streams import StreamReader
from attnlens_server.access.keys import new_key
from scripted import ScriptedServer
from served import ServerProcess
from several_servers import Load, all_of, restarted, running

SERVICE = "attnlens.v1.EncoderService"


@pytest.fixture
def servers(minilm_bundle: Path) -> Iterator[list[ServerProcess]]:
    with running(minilm_bundle, (), (), ()) as started:
        yield started


@pytest.mark.extended
def test_no_call_fails_during_a_rolling_restart_and_after_a_kill(
    minilm_bundle: Path, servers: list[ServerProcess]
) -> None:
    with Load([server.address for server in servers]) as load:
        load.wait_for_calls()
        for number, server in enumerate(servers):
            servers[number] = restarted(minilm_bundle, server)
        load.wait_for_calls(servers)  # also the restarted ones receive calls
        servers[1].process.kill()
        load.wait_for_calls()
    load.check()


@pytest.mark.extended
def test_streams_continue_on_other_servers_after_a_kill(
    servers: list[ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[StreamReader] = []
    rest = StreamReader.rest

    def resume(reader: StreamReader) -> Any:
        resumed.append(reader)
        return rest(reader)

    monkeypatch.setattr(StreamReader, "rest", resume)
    texts = [f"{number} " + "and so on " * 40 for number in range(18)]
    with Client(",".join(server.address for server in servers)) as client:

        def stream() -> Iterator[TextPart | AttentionPart]:
            return client.encode_stream_parts(texts, attention=AttentionQuery(layers=[0, 1, 2]))

        expected = list(stream())
        streams = [stream() for _ in range(6)]
        received = [list(itertools.islice(each, 3)) for each in streams]
        servers[2].process.kill()  # with two streams, whose results are larger than gRPC's buffers
        for each, parts in zip(streams, received, strict=True):
            assert_same_parts([*parts, *each], expected)
    assert len(resumed) >= 2


def assert_same_parts(
    parts: Sequence[TextPart | AttentionPart], expected: Sequence[TextPart | AttentionPart]
) -> None:
    for part, other in zip(parts, expected, strict=True):
        assert part.input_index == other.input_index
        if isinstance(part, TextPart):
            assert isinstance(other, TextPart)
            assert part.text.tokens == other.text.tokens
        else:
            assert isinstance(other, AttentionPart)
            np.testing.assert_allclose(part.weights, other.weights, atol=1e-5)


@contextmanager
def scripted_with_health(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[ScriptedServer, health.HealthServicer]]:
    """Yield a scripted server with a health service, which reports SERVING."""
    servicer = health.HealthServicer()
    servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    create = grpc.server

    def create_with_health(*args: Any, **options: Any) -> grpc.Server:
        created = create(*args, **options)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, created)
        return created

    with monkeypatch.context() as patched:
        patched.setattr(grpc, "server", create_with_health)
        server = ScriptedServer()
        server.start()
    yield server, servicer
    server.stop()


def test_calls_go_to_each_healthy_server_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        scripted = [stack.enter_context(scripted_with_health(monkeypatch)) for _ in range(3)]
        servers = [server for server, _ in scripted]
        client = stack.enter_context(Client([server.address for server in servers], max_attempts=1))
        client.embed(["a"])
        wait_forall_of(client, servers)
        before = [len(server.requests) for server in servers]
        for _ in range(30):
            client.embed(["a"])
        assert [len(server.requests) - count for server, count in zip(servers, before, strict=True)] == [
            10
        ] * 3
        scripted[1][1].set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        wait_until_unused(client, servers[1])
        count = len(servers[1].requests)
        for _ in range(30):
            client.embed(["a"])
        assert len(servers[1].requests) == count
        scripted[1][1].set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        wait_forall_of(client, servers)


def wait_forall_of(client: Client, servers: Sequence[ScriptedServer]) -> None:
    """Send calls until each server has received another one."""
    before = [len(server.requests) for server in servers]
    while any(len(server.requests) == count for server, count in zip(servers, before, strict=True)):
        client.embed(["a"])


def wait_until_unused(client: Client, server: ScriptedServer) -> None:
    """Send calls until the server receives none of six."""
    while True:
        before = len(server.requests)
        for _ in range(6):
            client.embed(["a"])
        if len(server.requests) == before:
            return


def test_connections_end_at_their_age_without_a_failure(minilm_bundle: Path, tmp_path: Path) -> None:
    """Also while the health is watched, and where watching it needs a key that gRPC does not send."""
    key, line = new_key("search")
    (tmp_path / "keys").write_text(line)
    (tmp_path / "policy").write_text("open_health = false\n")
    access = ("--api-keys", str(tmp_path / "keys"), "--policy", str(tmp_path / "policy"))
    with ServerProcess(
        minilm_bundle, "--max-connection-age-s", "0.5", *access, "--access-log", "all"
    ) as server:
        options: Any = {"api_key": key, "max_attempts": 1}
        with Client(f"{server.address},127.0.0.1:1", **options) as client:
            states: list[grpc.ChannelConnectivity] = []
            client._driver.channel.subscribe(states.append)
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline:
                assert client.embed(["It rained."]).shape == (1, 384)
        assert states.count(grpc.ChannelConnectivity.READY) >= 2
        assert check_health(f"127.0.0.1:1,{server.address}", api_key=key) == "serving"


def test_event_loop_is_not_blocked_while_a_stream_waits_for_another_server() -> None:
    """The core waits between the attempts of a stream; the driver does so without a call in progress."""

    async def run() -> float:
        async with AsyncClient("127.0.0.1:1,127.0.0.1:2", max_attempts=3) as client:
            started = time.monotonic()
            streaming = asyncio.ensure_future(all_of(client.encode_stream(["a"])))
            ticks = 0
            while not streaming.done():
                await asyncio.sleep(0.01)
                ticks += 1
            assert "no server answers at 127.0.0.1:1,127.0.0.1:2" in str(streaming.exception())
            assert ticks > 10
            return time.monotonic() - started

    assert asyncio.run(run()) > 0.25  # at least half of 0.2 and 0.4 s
