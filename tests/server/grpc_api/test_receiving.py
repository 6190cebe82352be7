"""Requests whose messages arrive slowly or never, from clients with and without a key."""

import asyncio
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_server import descriptors
from attnlens_server.clients import Client
from attnlens_server.config import ServerConfig
from attnlens_server.core.admission import Admission
from attnlens_server.core.execution import Workers
from attnlens_server.errors import (
    DeadlineError,
    MalformedRequestError,
    OverloadedError,
    StartupError,
    UnauthenticatedError,
)
from attnlens_server.grpc_api.calls import Calls, Parser
from attnlens_server.grpc_api.health import HealthService
from attnlens_server.grpc_api.methods import SERVICE_NAME
from attnlens_server.grpc_api.open_streams import OpenStreams
from attnlens_server.grpc_api.receiving import (
    BRIEF_TIMEOUT_S,
    MAX_BRIEF,
    MAX_BRIEF_WAITING,
    BriefReceiver,
    Receiver,
)
from attnlens_server.observing.observer import Observer
from attnlens_server.server import _channel_options
from bench.studies.raw_http2 import RawClient, Reply, method

CONFIG = ServerConfig(bundle=Path())
DEADLINE_EXCEEDED, UNAUTHENTICATED, OK = 4, 16, 0
MIB = 1 << 20
CHECK = "/grpc.health.v1.Health/Check"


class Upload:
    """A call whose message arrives when `arrive` is set."""

    def __init__(self, message: Any = b"message") -> None:
        self.message = message
        self.has_begun = asyncio.Event()
        self.arrive = asyncio.Event()

    async def read(self) -> Any:
        self.has_begun.set()
        await self.arrive.wait()
        return self.message


def receive(receiver: Receiver, upload: Upload, name: str = "a") -> "asyncio.Task[bytes]":
    context: Any = upload
    return asyncio.create_task(receiver.receive(context, Client(name), pb.EmbedRequest))


async def test_messages_arrive_one_after_another_if_there_are_too_many() -> None:
    receiver = Receiver(1, 60)
    first, second = Upload(), Upload()
    tasks = receive(receiver, first), receive(receiver, second)
    await first.has_begun.wait()
    assert not second.has_begun.is_set()
    first.arrive.set()
    await second.has_begun.wait()
    second.arrive.set()
    assert [await task for task in tasks] == [b"message"] * 2
    assert receiver.pool.used == 0


async def test_one_client_leaves_room_for_the_messages_of_others() -> None:
    receiver = Receiver(6, 60)
    stalled = [Upload() for _ in range(50)]
    tasks = [receive(receiver, upload) for upload in stalled]
    await asyncio.sleep(0)
    assert sum(upload.has_begun.is_set() for upload in stalled) == 4  # two thirds
    for _ in range(3):
        other = Upload()
        other.arrive.set()
        assert await receive(receiver, other, "b") == b"message"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert receiver.pool.used == 0


async def test_cancelled_call_gives_its_turn_to_the_next_one() -> None:
    receiver = Receiver(1, 60)
    uploads = [Upload() for _ in range(3)]
    tasks = [receive(receiver, upload) for upload in uploads]
    await uploads[0].has_begun.wait()
    uploads[0].arrive.set()
    await tasks[0]
    tasks[1].cancel()  # when it was woken
    await uploads[2].has_begun.wait()
    uploads[2].arrive.set()
    assert await tasks[2] == b"message"


async def test_message_that_does_not_arrive_is_a_missed_deadline() -> None:
    receiver = Receiver(1, 0.05)
    with pytest.raises(DeadlineError, match=r"not received within 0\.05 s: send it faster"):
        await receive(receiver, Upload())
    ended = Upload(grpc.aio.EOF)
    ended.arrive.set()
    with pytest.raises(MalformedRequestError, match=r"of 0 bytes is not a valid attnlens\.v1\.EmbedRequest"):
        await receive(receiver, ended)


async def test_stalled_health_checks_make_way_for_new_ones() -> None:
    receiver = BriefReceiver()

    def begin(upload: Upload) -> "asyncio.Task[bytes]":
        context: Any = upload
        return asyncio.create_task(receiver.receive(context, health_pb2.HealthCheckRequest))

    stalled = [begin(Upload()) for _ in range(200)]
    new = Upload()
    new.arrive.set()
    async with asyncio.timeout(BRIEF_TIMEOUT_S / 2):
        assert await begin(new) == b"message"
    ended, open_ = await asyncio.wait(stalled, timeout=BRIEF_TIMEOUT_S / 2)
    assert len(open_) <= MAX_BRIEF
    counts = Counter(type(task.exception()) for task in ended)
    assert counts.keys() == {OverloadedError, DeadlineError}
    assert counts[DeadlineError] <= MAX_BRIEF_WAITING
    for task in open_:
        task.cancel()


