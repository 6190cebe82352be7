"""Invalid messages, messages that are expensive for their size, and texts that are slow to tokenize."""

import gzip
import sys
from contextlib import ExitStack

import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from bench.studies.raw_http2 import RawClient, method, repeated_field
from hostile.target import INVALID_ARGUMENT, OK, RESOURCE_EXHAUSTED, UNKNOWN, Target

LONGEST_TEXT = "word " * 26_000  # just under the 128 KiB text limit
LARGEST_BYTES = (32 << 20) - 64  # just under the message size limit
QUERIES = pb.EncodeRequest.ATTENTION_FIELD_NUMBER
METHODS = ["Embed", "Encode", "EncodeStream", "Tokenize", "ListModels", "GetModel"]
MALFORMED = [
    b"\xff" * 11,
    b"\x12\x7f",
    b"\x0b",
]  # an endless varint, a truncated message, an unclosed group
# CPU time of the event-loop thread, which does not depend on other processes.
LOOP_CPU_S = 0.3


@pytest.mark.parametrize("name", METHODS)
def test_invalid_messages_are_rejected_and_not_logged(target: Target, name: str) -> None:
    for message in MALFORMED * 10:
        reply = target.ask(method(name), message)
        assert (reply.status, reply.reason) == (INVALID_ARGUMENT, "MALFORMED_REQUEST")
        for internal in ("DecodeError", "Traceback", "class", "Unexpected"):
            assert internal not in reply.headers["grpc-message"]
    assert target.new_log == ""


