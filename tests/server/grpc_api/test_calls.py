"""Parsing and limits of request bytes; cancelled calls and slow consumers."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import grpc
import pytest
from google.protobuf.message import Message

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.wire import start_field
from attnlens_client.core.events import Event, Failed, Reply, Start
from attnlens_server.core.admission import Admission
from attnlens_server.core.execution import Workers
from attnlens_server.errors import InvalidFieldsError, MalformedRequestError
from attnlens_server.grpc_api import calls as calls_module
from attnlens_server.grpc_api.calls import SMALL_BYTES, Call, Calls, Parser, remember_creators
from attnlens_server.grpc_api.methods import SERVICE_NAME
from attnlens_server.in_process.call import CallError, LocalCall
from attnlens_server.observing.observer import Observer
from bench.studies.raw_http2 import RawClient, method

ABORTED = grpc.StatusCode.ABORTED.value[0]
INPUTS = pb.EmbedRequest.INPUTS_FIELD_NUMBER
AnyRequest = TypeVar("AnyRequest", bound=Message)


def parser_of(
    message_class: type[AnyRequest], max_texts: int, inputs_number: int | None = INPUTS
) -> Parser[AnyRequest, AnyRequest]:
    """A parser that returns the request unchanged."""
    numbers = frozenset() if inputs_number is None else frozenset({inputs_number})
    return Parser(message_class, lambda request: request, numbers, max_texts)


def test_documents_and_pairs_are_counted_together() -> None:
    parser = parser_of(pb.ScoreRequest, 512)
    parser = replace(parser, inputs_numbers=frozenset({3, 4}))
    pairs = [pb.TextPair(first="a", second="b")] * 500
    many = pb.ScoreRequest(query="a", documents=["b" * 500] * 500, pairs=pairs)
    with pytest.raises(InvalidFieldsError, match="pairs has more than 512 texts"):
        parser.parse(many.SerializeToString())


def test_message_with_millions_of_texts_is_rejected_early() -> None:
    parser = parser_of(pb.EmbedRequest, 512)
    broken_behind = (
        b"\x12\x00" * 2000 + b"\xff" * SMALL_BYTES
    )  # a complete parse would report an invalid message
    with pytest.raises(InvalidFieldsError, match="inputs has more than 512 texts") as caught:
        parser.parse(broken_behind)
    assert caught.value.violations[0].field == "inputs"


def test_request_with_the_maximum_number_of_texts_is_parsed() -> None:
    parser = parser_of(pb.EncodeStreamRequest, 3)
    request = pb.EncodeStreamRequest(inputs=[pb.Input(text="x" * SMALL_BYTES)] * 3)
    assert parser.parse(request.SerializeToString()) == request
    request.inputs.add(text="one too many")
    with pytest.raises(InvalidFieldsError) as caught:
        parser.parse(request.SerializeToString())
    assert caught.value.violations[0].field == "inputs"


def test_small_message_is_left_to_the_exact_checks() -> None:
    request = pb.EmbedRequest(inputs=[pb.Input(text="a")] * 5)
    assert parser_of(pb.EmbedRequest, 3).parse(request.SerializeToString()) == request


@pytest.mark.parametrize("data", [b"\xff" * 11, b"\x12\x7f", b"\x0b", b"\x0b" + bytes(SMALL_BYTES)])
def test_undecodable_message_is_reported_with_its_size(data: bytes) -> None:
    with pytest.raises(
        MalformedRequestError,
        match=f"the request of {len(data)} bytes is not a valid attnlens.v1.EmbedRequest",
    ):
        parser_of(pb.EmbedRequest, 3).parse(data)


@pytest.mark.parametrize(
    "field",
    [b"\x18\x01", b"\x32\x00"],
    ids=["truncate", "an empty query"],
)
def test_scan_of_endless_fields_stops_early(field: bytes) -> None:
    broken_behind = field * 40_000 + b"\xff" * 11
    with pytest.raises(InvalidFieldsError, match="inputs and more than 1024 other fields are set"):
        parser_of(pb.EncodeRequest, 512).parse(broken_behind)


def wrapped(number: int, content: bytes) -> bytes:
    """Encode a length-delimited field."""
    return start_field(number, len(content)) + content


SWITCHED = b"\x12\x00\x1a\x00" * (1 << 16)  # text_pair {} and token_ids {}, alternating
REDUCTION = pb.AttentionQuery.REDUCTION_FIELD_NUMBER
FORMS = wrapped(REDUCTION, b"\x3a\x00\x42\x00" * (1 << 16))


@pytest.mark.parametrize(
    ("message_class", "inputs_number", "data"),
    [
        (pb.EmbedRequest, INPUTS, wrapped(INPUTS, SWITCHED)),
        (pb.CompareRequest, 2, wrapped(2, wrapped(1, SWITCHED))),
        (pb.ExplainRequest, 2, wrapped(9, SWITCHED)),
        (pb.EncodeRequest, INPUTS, wrapped(pb.EncodeRequest.ATTENTION_FIELD_NUMBER, FORMS)),
    ],
    ids=["an input", "an input of a pair", "the other text", "a reduction"],
)
def test_repeatedly_set_oneof_is_rejected_before_parsing(
    message_class: type[Message], inputs_number: int, data: bytes
) -> None:
    with pytest.raises(InvalidFieldsError, match="more than 3072 nested fields"):
        parser_of(message_class, 512, inputs_number).parse(data)


def test_request_with_large_pairs_and_queries_is_parsed() -> None:
    pair = pb.Input(text_pair=pb.TextPair(first="x" * 200, second="y"))
    request = pb.CompareRequest(pairs=[pb.ComparedPair(a=pair, b=pair)] * 512)
    assert parser_of(pb.CompareRequest, 512, 2).parse(request.SerializeToString()) == request


def test_texts_hidden_behind_a_group_are_rejected() -> None:
    """A parser skips an unknown group and continues with the fields after it."""
    with pytest.raises(MalformedRequestError):
        parser_of(pb.EmbedRequest, 512).parse(b"\x7b\x7c" + b"\x12\x00" * SMALL_BYTES)


def some_calls(stall_timeout_s: float, max_calls: int = 1) -> Calls:
    admission = Admission(max_texts=1, max_bytes=1 << 20, retry_after_s=lambda _: 1.0, max_calls=max_calls)
    return Calls(admission, lambda: None, Workers(1), stall_timeout_s=stall_timeout_s, observer=Observer())


@asynccontextmanager
async def serving(name: str, handler: "grpc.RpcMethodHandler[Any, Any]") -> AsyncIterator[str]:
    """Serve one method with gRPC."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {name: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_cancellation_is_not_lost_while_a_message_is_taken() -> None:
    """The stream is endless. Its reader takes one message and cancels in the same event-loop iteration."""
    calls = some_calls(stall_timeout_s=3600)

    async def stream(request: pb.EncodeStreamRequest, call: Call) -> None:
        del request
        while True:
            await call.write(b"message")

    handle = calls.handler(parser_of(pb.EncodeStreamRequest, 1), stream, "EncodeStream")
    events: SimpleQueue[Event] = SimpleQueue()
    call = LocalCall(Start(7, "EncodeStream", pb.EncodeStreamRequest(), None), handle, events.put)
    task = asyncio.create_task(call.run())
    while events.empty():
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # the second message waits for the reader
    call.acknowledge()
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=60)
    assert done, "the call goes on"
    *replies, end = [events.get_nowait() for _ in range(events.qsize())]
    assert all(isinstance(reply, Reply) for reply in replies)
    assert isinstance(end, Failed)
    assert cast("CallError", end.error).code() == grpc.StatusCode.CANCELLED


