"""Messages, cancellation and retries of both clients, with a scripted server."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, closing
from typing import Any

import grpc
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client import (
    AsyncClient,
    AttnlensError,
    Client,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from attnlens_client.core.calls import Attempts
from attnlens_server.clients import BULK, PRIORITY
from scripted import ScriptedServer, fails, refuse, vectors

SOON_S = 20.0

Call = Callable[..., Any]


def test_metadata_is_sent_with_every_call(server: ScriptedServer, connect: Call) -> None:
    with connect(server.address, metadata=[("authorization", "Bearer x")]) as call:
        call("embed", ["a", "b"])
    assert [metadata.get("authorization") for metadata in server.metadata] == ["Bearer x"] * 2


def test_key_and_priority_are_sent_with_every_call(server: ScriptedServer, connect: Call) -> None:
    with connect(server.address, api_key="k", priority="bulk", metadata=[("x", "y")]) as call:
        call("embed", ["a", "b"])
    with connect(server.address) as call:
        call("get_model")
    names = ("authorization", PRIORITY, "x")
    sent = [tuple(metadata.get(name) for name in names) for metadata in server.metadata]
    assert sent == [("Bearer k", BULK, "y"), ("Bearer k", BULK, "y"), (None, None, None)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api_key": ""}, "api_key is empty or contains a space"),
        ({"api_key": "a b"}, "api_key is empty or contains a space"),
        ({"api_key": "ü"}, "or is not ASCII: use a key of the server"),
        ({"priority": "high"}, "priority is 'high': use one of interactive, bulk"),
    ],
)
def test_invalid_keys_and_priorities_are_rejected_without_showing_keys(
    options: dict[str, Any], message: str
) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=message):
            kind("localhost:1", **options)


def test_overload_is_retried(server: ScriptedServer, connect: Call) -> None:
    server.embed = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", "full", times=7)
    with connect(server.address, max_attempts=2) as call:
        assert call("embed", ["a"]).shape == (1, 4)
    server.embed = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", "full", times=1)
    with connect(server.address, max_attempts=1) as call, pytest.raises(OverloadedError):
        call("embed", ["a"])


def test_unavailable_server_is_retried_after_it_has_answered_once(
    server: ScriptedServer, connect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Semaphore(0)

    class Noted(Attempts):
        def delay_s(self, error: AttnlensError) -> float:
            waits.release()
            return super().delay_s(error)

    def come_back() -> None:
        assert waits.acquire(timeout=SOON_S)  # gRPC's built-in retries are exhausted
        server.start()

    monkeypatch.setattr("attnlens_client.core.calls.Attempts", Noted)
    with connect(server.address, max_attempts=2) as call:
        call("embed", ["a"])
        server.stop()
        back = threading.Thread(target=come_back)
        back.start()
        assert call("embed", ["a"]).shape == (1, 4)
        back.join()
        server.stop()
    server.start()
    with connect(server.address, max_attempts=1) as call:
        call("embed", ["a"])
        server.stop()
        with pytest.raises(UnavailableError):
            call("embed", ["a"])


def test_server_that_never_answered_is_not_retried(connect: Call) -> None:
    with connect("127.0.0.1:1", max_attempts=2, timeout_s=SOON_S) as call, pytest.raises(UnavailableError):
        call("embed", ["a"])  # not DeadlineExceededError


def test_call_ends_at_its_deadline(server: ScriptedServer, connect: Call) -> None:
    def wait(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        server.wait_until_cancelled(context)
        return vectors(request)

    server.embed = wait
    with (
        connect(server.address, timeout_s=0.3) as call,
        pytest.raises(
            DeadlineExceededError, match=f"no server answered at {server.address} within 0.3 s: start one"
        ),
    ):
        call("embed", ["a"])


def test_failure_cancels_the_other_calls_of_the_method(server: ScriptedServer, connect: Call) -> None:
    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        if request.inputs[0].text == "bad":
            assert all(server.waiting.acquire(timeout=SOON_S) for _ in range(2))
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "it is bad")
        server.wait_until_cancelled(context)
        return vectors(request)

    server.embed = embed
    with connect(server.address, batch_size=1) as call:
        with pytest.raises(InvalidRequestError, match=r"^it is bad"):
            call("embed", ["bad", "good", "good"])
        call("get_model")  # let the event loop run
        assert all(server.cancelled.acquire(timeout=SOON_S) for _ in range(2))


async def test_canceled_task_cancels_its_calls(server: ScriptedServer) -> None:
    def wait(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        server.wait_until_cancelled(context)
        return vectors(request)

    server.embed = wait
    async with AsyncClient(server.address, batch_size=1) as client:
        task = asyncio.create_task(client.embed(["a", "b"]))
        assert await asyncio.to_thread(server.waiting.acquire, timeout=SOON_S)
        assert await asyncio.to_thread(server.waiting.acquire, timeout=SOON_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.cancelled.acquire, timeout=SOON_S)
        assert await asyncio.to_thread(server.cancelled.acquire, timeout=SOON_S)


def _keeping(kept: list[Any], method: Call) -> Call:
    """Wrap `method` to keep its calls alive: garbage collection would cancel them."""

    def start(*args: Any, **options: Any) -> Any:
        kept.append(method(*args, **options))
        return kept[-1]

    return start


def test_closing_a_stream_cancels_its_call(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    server.holds_streams = True
    with Client(server.address) as client:
        monkeypatch.setattr(
            client._driver.stub, "EncodeStream", _keeping(kept, client._driver.stub.EncodeStream)
        )
        with closing(client.encode_stream(["a"])) as stream:
            assert next(stream).num_tokens == 1
        assert server.cancelled.acquire(timeout=SOON_S)
    assert len(kept) == 1


async def test_closing_an_asynchronous_stream_cancels_its_call(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    server.holds_streams = True
    async with AsyncClient(server.address) as client:
        monkeypatch.setattr(
            client._driver.stub, "EncodeStream", _keeping(kept, client._driver.stub.EncodeStream)
        )
        async with aclosing(client.encode_stream(["a"])) as stream:
            assert (await anext(stream)).num_tokens == 1
        assert await asyncio.to_thread(server.cancelled.acquire, timeout=SOON_S)
    assert len(kept) == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_closing_an_asynchronous_client_fails_its_calls_without_canceling_tasks(
    server: ScriptedServer, streams: bool
) -> None:
    def wait(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        server.wait_until_cancelled(context)
        return vectors(request)

    async def all_of(stream: AsyncIterator[Any]) -> list[Any]:
        return [item async for item in stream]

    server.embed = wait
    server.holds_streams = True
    client = AsyncClient(server.address)
    coroutine: Any = all_of(client.encode_stream(["a"])) if streams else client.embed(["a"])
    task = asyncio.create_task(coroutine)
    assert await asyncio.to_thread(server.waiting.acquire, timeout=SOON_S)
    await client.close()
    with pytest.raises(AttnlensError, match="the client was closed"):
        await task
    with pytest.raises(AttnlensError, match="the client was closed"):
        await client.embed(["a"])


def test_closing_a_client_fails_its_calls(server: ScriptedServer) -> None:
    def wait(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        server.wait_until_cancelled(context)
        return vectors(request)

    server.embed = wait
    client = Client(server.address)

    def close() -> None:
        server.waiting.acquire(timeout=SOON_S)
        client.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(AttnlensError, match="the client was closed"):
        client.embed(["a"])
    closer.join()
    with pytest.raises(AttnlensError, match="the client was closed"):
        client.embed(["a"])
    with pytest.raises(AttnlensError, match="the client was closed"):
        next(client.encode_stream(["a"]))


def test_call_canceled_by_the_server_raises_an_error(server: ScriptedServer, connect: Call) -> None:
    server.embed = fails(grpc.StatusCode.CANCELLED, "", "not now")
    with connect(server.address) as call, pytest.raises(AttnlensError, match="not now"):
        call("embed", ["a"])


def test_rejected_call_is_retried_while_others_are_in_flight(server: ScriptedServer, connect: Call) -> None:
    again = threading.Event()
    refused = [False]

    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        if request.inputs[0].text == "oldest":
            assert again.wait(timeout=SOON_S)  # returns once the other call has been retried
        elif not refused[0]:
            refused[0] = True
            refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", "full")
        else:
            again.set()
        return vectors(request)

    server.embed = embed
    with connect(server.address, batch_size=1) as call:
        assert call("embed", ["oldest", "b"])[:, 0].tolist() == [6, 1]
