"""Clients that never read responses, disconnect early, or cancel most of their calls."""

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

# The attention of 115 tokens takes 3.8 MB, and at most 70 such responses may be pending.
MAPS = pb.EncodeRequest(inputs=[pb.Input(text="word " * 113)], attention=[pb.AttentionQuery()])
STREAM = pb.EncodeStreamRequest(inputs=[pb.Input(text="word " * 200)] * 4, attention=[pb.AttentionQuery()])
MANY_TEXTS = pb.TokenizeRequest(
    inputs=[pb.Input(text="word " * 26_000)] * 32
)  # 4 MB, the maximum request size
IN_TIME_S = 30.0  # well above the stall timeout, but finite


def wait_until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ask_until_served(target: Target, path: str, message: bytes) -> None:
    """Retry like a well-behaved client while the server is overloaded."""
    end = time.monotonic() + IN_TIME_S
    while (reply := target.ask(path, message)).status != OK:
        assert reply.reason == "OVERLOADED"
        assert time.monotonic() < end, "locked out"
        time.sleep(0.1)


def leave_responses_unread(target: Target, name: str, request: bytes, num_calls: int) -> None:
    """Leave responses unread. A well-behaved client must still be served, and each stalled call must end."""
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(target.address, window_bytes=0)) for _ in range(8)]
        shares = [num_calls // 8 + (number < num_calls % 8) for number in range(8)]
        calls = [
            (client, [client.call(method(name), request) for _ in range(share)])
            for client, share in zip(clients, shares, strict=True)
        ]
        for client, replies in calls:  # each call either waits for its reader or was rejected
            client.wait_for_heads(replies)
        ask_until_served(target, method(name), request)
        for client, replies in calls:
            client.wait_for_ends(replies, IN_TIME_S)
    statuses = {
        (reply.status, reply.reason) for _, replies in calls for reply in replies if reply.status is not None
    }
    assert statuses <= {(CANCELLED, ""), (RESOURCE_EXHAUSTED, "OVERLOADED")}


def test_unread_responses_do_not_block_other_callers(target: Target) -> None:
    leave_responses_unread(target, "Encode", MAPS.SerializeToString(), num_calls=72)


def test_unread_streams_do_not_block_other_callers(target: Target) -> None:
    leave_responses_unread(target, "EncodeStream", STREAM.SerializeToString(), num_calls=50)


def test_stream_ends_when_its_first_message_is_not_read(target: Target) -> None:
    with RawClient(target.address, window_bytes=0) as client:
        reply = client.call(method("EncodeStream"), STREAM.SerializeToString())
        client.wait_for_heads([reply])
        client.wait_for_ends([reply], IN_TIME_S)
    assert reply.status == CANCELLED


@pytest.mark.parametrize(("name", "request_"), [("Encode", MAPS), ("EncodeStream", STREAM)])
def test_clients_that_disconnect_during_a_response_cause_no_error(
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
    """Start slow work and return once part of it is done."""
    before = target.process.cpu_s
    calls = [stub.Tokenize.future(MANY_TEXTS) for _ in range(16)]
    wait_until(lambda: target.process.cpu_s - before > 0.5)
    return calls


def test_work_of_cancelled_calls_is_dropped(target: Target) -> None:
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
