"""Clients that read nothing, leave in the middle of a reply, or cancel most of their calls."""

import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from bench.studies.raw_http2 import RawClient, method
from hostile.target import CANCELLED, OK, RESOURCE_EXHAUSTED, Target
from served import ServerProcess

# The attention of 115 tokens is 3.8 MB: 70 such replies are all that may wait at a time.
MAPS = pb.EncodeRequest(inputs=[pb.Input(text="word " * 113)], attention=[pb.AttentionQuery()])
STREAM = pb.EncodeStreamRequest(inputs=[pb.Input(text="word " * 200)] * 4, attention=[pb.AttentionQuery()])
MANY_TEXTS = pb.TokenizeRequest(
    inputs=[pb.Input(text="word " * 26_000)] * 32
)  # 4 MB, all that a request may have
IN_TIME_S = 30.0  # far more than the stall timeout, far less than for ever


def wait_until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ask_until_served(target: Target, path: str, message: bytes) -> None:
    """Ask as an honest caller does: try again while the server is overloaded."""
    end = time.monotonic() + IN_TIME_S
    while (reply := target.ask(path, message)).status != OK:
        assert reply.reason == "OVERLOADED"
        assert time.monotonic() < end, "locked out"
        time.sleep(0.1)


def stall_and_ask(target: Target, name: str, request: bytes, num_calls: int) -> None:
    """Make calls and leave their replies unread; an honest caller must be served, and each call must end."""
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(target.address, window_bytes=0)) for _ in range(8)]
        shares = [num_calls // 8 + (number < num_calls % 8) for number in range(8)]
        calls = [
            (client, [client.call(method(name), request) for _ in range(share)])
            for client, share in zip(clients, shares, strict=True)
        ]
        for client, replies in calls:  # each waits for its reader, or was refused
            client.wait_for_heads(replies)
        ask_until_served(target, method(name), request)
        for client, replies in calls:
            client.wait_for_ends(replies, IN_TIME_S)
    statuses = {
        (reply.status, reply.reason) for _, replies in calls for reply in replies if reply.status is not None
    }
    assert statuses <= {(CANCELLED, ""), (RESOURCE_EXHAUSTED, "OVERLOADED")}


def test_unread_replies_do_not_block_other_callers(target: Target) -> None:
    stall_and_ask(target, "Encode", MAPS.SerializeToString(), num_calls=72)


def test_unread_streams_do_not_block_other_callers(target: Target) -> None:
    stall_and_ask(target, "EncodeStream", STREAM.SerializeToString(), num_calls=50)


def test_a_stream_whose_first_message_is_not_read_is_ended(target: Target) -> None:
    with RawClient(target.address, window_bytes=0) as client:
        reply = client.call(method("EncodeStream"), STREAM.SerializeToString())
        client.wait_for_heads([reply])
        client.wait_for_ends([reply], IN_TIME_S)
    assert reply.status == CANCELLED


@pytest.mark.parametrize(("name", "request_"), [("Encode", MAPS), ("EncodeStream", STREAM)])
def test_clients_that_leave_during_a_reply_cause_no_fault(
    target: Target, name: str, request_: pb.EncodeRequest | pb.EncodeStreamRequest
) -> None:
    for _ in range(5):
        with RawClient(target.address, window_bytes=0) as client:
            reply = client.call(method(name), request_.SerializeToString())
            client.wait_for_heads([reply])
    assert target.ask(method(name), request_.SerializeToString()).status == OK


def start_tokenizing(
    target: Target, stub: EncoderServiceStub
) -> "list[grpc._CallFuture[pb.TokenizeResponse]]":
    """Start long work, and return when some of it is done."""
    before = target.process.cpu_s
    calls = [stub.Tokenize.future(MANY_TEXTS) for _ in range(16)]
    wait_until(lambda: target.process.cpu_s - before > 0.5)
    return calls


def test_the_work_of_cancelled_calls_is_dropped(target: Target) -> None:
    with grpc.insecure_channel(target.address) as channel:
        stub = EncoderServiceStub(channel)
        for call in start_tokenizing(target, stub):
            call.cancel()
        assert (
            len(stub.Tokenize(pb.TokenizeRequest(inputs=[pb.Input(text="hello")]), timeout=10).results) == 1
        )


def test_running_work_does_not_delay_the_shutdown(minilm_bundle: Path) -> None:
    with (
        ServerProcess(minilm_bundle, "--drain-timeout-s", "2") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        calls = start_tokenizing(Target(server), EncoderServiceStub(channel))
        server.process.terminate()
        try:
            assert server.process.wait(timeout=IN_TIME_S) == 0
        except subprocess.TimeoutExpired:
            server.process.kill()
            raise
        assert grpc.StatusCode.UNAVAILABLE in {call.code() for call in calls}
