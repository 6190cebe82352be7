"""Malformed requests to the standard gRPC services: health and reflection."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from attnlens_server.grpc_api.health import HealthService
from attnlens_server.grpc_api.open_streams import OpenStreams
from attnlens_server.grpc_api.reflection import add_reflection
from failures import read_failure

METHODS = [
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server that offers only these services."""
    server = grpc.aio.server()
    streams = OpenStreams(3)
    HealthService([], streams).add_to(server)
    add_reflection(server, [], streams)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


@pytest.mark.parametrize("path", METHODS)
@pytest.mark.parametrize("data", [b"\xff" * 11, b"\x12\x7f", b"\x0b"])
async def test_malformed_request_is_an_invalid_argument(
    channel: grpc.aio.Channel, path: str, data: bytes
) -> None:
    call: Any = channel.stream_stream(path)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(call(iter([data]))))
    failure = read_failure(caught.value)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST")
    assert "class" not in failure.message


async def test_megabyte_long_name_is_not_quoted_in_full(channel: grpc.aio.Channel) -> None:
    call: Any = channel.unary_unary(METHODS[0])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\x0a\x80\x80\x40" + b"x" * (1 << 20))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("path", METHODS[1:])
async def test_open_streams_are_limited_and_health_is_still_checked(
    channel: grpc.aio.Channel, path: str
) -> None:
    call: Any = channel.stream_stream(path)
    check: Any = channel.unary_unary(METHODS[0])
    streams = []

    async def requests() -> AsyncIterator[bytes]:
        yield b"" if "health" in path else b"\x3a\x00"
        await asyncio.Event().wait()

    async def failure() -> tuple[Any, ...] | None:
        """Open a stream and return why it was refused, or None if it was answered."""
        streams.append(call(requests()))
        try:
            assert await anext(aiter(streams[-1]))
        except grpc.aio.AioRpcError as error:
            found = read_failure(error)
            return found.code, found.reason
        return None

    refused = grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"
    # One client may hold at most two thirds.
    assert [await failure() for _ in range(4)] == [None, None, refused, refused]
    assert (await check(b"")) is not None
    streams[0].cancel()
    while await failure():  # until the server has noticed
        await asyncio.sleep(0.01)