class Server:
    """A gRPC server with the channel options of `attnlens serve`, which accepts the key `key`."""

    def __init__(self) -> None:
        admission = Admission(max_texts=1, max_bytes=MIB, retry_after_s=lambda _: 1.0, max_calls=4096)
        self.calls = Calls(admission, lambda: None, Workers(1), stall_timeout_s=60, observer=Observer())
        self.calls.identify = self.identify
        self.num_received = 0

    def identify(self, context: Any, name: str) -> Client:
        del name
        if ("authorization", "key") not in context.invocation_metadata():
            raise UnauthenticatedError("the key is missing: send one")
        return Client("known", is_identified=True)

    async def start(self) -> tuple[grpc.aio.Server, str]:
        async def embed(request: Any, call: Any) -> bytes:
            del request, call
            self.num_received += 1
            return b"reply"

        parser: Any = Parser(pb.EmbedRequest, lambda request: request, frozenset(), 1)
        handle: Any = self.calls.handler(parser, embed, "Embed")
        server = grpc.aio.server(options=_channel_options(CONFIG), maximum_concurrent_rpcs=64)
        handlers: Any = {"Embed": grpc.stream_unary_rpc_method_handler(handle)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
        health = HealthService([], OpenStreams(16))
        health.add_to(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await health.set_serving()
        return server, f"127.0.0.1:{port}"


@pytest.fixture
async def served() -> AsyncIterator[tuple[Server, str]]:
    server = Server()
    started, address = await server.start()
    yield server, address
    await started.stop(None)


def unfinished(client: RawClient, path: str, count: int) -> list[Reply]:
    return [client.call(path, b"", announced_bytes=1000) for _ in range(count)]


def wait_until_few_are_open(client: RawClient, calls: list[Reply]) -> None:
    end = time.monotonic() + 20
    while sum(not call.ended for call in calls) > MAX_BRIEF + MAX_BRIEF_WAITING:
        client._receive(end)


async def test_key_is_checked_before_the_message_arrives(served: tuple[Server, str]) -> None:
    server, address = served
    with RawClient(address) as client:
        replies = unfinished(client, method("Embed"), 1)
        await asyncio.to_thread(client.wait_for_ends, replies, 20)
    assert (replies[0].status, replies[0].reason) == (UNAUTHENTICATED, "UNAUTHENTICATED")
    assert server.num_received == 0


async def test_unfinished_calls_without_a_key_fill_neither_calls_nor_health(
    served: tuple[Server, str],
) -> None:
    server, address = served
    with ExitStack() as stack:
        for path in (method("Embed"), CHECK):
            client = stack.enter_context(RawClient(address))
            # More than the server runs at a time. It has begun all that it did not refuse.
            calls = await asyncio.to_thread(unfinished, client, path, 100)
            await asyncio.to_thread(wait_until_few_are_open, client, calls)
        async with grpc.aio.insecure_channel(address) as channel:
            embed: Any = channel.unary_unary(method("Embed"))
            while server.num_received < 3:
                await embed(b"", metadata=[("authorization", "key")], timeout=20)
            check: Any = channel.unary_unary(CHECK)
            await check(b"", timeout=20)


async def test_unread_messages_are_not_accepted(served: tuple[Server, str]) -> None:
    """gRPC would otherwise buffer megabytes of each call, whether its message is read or not."""
    server, address = served
    server.calls.receiver = Receiver(1, 60)

    def sent_bytes(client: RawClient) -> int:
        """Return how much of two messages the server accepts, after it has begun to read the first one."""
        http2 = client._http2
        headers = [("authorization", "key")]
        for _ in range(2):
            client.call(method("Embed"), b"", headers=headers, announced_bytes=4 * MIB)
        sent = 0
        while sent < 4 * MIB:
            size = min(http2.local_flow_control_window(3), http2.max_outbound_frame_size)
            if size <= 0:
                try:
                    client._receive(time.monotonic() + 0.5)
                except TimeoutError:
                    break
                continue
            http2.send_data(3, bytes(size))
            client._flush()
            sent += size
        return sent

    with RawClient(address) as client:
        assert await asyncio.to_thread(sent_bytes, client) < 256 << 10


@contextmanager
def soft_limit(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> Iterator[list[tuple[int, int]]]:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    yield limits


def test_open_files_suffice_for_all_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServerConfig(bundle=Path(), http_port=0)
    with soft_limit(monkeypatch, 1024, 1 << 20) as limits:
        descriptors.reserve_descriptors(config)
        assert limits[-1][0] >= config.max_connections + descriptors.MAX_GRPC_CONNECTIONS
        assert dict(_channel_options(config))["grpc.max_allowed_incoming_connections"] == 4096
    assert not caplog.records
    with soft_limit(monkeypatch, 256, 1024):
        descriptors.reserve_descriptors(config)
        num_grpc = descriptors.grpc_connections(config)
        assert 0 < num_grpc < 1024 - config.max_connections
    assert f"at most {num_grpc} gRPC connections" in caplog.text
    many = ServerConfig(bundle=Path(), http_port=0, max_connections=1000)
    with (
        soft_limit(monkeypatch, 256, 1024),
        pytest.raises(StartupError, match="max_connections is 1000, but"),
    ):
        descriptors.reserve_descriptors(many)


async def test_silent_grpc_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "MAX_GRPC_CONNECTIONS", 3)
    started, address = await Server().start()
    host, port = address.split(":")
    streams = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
    async with asyncio.timeout(20):
        first = [await reader.read(1) for reader, _ in streams]
    assert first == [b"\0"] * 3 + [b""]  # the first byte of SETTINGS, or a closed connection
    for _, writer in streams:
        writer.close()
    await started.stop(None)