async def test_slow_consumer_gets_a_status_when_it_resumes_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls_module, "STATUS_GRACE_S", 0.05)
    remember_creators(asyncio.get_running_loop())
    calls, dropped = some_calls(stall_timeout_s=0.05), asyncio.Event()
    calls.on_dropped = dropped.set

    async def stream(request: pb.EncodeStreamRequest, call: Call) -> None:
        del request
        await call.write(b"message")

    handle = calls.handler(parser_of(pb.EncodeStreamRequest, 1), stream, "EncodeStream")
    stream_handler: Any = handle  # pass bytes through unchanged
    async with serving("EncodeStream", grpc.stream_stream_rpc_method_handler(stream_handler)) as address:
        with RawClient(address, window_bytes=0) as client:
            reply = client.call(method("EncodeStream"), b"")
            await dropped.wait()
            client.allow(1 << 16)
            await asyncio.to_thread(client.wait_for_ends, [reply], 10)
        assert (reply.status, reply.reason, bytes(reply.data[5:])) == (ABORTED, "SLOW_CONSUMER", b"message")


def count_calls() -> int:
    """Return the number of calls in memory, as gRPC's objects and as ours."""
    return sum(type(each) is Call or type(each).__name__ == "RPCState" for each in gc.get_objects())


async def test_failed_call_is_freed_without_a_garbage_collection() -> None:
    """gRPC refuses streams of a connection that has too many calls, including those that are not freed."""
    remember_creators(asyncio.get_running_loop())
    calls = some_calls(stall_timeout_s=60)

    async def embed(request: pb.EmbedRequest, call: Call) -> bytes:
        del request, call
        raise InvalidFieldsError([])

    handle: Any = calls.handler(parser_of(pb.EmbedRequest, 1), embed, "Embed")
    async with (
        serving("Embed", grpc.stream_unary_rpc_method_handler(handle)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        call: Any = channel.unary_unary(f"/{SERVICE_NAME}/Embed")
        gc.collect()
        num_before = count_calls()
        gc.disable()
        try:
            for _ in range(5):
                with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
                    await call(b"")
            await calls.wait_until_none()
            end = time.monotonic() + 5
            while (num_left := count_calls() - num_before) > 1 and time.monotonic() < end:
                await asyncio.sleep(0.01)  # gRPC's tasks end after the client has its status
        finally:
            gc.enable()
        assert num_left <= 1  # the last call, which gRPC keeps


async def test_unread_reply_is_dropped_after_its_own_timeout() -> None:
    timeout_s = 0.1
    calls, loop = some_calls(timeout_s, max_calls=4), asyncio.get_running_loop()

    async def embed(request: pb.EmbedRequest, call: Call) -> bytes:
        del request, call
        return b"reply"

    handle = calls.handler(parser_of(pb.EmbedRequest, 1), embed, "Embed")
    start = Start(7, "Embed", pb.EmbedRequest(), None)

    async def unread(delay_s: float) -> float:
        """Return how long gRPC would wait for the reader, if the reply was sent after a delay."""
        await asyncio.sleep(delay_s)
        await handle(b"", cast("Any", LocalCall(start, handle, lambda _: None)))
        sent_at = loop.time()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        return loop.time() - sent_at

    async def read() -> None:
        await handle(b"", cast("Any", LocalCall(start, handle, lambda _: None)))

    reading = asyncio.create_task(read())
    first, second = await asyncio.gather(unread(0.0), unread(0.05))
    third = await asyncio.create_task(unread(0.0))  # when no other reply waits for its reader
    await reading
    assert all(timeout_s - 0.01 < wait_s < 10 for wait_s in (first, second, third))
    await calls.wait_until_none()