@pytest.mark.parametrize(
    "path",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_malformed_health_and_reflection_requests_are_rejected_as_invalid(target: Target, path: str) -> None:
    for message in MALFORMED:
        reply = target.ask(path, message)
        assert (reply.status, reply.reason) == (INVALID_ARGUMENT, "MALFORMED_REQUEST")
        assert "class" not in reply.headers["grpc-message"]
    assert target.new_log == ""


@pytest.mark.parametrize("name", [b"\x83", b"/\xaf", b"/attnlens.v1.EncoderService/Embed\xff"])
def test_method_whose_name_is_not_utf8_is_rejected_and_not_logged(target: Target, name: bytes) -> None:
    assert target.ask(name, b"").status == UNKNOWN  # by gRPC, before any of our code runs
    assert target.new_log == ""


def test_compressed_requests_are_rejected_before_decompression(target: Target) -> None:
    """The message has 16 million empty inputs: 33 KB compressed, 32 MB inflated, and 800 MB once parsed."""
    bomb = gzip.compress(b"\x12\x00" * (LARGEST_BYTES // 2))
    assert len(bomb) < 33_000
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(target.address)) for _ in range(6)]
        replies = [
            client.call(method("Embed"), bomb, headers=[("grpc-encoding", "gzip")], is_compressed=True)
            for client in clients
        ]
        for client, reply in zip(clients, replies, strict=True):
            client.wait_for_ends([reply])
    assert all(reply.status not in (None, OK) for reply in replies)
    assert target.peak_growth_mib < 100


@pytest.mark.skipif(sys.platform != "linux", reason="uses several loopback addresses")
def test_unfinished_uploads_do_not_disturb_other_clients(target: Target) -> None:
    with RawClient(target.address, source="127.0.0.2") as client:
        for announced_bytes in (1 << 16, 1 << 30):
            for _ in range(50):
                client.call(method("Embed"), b"\x12\x00", announced_bytes=announced_bytes)
        assert target.ask(method("ListModels"), b"", timeout_s=5).status == OK
    assert target.peak_growth_mib < 20


@pytest.mark.parametrize("number", [2, 3], ids=["layers", "heads"])
def test_long_list_of_numbers_does_not_block_the_event_loop(target: Target, number: int) -> None:
    request = pb.EncodeRequest(inputs=[pb.Input(text="hello")]).SerializeToString()
    numbers = repeated_field(number, b"\x01" * (4 << 20))
    before = target.process.loop_cpu_s
    reply = target.ask(method("Encode"), request + repeated_field(QUERIES, numbers))
    assert reply.status in (INVALID_ARGUMENT, RESOURCE_EXHAUSTED)
    assert target.process.loop_cpu_s - before < LOOP_CPU_S


def test_many_queries_do_not_block_the_event_loop(target: Target) -> None:
    request = pb.EncodeRequest(inputs=[pb.Input(text="hello")]).SerializeToString()
    before = target.process.loop_cpu_s
    reply = target.ask(method("Encode"), request + repeated_field(QUERIES, b"") * (1 << 20))
    assert reply.status in (INVALID_ARGUMENT, RESOURCE_EXHAUSTED)
    assert target.process.loop_cpu_s - before < LOOP_CPU_S


@pytest.mark.parametrize("name", ["Embed", "Encode"])
def test_many_ids_do_not_block_the_event_loop(target: Target, name: str) -> None:
    ids = repeated_field(1, b"\x01" * 130_000)
    request = repeated_field(2, repeated_field(pb.Input.TOKEN_IDS_FIELD_NUMBER, ids)) * 256
    assert LARGEST_BYTES * 0.99 < len(request) < LARGEST_BYTES
    before = target.process.loop_cpu_s
    reply = target.ask(method(name), request)
    assert reply.status in (INVALID_ARGUMENT, RESOURCE_EXHAUSTED)
    assert reply.reason != "MALFORMED_REQUEST"
    assert target.process.loop_cpu_s - before < LOOP_CPU_S


def test_longest_text_is_tokenized_in_time(target: Target) -> None:
    request = pb.TokenizeRequest(inputs=[pb.Input(text=LONGEST_TEXT)]).SerializeToString()
    reply = target.ask(method("Tokenize"), request, timeout_s=10)
    assert reply.status == OK
    [result] = pb.TokenizeResponse.FromString(bytes(reply.data[5:])).results
    spans = [(token.char_start, token.char_end) for token in result.tokens[1:-1]]
    assert spans == [(5 * word, 5 * word + 4) for word in range(26_000)]


@pytest.mark.parametrize("name", ["Embed", "Encode", "EncodeStream"])
def test_overlong_texts_are_rejected_without_tokenizing_all_of_them(target: Target, name: str) -> None:
    # The request types share these fields, so one request serves for all methods.
    request = pb.EncodeRequest(inputs=[pb.Input(text=LONGEST_TEXT)] * 32).SerializeToString()
    before = target.process.cpu_s
    reply = target.ask(method(name), request)
    assert (reply.status, reply.reason) == (INVALID_ARGUMENT, "INPUT_TOO_LONG")
    assert target.process.cpu_s - before < 1


def test_thousands_of_rejected_requests_leak_no_memory(target: Target) -> None:
    requests = [
        (method("Embed"), pb.EmbedRequest().SerializeToString()),
        (method("Embed"), pb.EmbedRequest(model="another").SerializeToString()),
        (method("Embed"), pb.EmbedRequest(inputs=[pb.Input(text="a " * 500)]).SerializeToString()),
        (
            method("Encode"),
            pb.EncodeRequest(
                inputs=[pb.Input(text="a")], attention=[pb.AttentionQuery(layers=[99])]
            ).SerializeToString(),
        ),
        (method("EncodeStream"), b"\xff" * 11),
        (method("None"), b""),
    ]

    def send_all(times: int) -> None:
        with RawClient(target.address) as client:
            for _ in range(times):
                replies = [client.call(path, message) for path, message in requests]
                client.wait_for_ends(replies)
                assert all(reply.status not in (None, OK) for reply in replies)

    send_all(30)  # fills caches and reusable buffers
    before = target.process.rss_mib
    send_all(400)
    assert target.process.rss_mib - before < 5
    assert target.new_log == ""
