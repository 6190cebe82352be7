"""Malformed requests to the standard gRPC services: health and reflection."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from attnlens_server.grpc_api.health import HealthService
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
    HealthService([]).add_to(server)
    add_reflection(server, [])
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
