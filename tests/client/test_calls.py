"""What travels, what ends, and what is tried again: both clients against a scripted server."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
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
    EmbedOptions,
    EncodeOptions,
    HeadPart,
    InputTooLongError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    ServerError,
    SlowReaderError,
    UnavailableError,
)
from attnlens_client.connection import Attempts
from scripted import ScriptedServer, refuse, vectors

SOON_S = 20.0
AT_ONCE = ("grpc-retry-pushback-ms", "1")
NOT_BY_GRPC = ("grpc-retry-pushback-ms", "-1")

Call = Callable[..., Any]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def fails(code: grpc.StatusCode, reason: str, message: str, times: int = 1) -> Call:
    """Return an Embed that fails so many times first, and lets gRPC try again at once."""
    left = [times]

    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        left[0] -= 1
        if left[0] >= 0:
            refuse(context, code, reason, message, AT_ONCE)
        return vectors(request)

    return embed


def test_metadata_goes_with_every_call(server: ScriptedServer, connect: Call) -> None:
    with connect(server.address, metadata=[("authorization", "Bearer x")]) as call:
        call("embed", ["a", "b"])
    assert [each.get("authorization") for each in server.metadata] == ["Bearer x"] * 2


def test_an_overloaded_server_is_asked_again_beyond_grpcs_own_attempts(
    server: ScriptedServer, connect: Call
) -> None:
    server.embed = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", "full", times=7)
    with connect(server.address, max_attempts=2) as call:
        assert call("embed", ["a"]).shape == (1, 4)
    server.embed = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", "full", times=1)
    with connect(server.address, max_attempts=1) as call, pytest.raises(OverloadedError):
        call("embed", ["a"])


def test_a_server_that_goes_away_is_awaited_once_it_has_answered(
    server: ScriptedServer, connect: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Semaphore(0)

    class Noted(Attempts):
        def delay_s(self, error: AttnlensError) -> float:
            waits.release()
            return super().delay_s(error)

    def come_back() -> None:
        assert waits.acquire(timeout=SOON_S)  # gRPC's own attempts are over
        server.start()

    monkeypatch.setattr("attnlens_client.connection.Attempts", Noted)
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


def test_a_server_that_never_was_there_is_not_awaited(connect: Call) -> None:
    with connect("127.0.0.1:1", max_attempts=2, timeout_s=SOON_S) as call, pytest.raises(UnavailableError):
        call("embed", ["a"])  # not DeadlineExceededError


def test_a_call_ends_at_its_deadline(server: ScriptedServer, connect: Call) -> None:
    def wait(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        server.wait_until_cancelled(context)
        return vectors(request)

    server.embed = wait
    with connect(server.address, timeout_s=0.3) as call:
        with pytest.raises(
            DeadlineExceededError, match=f"no server answered at {server.address} within 0.3 s: start one"
        ):
            call("embed", ["a"])
        call("__setattr__", "timeout_s", SOON_S)
        call("get_model")
        call("__setattr__", "timeout_s", 0.3)
        with pytest.raises(
            DeadlineExceededError, match=f"a call to {server.address} took more than 0.3 s: give a larger"
        ):
            call("embed", ["a"])


def test_a_failure_cancels_the_other_calls_of_the_method(server: ScriptedServer, connect: Call) -> None:
    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        if request.inputs[0].text == "bad":
            assert all(server.waiting.acquire(timeout=SOON_S) for _ in range(2))
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "inputs[0].text is bad")
        server.wait_until_cancelled(context)
        return vectors(request)

    server.embed = embed
    with connect(server.address, batch_size=1) as call:
        with pytest.raises(InvalidRequestError, match=r"^texts\[0\]\.text is bad"):
            call("embed", ["bad", "good", "good"])
        call("get_model")  # the asynchronous client has its turn
        assert all(server.cancelled.acquire(timeout=SOON_S) for _ in range(2))


async def test_a_cancelled_task_cancels_its_calls(server: ScriptedServer) -> None:
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
    """Return `method`, its calls kept in a list: the garbage collector must not cancel them."""

    def start(*args: Any, **options: Any) -> Any:
        kept.append(method(*args, **options))
        return kept[-1]

    return start


def test_leaving_a_stream_cancels_its_call(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    server.holds_streams = True
    with Client(server.address) as client:
        monkeypatch.setattr(client._stub, "EncodeStream", _keeping(kept, client._stub.EncodeStream))
        with closing(client.stream(["a"], attentions=False)) as stream:
            assert next(stream).num_tokens == 1
        assert server.cancelled.acquire(timeout=SOON_S)
    assert len(kept) == 1


async def test_leaving_an_asynchronous_stream_cancels_its_call(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    server.holds_streams = True
    async with AsyncClient(server.address) as client:
        monkeypatch.setattr(client._stub, "EncodeStream", _keeping(kept, client._stub.EncodeStream))
        async with aclosing(client.stream(["a"], attentions=False)) as stream:
            assert (await anext(stream)).num_tokens == 1
        assert await asyncio.to_thread(server.cancelled.acquire, timeout=SOON_S)
    assert len(kept) == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_closing_an_asynchronous_client_fails_its_calls_and_cancels_no_task(
    server: ScriptedServer, streams: bool
) -> None:
    def wait(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        server.wait_until_cancelled(context)
        return vectors(request)

    async def all_of(stream: AsyncIterator[Any]) -> list[Any]:
        return [each async for each in stream]

    server.embed = wait
    server.holds_streams = True
    client = AsyncClient(server.address)
    coroutine: Any = all_of(client.stream(["a"])) if streams else client.embed(["a"])
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
        next(client.stream(["a"], attentions=False))


def test_a_call_that_the_server_cancels_is_a_failure(server: ScriptedServer, connect: Call) -> None:
    server.embed = fails(grpc.StatusCode.CANCELLED, "", "not now")
    with connect(server.address) as call, pytest.raises(AttnlensError, match="not now"):
        call("embed", ["a"])


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.ABORTED, "SLOW_READER", SlowReaderError),
        (grpc.StatusCode.FAILED_PRECONDITION, "GRAPH_UNAVAILABLE", ServerError),
        (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST", InvalidRequestError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", DeadlineExceededError),
    ],
)
def test_a_reason_has_its_exception(
    server: ScriptedServer, code: grpc.StatusCode, reason: str, kind: type[AttnlensError]
) -> None:
    server.embed = fails(code, reason, "so it is")
    with Client(server.address) as client, pytest.raises(kind, match="so it is") as caught:
        client.embed(["a"])
    assert (caught.value.reason, caught.value.code) == (reason, code)


def test_words_of_the_request_are_not_taken_for_the_number_of_a_text(server: ScriptedServer) -> None:
    message = "no model 'encode.inputs[41]': there is 'scripted'"
    server.embed = fails(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", message)
    with Client(server.address) as client, pytest.raises(ModelNotFoundError) as caught:
        client.embed(["a"])
    assert (caught.value.text_index, str(caught.value)) == (None, message)


def test_a_text_over_the_servers_limit_is_refused_before_it_is_sent(connect: Call) -> None:
    large = "é" * 40_000
    with ScriptedServer(max_text_bytes=1000) as server, connect(server.address) as call:
        for texts, size in ((["a", "b" * 1001], 1001), (["a", large], 80_000)):
            with pytest.raises(
                InvalidRequestError, match=rf"^texts\[1\] has {size} bytes, .* 1000"
            ) as caught:
                call("embed", texts)
            assert caught.value.text_index == 1
        for method in ("embed", "encode", "tokenize"):  # one large text alone
            with pytest.raises(InvalidRequestError, match=r"^texts\[0\] has 80000 bytes"):
                call(method, [large])
        assert {type(each) for each in server.requests} == {pb.GetModelRequest}
        assert call("embed", ["b" * 1000]).shape == (1, 4)
    with ScriptedServer(max_text_bytes=1000) as server, connect(server.address) as call:
        with pytest.raises(InvalidRequestError, match=r"^texts\[0\] has 80000 bytes"):
            call("embed", [large])
        assert call("embed", ["b"]).shape == (1, 4)  # a short text needs no other call
        assert [type(each) for each in server.requests] == [pb.GetModelRequest, pb.EmbedRequest]


def test_a_request_has_no_more_text_than_the_server_takes(connect: Call) -> None:
    with ScriptedServer(max_request_text_bytes=10) as server, connect(server.address) as call:
        assert call("embed", ["éé", "12345", "1", "2", "123456789", "", "1"])[:, 0].tolist() == [
            2, 5, 1, 1, 9, 0, 1,
        ]  # fmt: skip
        sizes = [
            sum(len(text.text.encode()) for text in each.inputs)
            for each in server.requests
            if isinstance(each, pb.EmbedRequest)
        ]
        assert sorted(sizes) == [1, 10, 10]
        assert len(call("tokenize", ["12345"] * 5)) == 5
        assert sum(isinstance(each, pb.TokenizeRequest) for each in server.requests) == 3


def test_more_dimensions_than_there_are_fail_for_no_texts_as_for_some(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        with pytest.raises(InvalidRequestError, match="dimensions is 5: scripted has 4"):
            client.embed([], dimensions=5)
        assert client.embed([], dimensions=4).shape == (0, 4)


def test_control_characters_of_a_message_are_escaped(server: ScriptedServer, connect: Call) -> None:
    server.embed = fails(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "inputs[0] \x1b[2J\u009b \u202e")
    with connect(server.address) as call, pytest.raises(InvalidRequestError) as caught:
        call("embed", ["a"])
    assert str(caught.value) == r"texts[0] \x1b[2J\x9b \u202e"


@pytest.mark.parametrize("number", ["12345678901", "9" * 5000])
def test_a_number_that_no_text_has_is_not_read(server: ScriptedServer, connect: Call, number: str) -> None:
    server.embed = fails(grpc.StatusCode.INVALID_ARGUMENT, "INPUT_TOO_LONG", f"inputs[{number}] is bad")
    with connect(server.address) as call, pytest.raises(InputTooLongError) as caught:
        call("embed", ["a"])
    assert caught.value.text_index is None
    assert InputTooLongError("", metadata={"num_tokens": number * 3}).num_tokens == 0


def test_a_refused_call_is_made_again_while_others_still_run(server: ScriptedServer, connect: Call) -> None:
    again = threading.Event()
    refused = [False]

    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        if request.inputs[0].text == "oldest":
            assert again.wait(timeout=SOON_S)  # ends once the other call came a second time
        elif not refused[0]:
            refused[0] = True
            refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", "full", NOT_BY_GRPC)
        else:
            again.set()
        return vectors(request)

    server.embed = embed
    with connect(server.address, batch_size=1) as call:
        assert call("embed", ["oldest", "b"])[:, 0].tolist() == [6, 1]


def _kinds(server: ScriptedServer) -> list[type[Any]]:
    kinds = [type(each) for each in server.requests]
    server.requests.clear()
    return kinds


def test_the_limits_are_asked_for_once(server: ScriptedServer, connect: Call) -> None:
    with connect(server.address) as call:
        for _ in range(3):
            call("embed", ["a", "b"])
    assert _kinds(server) == [pb.GetModelRequest, *[pb.EmbedRequest] * 3]


def test_other_limits_at_the_same_address_are_asked_for_when_they_matter(
    server: ScriptedServer, connect: Call
) -> None:
    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        most = server.limits["max_inputs_per_request"]
        if len(request.inputs) > most:
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", f"inputs has more than {most}")
        return vectors(request)

    server.embed = embed
    server.limits |= {"max_inputs_per_request": 4, "max_text_bytes": 10}
    with connect(server.address) as call:
        call("embed", ["a"] * 4)
        server.limits["max_inputs_per_request"] = 2
        assert call("embed", ["a"] * 4).shape == (4, 4)  # the server refused the call of 4
        _kinds(server)
        assert call("embed", ["a"] * 4).shape == (4, 4)
        assert _kinds(server) == [pb.EmbedRequest] * 2
        server.limits["max_text_bytes"] = 20
        assert call("embed", ["a" * 15, "b"]).shape == (2, 4)  # the client would have refused it
        with pytest.raises(InvalidRequestError, match="has 30 bytes, a text may have 20"):
            call("embed", ["a" * 30, "b"])


def test_another_model_at_the_same_address_has_its_own_limits_and_width(
    server: ScriptedServer, connect: Call
) -> None:
    with connect(server.address) as call:
        assert call("embed", ["a", "b"]).shape == (2, 4)
        server.model.name, server.model.embedding_size = "other", 7
        assert call("embed", []).shape == (0, 7)
        server.model.name = "third"
        server.change = lambda reply: (
            setattr(reply, "model", "third") if isinstance(reply, pb.EmbedResponse) else None
        )
        call("embed", ["a", "b"])
        _kinds(server)
        call("embed", ["a", "b"])
        assert _kinds(server) == [pb.GetModelRequest, pb.EmbedRequest]


def test_a_server_that_was_away_is_asked_for_its_limits_again(server: ScriptedServer, connect: Call) -> None:
    with connect(server.address, max_attempts=1) as call:
        call("embed", ["a", "b"])
        server.embed = fails(grpc.StatusCode.UNAVAILABLE, "", "away")
        with pytest.raises(UnavailableError):
            call("embed", ["a", "b"])
        _kinds(server)
        call("embed", ["a", "b"])
        assert _kinds(server) == [pb.GetModelRequest, pb.EmbedRequest]


def test_a_stream_asks_for_the_limits_and_needs_no_number_of_layers(
    server: ScriptedServer, connect: Call
) -> None:
    with connect(server.address) as call:
        for _ in range(2):
            assert [text.layers for text in call("stream", ["a", "b"])] == [(0, 1)] * 2
        assert _kinds(server) == [pb.GetModelRequest, pb.EncodeStreamRequest] * 2
        assert [text.layers for text in call("stream", ["a"])] == [(0, 1)]
        assert _kinds(server) == [pb.EncodeStreamRequest]
        heads = [part.num_layers for part in call("stream_parts", ["a", "b"]) if isinstance(part, HeadPart)]
        assert heads == [2, 2]


@pytest.mark.parametrize(
    "method", ["embed", "embed_with_usage", "encode", "stream", "stream_parts", "tokenize"]
)
def test_the_clients_have_the_same_explicit_arguments(method: str) -> None:
    of_sync, of_async = (
        inspect.signature(getattr(kind, method)).parameters for kind in (Client, AsyncClient)
    )
    assert of_sync == of_async
    [_, texts, *options] = of_sync.values()
    assert texts.name == "texts"
    assert {each.kind for each in options} == {inspect.Parameter.KEYWORD_ONLY}
    expected = {"tokenize": {"model"}}.get(
        method, set((EmbedOptions if "embed" in method else EncodeOptions).__annotations__)
    )
    assert {each.name for each in options} == expected


def test_a_misspelt_argument_names_the_public_method(connect: Call) -> None:
    with connect("127.0.0.1:1") as call, pytest.raises(TypeError, match=r"Client\.embed\(\) .* 'poling'"):
        call("embed", ["a"], poling="cls")
