"""Retries against late and overloaded servers, and the options that configure them."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlens.bundle import read_manifest
from attnlens_client import AsyncClient, AttentionQuery, Client
from attnlens_client.connection import grpc_options, service_config
from served import ServerProcess

Call = Callable[..., Any]


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the peer has closed the connection


@contextmanager
def forwarded(listener: socket.socket, address: str) -> Iterator[None]:
    """Forward bytes from `listener` to `address`."""
    host, port = address.split(":")
    sockets: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                incoming, _ = listener.accept()
            except OSError:
                return
            outgoing = socket.create_connection((host, int(port)))
            sockets.extend((incoming, outgoing))
            for pair in ((incoming, outgoing), (outgoing, incoming)):
                threading.Thread(target=_copy, args=pair, daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for opened in sockets:
            opened.close()


@pytest.mark.parametrize("wait_for_ready", [False, True])
def test_client_connects_to_a_server_that_starts_late(
    minilm_server: ServerProcess, wait_for_ready: bool
) -> None:
    with socket.socket() as listener, ThreadPoolExecutor(1) as threads:
        listener.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with Client(address, wait_for_ready=wait_for_ready) as client:
            waiting = threads.submit(client.embed, ["It rained."])
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.3)
            listener.listen()
            with forwarded(listener, minilm_server.address):
                assert waiting.result(timeout=30).shape == (1, 384)
                client.close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_many_clients_of_a_small_queue_all_succeed(
    minilm_bundle: Path,
    minilm_server: ServerProcess,
    passages: list[str],
    kind: type[Client | AsyncClient],
) -> None:
    texts = passages[:16]  # two requests per client
    with Client(minilm_server.address) as client:
        expected = client.embed(texts, truncate=True)

    async def embed_all_async() -> Any:
        async with AsyncClient(server.address) as client:
            return await client.embed(texts, truncate=True)

    def embed_all(_: int) -> float:
        if kind is AsyncClient:
            vectors = asyncio.run(embed_all_async())
        else:
            with Client(server.address) as client:
                vectors = client.embed(texts, truncate=True)
        return float(np.abs(vectors - expected).max())

    limits = ("--max-concurrent-inputs", "8", "--max-inputs-per-request", "8")
    with ServerProcess(minilm_bundle, *limits) as server, ThreadPoolExecutor(4) as threads:
        assert max(threads.map(embed_all, range(4))) <= 1e-5


def test_service_config_retries_transient_failures_of_all_methods_but_streams() -> None:
    method, stream = service_config(5, wait_for_ready=False)["methodConfig"]
    assert method["name"] == [{"service": "attnlens.v1.EncoderService"}]
    assert stream["name"] == [{"service": "attnlens.v1.EncoderService", "method": "EncodeStream"}]
    assert method["waitForReady"] is stream["waitForReady"] is False
    assert method["retryPolicy"]["maxAttempts"] == 5
    assert method["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    assert "retryPolicy" not in stream
    method, stream = service_config(1, wait_for_ready=True)["methodConfig"]
    assert "retryPolicy" not in method
    assert method["waitForReady"] is stream["waitForReady"] is True


def test_channel_options_of_the_caller_take_precedence() -> None:
    with (
        Client("127.0.0.1:1") as plain,
        Client("127.0.0.1:1", channel_options=[("grpc.keepalive_time_ms", 1234)]) as client,
    ):
        options = dict(grpc_options(client))
        assert options["grpc.keepalive_time_ms"] == 1234
        assert options["grpc.max_receive_message_length"] == -1
        assert json.loads(options["grpc.service_config"])["retryThrottling"]["maxTokens"] == 1000
        assert dict(grpc_options(plain))["grpc.keepalive_time_ms"] > 300_000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_s", 0),
        ("timeout_s", -1),
        ("timeout_s", float("nan")),
        ("timeout_s", float("inf")),
        ("timeout_s", 1e12),
        ("batch_size", 0),
        ("max_in_flight", 0),
        ("max_attempts", 0),
        ("max_attempts", 6),
        ("max_attempts", 2.5),
    ],
)
def test_out_of_range_options_are_rejected(name: str, value: float) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{name} is {value}: use"):
        Client("127.0.0.1:1", **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "address",
    ["", "localhost", ":50051", "localhost:", "localhost:0", "localhost:65536", "localhost:115587",
     "localhost:http", "http://localhost:50051", "localhost:50051/x", "user@localhost:50051", "::1:50051",
     "local host:50051", "localhost:50051\n", "\udcff:50051", "unix:", "a:1,", ",a:1", "a:1,b", "a:1;b:2",
     "a:1, b:2", "a:1,b:65536", "a:1,unix:/tmp/x.sock", "a:1,dns:b:2"],
)  # fmt: skip
def test_address_without_host_or_port_is_rejected(address: str) -> None:
    with pytest.raises(ValueError, match="use HOST:PORT with a port from 1 to 65535"):
        Client(address)


def test_socket_path_that_is_too_long_is_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"address has a path of 108 bytes.* use a relative or a shorter path"
    ):
        Client("unix:/" + 107 * "l")


@pytest.mark.parametrize(
    "address",
    ["localhost:1", "encoder_1.internal:65535", "[::1]:50051", "[fe80::1%eth0]:50051", "unix:/tmp/x.sock",
     "unix:///tmp/x.sock", "a:1,b:2,[::1]:3", "dns:///localhost:50051",
     "dns:50051", "ipv6:[::1]:50051", "ipv4:127.0.0.1:50051"],
)  # fmt: skip
def test_address_can_be_any_grpc_target(address: str) -> None:
    with Client(address) as client:
        assert client.address == address


def test_client_uses_a_new_bundle_at_the_same_address(
    minilm_bundle: Path, small_bundle: Callable[[str], Path], connect: Call
) -> None:
    other = small_bundle("wordpiece")
    sizes = read_manifest(other).architecture
    assert (sizes.num_layers, sizes.hidden_size) != (6, 384)
    with ServerProcess(minilm_bundle) as server, connect(server.address) as call:
        assert call("embed", ["a", "b"]).shape == (2, 384)
        every_layer = AttentionQuery()
        assert len(call("encode_stream", ["a", "b"], attention=every_layer)[1].weights) == 6
        server.stop()
        with ServerProcess(other, "--port", server.address.rpartition(":")[2]):
            assert call("embed", []).shape == (0, sizes.hidden_size)
            assert call("embed", ["a", "b"]).shape == (2, sizes.hidden_size)
            for method, texts in (
                ("encode_stream", ["a", "b"]),
                ("encode_stream", ["a"]),
                ("encode", ["a", "b"]),
            ):
                for text in call(method, texts, attention=every_layer):
                    assert text.attention[0].layers == tuple(range(sizes.num_layers))
