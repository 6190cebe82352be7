"""Both clients respect server limits, which can change, against a scripted server."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client import AttentionQuery, Client, InvalidRequestError, TextPart, UnavailableError
from scripted import ScriptedServer, fails, refuse, vectors

Call = Callable[..., Any]


def test_text_over_the_server_limit_is_rejected_before_it_is_sent(connect: Call) -> None:
    large = "é" * 40_000
    with ScriptedServer(max_text_bytes=1000) as server, connect(server.address) as call:
        for texts, size in ((["a", "b" * 1001], 1001), (["a", large], 80_000)):
            with pytest.raises(
                InvalidRequestError, match=rf"^texts\[1\] has {size} bytes, .* 1000"
            ) as caught:
                call("embed", texts)
            assert caught.value.text_index == 1
        for method in ("embed", "encode", "tokenize"):  # a single large text
            with pytest.raises(InvalidRequestError, match=r"^texts\[0\] has 80000 bytes"):
                call(method, [large])
        assert {type(request) for request in server.requests} == {pb.GetModelRequest}
        assert call("embed", ["b" * 1000]).shape == (1, 4)
    with ScriptedServer(max_text_bytes=1000) as server, connect(server.address) as call:
        with pytest.raises(InvalidRequestError, match=r"^texts\[0\] has 80000 bytes"):
            call("embed", [large])
        assert call("embed", ["b"]).shape == (1, 4)  # a short text needs no additional call
        assert [type(request) for request in server.requests] == [pb.GetModelRequest, pb.EmbedRequest]


def test_request_text_size_fits_the_server_limit(connect: Call) -> None:
    with ScriptedServer(max_request_text_bytes=10) as server, connect(server.address) as call:
        assert call("embed", ["éé", "12345", "1", "2", "123456789", "", "1"])[:, 0].tolist() == [
            2, 5, 1, 1, 9, 0, 1,
        ]  # fmt: skip
        sizes = [
            sum(len(text.text.encode()) for text in request.inputs)
            for request in server.requests
            if isinstance(request, pb.EmbedRequest)
        ]
        assert sorted(sizes) == [1, 10, 10]
        assert len(call("tokenize", ["12345"] * 5)) == 5
        assert sum(isinstance(request, pb.TokenizeRequest) for request in server.requests) == 3


def test_too_many_dimensions_are_rejected_even_without_texts(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        with pytest.raises(InvalidRequestError, match="dimensions is 5: use 1 to 4"):
            client.embed([], dimensions=5)
        assert client.embed([], dimensions=4).shape == (0, 4)


def _kinds(server: ScriptedServer) -> list[type[Any]]:
    kinds = [type(request) for request in server.requests]
    server.requests.clear()
    return kinds


def test_limits_are_requested_once(server: ScriptedServer, connect: Call) -> None:
    with connect(server.address) as call:
        for _ in range(3):
            call("embed", ["a", "b"])
    assert _kinds(server) == [pb.GetModelRequest, *[pb.EmbedRequest] * 3]


def test_changed_limits_are_requested_after_a_rejection(server: ScriptedServer, connect: Call) -> None:
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
        assert call("embed", ["a"] * 4).shape == (4, 4)  # the server rejected the call with 4 texts
        _kinds(server)
        assert call("embed", ["a"] * 4).shape == (4, 4)
        assert _kinds(server) == [pb.EmbedRequest] * 2
        server.limits["max_text_bytes"] = 20
        assert call("embed", ["a" * 15, "b"]).shape == (
            2,
            4,
        )  # outdated limits would have rejected it in the client
        with pytest.raises(InvalidRequestError, match="has 30 bytes, but the limit is 20"):
            call("embed", ["a" * 30, "b"])


def test_in_flight_calls_are_canceled_before_limits_are_refreshed(
    server: ScriptedServer, connect: Call
) -> None:
    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        if server.limits["max_text_bytes"] == 20:
            return vectors(request)
        if request.inputs[0].text == "held":
            server.wait_until_cancelled(context)
        else:
            assert server.waiting.acquire(timeout=20)
            server.limits["max_text_bytes"] = 20
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "not so")
        return vectors(request)

    server.limits["max_text_bytes"] = 10
    with connect(server.address, batch_size=1) as call:
        call("get_model")
        server.embed = embed
        assert call("embed", ["held", "b"])[:, 0].tolist() == [4, 1]
        assert server.cancelled.acquire(timeout=20)


def test_new_model_at_the_same_address_has_its_own_limits_and_width(
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


def test_limits_are_refreshed_after_an_outage(server: ScriptedServer, connect: Call) -> None:
    with connect(server.address, max_attempts=1) as call:
        call("embed", ["a", "b"])
        server.embed = fails(grpc.StatusCode.UNAVAILABLE, "", "away")
        with pytest.raises(UnavailableError):
            call("embed", ["a", "b"])
        _kinds(server)
        call("embed", ["a", "b"])
        assert _kinds(server) == [pb.GetModelRequest, pb.EmbedRequest]


def test_new_model_version_has_its_own_limits(server: ScriptedServer, connect: Call) -> None:
    with connect(server.address) as call:
        call("embed", ["a", "b"])
        server.change = lambda reply: (
            setattr(reply, "model_version", "new") if isinstance(reply, pb.EmbedResponse) else None
        )
        call("embed", ["a", "b"])
        _kinds(server)
        call("embed", ["a", "b"])
        assert _kinds(server) == [pb.GetModelRequest, pb.EmbedRequest]


def test_stream_requests_the_limits_but_needs_no_layer_count(server: ScriptedServer, connect: Call) -> None:
    query = AttentionQuery()
    with connect(server.address) as call:
        for _ in range(2):
            texts = call("encode_stream", ["a", "b"], attention=query)
            assert [text.attention[0].layers for text in texts] == [(0, 1)] * 2
        assert _kinds(server) == [pb.GetModelRequest, pb.EncodeStreamRequest] * 2
        [text] = call("encode_stream", ["a"], attention=query)
        assert text.attention[0].layers == (0, 1)
        assert _kinds(server) == [pb.EncodeStreamRequest]
        parts = call("encode_stream_parts", ["a", "b"], attention=[query, query])
        assert [part.num_attention_parts for part in parts if isinstance(part, TextPart)] == [4, 4]
