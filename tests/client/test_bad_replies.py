"""Both clients reject replies that do not match the request."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.tensor_pb2 import DataType, Tensor
from attnlens_client import AttentionQuery, BadReplyError, ServerError
from bad_replies import only, put, second_text
from scripted import ScriptedServer

FLOAT32 = DataType.DATA_TYPE_FLOAT32

Call = Callable[..., Any]
Change = Callable[[Any], object]


def _rows(reply: pb.EmbedResponse, count: int) -> None:
    """Return a change that gives the response `count` rows and keeps it self-consistent."""
    reply.embeddings.shape[0] = count
    reply.embeddings.data = (reply.embeddings.data * 2)[: count * 16]


def _fp16(reply: pb.EmbedResponse) -> None:
    reply.embeddings.data_type = DataType.DATA_TYPE_FLOAT16
    reply.embeddings.data = reply.embeddings.data[: len(reply.embeddings.data) // 2]


def _shape(*shape: int) -> Change:
    return lambda reply: reply.embeddings.shape.__setitem__(slice(None), shape)


EMBED: dict[str, tuple[Change, str]] = {
    "too few rows": (lambda reply: _rows(reply, 2), r"shape \(2, 4\), expected \(3, any\)"),
    "too many rows": (lambda reply: _rows(reply, 4), r"shape \(4, 4\), expected \(3, any\)"),
    "no rows": (lambda reply: _rows(reply, 0), r"shape \(0, 4\), expected \(3, any\)"),
    "no tensor": (lambda reply: reply.ClearField("embeddings"), r"shape \(\), expected"),
    "an axis too many": (_shape(3, 2, 2), r"shape \(3, 2, 2\), expected"),
    "a negative width": (_shape(3, -1), r"do not fill the shape \(3, -1\)"),
    "a huge width": (_shape(3, 2**62), "do not fill the shape"),
    "many axes": (_shape(*[2**62] * 100_000), ", expected"),
    "bytes missing": (lambda reply: setattr(reply.embeddings, "data", b"1234"), "4 bytes of float32 do not"),
    "fp16": (_fp16, "float16, expected float32"),
    "another type": (lambda reply: setattr(reply.embeddings, "data_type", 3), "int32, expected float32"),
    "a type of the future": (lambda reply: setattr(reply.embeddings, "data_type", 99), "data type 99"),
    "not a number": (lambda reply: put(reply.embeddings, 9, np.nan), r"texts\[2\] .*not finite"),
    "infinity": (lambda reply: put(reply.embeddings, 5, -np.inf), r"texts\[1\] .*not finite"),
    "a usage missing": (lambda reply: reply.usages.pop(), "2 usages.*, expected 3"),
    "a usage too many": (lambda reply: reply.usages.add(), "4 usages.*, expected 3"),
    "more tokens than there are": (lambda reply: setattr(reply.usages[1], "num_tokens", 2), r"texts\[1\]"),
    "a negative count": (lambda reply: setattr(reply.usages[1], "num_tokens", -1), "has inconsistent"),
    "truncated unasked": (
        lambda reply: reply.usages[1].MergeFrom(pb.Usage(num_tokens_total=9, truncated=True)),
        r"texts\[1\] was truncated without a request",
    ),
    "another model": (lambda reply: setattr(reply, "model", "b"), "model of .* is 'b', expected 'scripted'"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), EMBED.values(), ids=EMBED)
def test_invalid_vectors_are_rejected(
    server: ScriptedServer, connect: Call, change: Change, message: str
) -> None:
    server.change = only(pb.EmbedResponse, change)
    with connect(server.address) as call, pytest.raises(BadReplyError, match=message) as caught:
        call("embed", ["a", "bb", "ccc"], model="scripted")
    assert str(caught.value).startswith("invalid reply: ")
    assert len(str(caught.value)) < 600
    assert isinstance(caught.value, ServerError)
    server.change = lambda _: None
    with connect(server.address) as call:
        assert call("embed", ["a", "bb", "ccc"], model="scripted")[:, 0].tolist() == [1, 2, 3]


def test_vector_width_must_match_the_request(server: ScriptedServer, connect: Call) -> None:
    server.embed = lambda request, _: pb.EmbedResponse(
        embeddings=Tensor(data_type=FLOAT32, shape=[1, 3], data=bytes(12)),
        usages=[pb.Usage()] * len(request.inputs),
    )
    with connect(server.address) as call:
        assert call("embed", ["a"]).shape == (1, 3)
        with pytest.raises(BadReplyError, match=r"width of .* is 3, expected 2"):
            call("embed", ["a"], dimensions=2)


@pytest.mark.parametrize(
    ("what", "values"), [("model", ["a", "b"]), ("model version", ["a", "b"]), ("width", [4, 3])]
)
def test_inconsistent_responses_to_one_method_call_are_rejected(
    server: ScriptedServer, connect: Call, what: str, values: list[Any]
) -> None:
    calls = iter(values)

    def change(reply: pb.EmbedResponse) -> None:
        value = next(calls)
        if what != "width":
            setattr(reply, what.replace(" ", "_"), value)
        else:
            reply.embeddings.shape[1] = value
            reply.embeddings.data = reply.embeddings.data[: value * 4]

    server.change = only(pb.EmbedResponse, change)
    with (
        connect(server.address, batch_size=1, max_in_flight=1) as call,
        pytest.raises(
            BadReplyError, match=rf"{what} of texts\[1:2\] is {values[1]!r}, expected {values[0]!r}"
        ),
    ):
        call("embed", ["a", "b"])


HIDDEN: dict[str, tuple[dict[str, Any], Change, str]] = {
    "a token missing": ({}, lambda text: text.tokens.pop(), r"texts\[1\] has 2 tokens.*, expected 3"),
    "no hidden states": ({}, lambda text: text.ClearField("last_hidden_state"), "has no token vectors"),
    "hidden states unasked": (
        {"last_hidden_state": False},
        lambda text: text.last_hidden_state.SetInParent(),
        "unrequested token vectors",
    ),
    "another width": (
        {},
        lambda text: text.last_hidden_state.CopyFrom(Tensor(data_type=FLOAT32, shape=[3, 5], data=bytes(60))),
        r"width of texts\[1\] is 5, expected 4",
    ),
    "a row missing": ({}, lambda text: text.last_hidden_state.shape.__setitem__(0, 2), r"\(2, 4\), expected"),
    "hidden states not finite": (
        {},
        lambda text: put(text.last_hidden_state, 0, np.nan),
        r"texts\[1\] has token vectors with a value",
    ),
    "truncated unasked": (
        {},
        lambda text: text.usage.MergeFrom(pb.Usage(num_tokens_total=9, truncated=True)),
        "was truncated",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "change", "message"), HIDDEN.values(), ids=HIDDEN)
def test_invalid_token_vectors_are_rejected(
    server: ScriptedServer, connect: Call, options: dict[str, Any], change: Change, message: str
) -> None:
    options = {"attention": AttentionQuery(), **options}
    server.change = second_text(change)
    with connect(server.address) as call, pytest.raises(BadReplyError, match=message):
        call("encode", ["ab", "cde"], **options)
    server.change = only(
        pb.EncodeStreamResponse,
        lambda part: change(part.text) if part.input_index == 1 and part.HasField("text") else None,
    )
    with connect(server.address) as call, pytest.raises(BadReplyError, match=message):
        call("encode_stream", ["ab", "cde"], **options)


def test_invalid_tokens_and_models_are_rejected(server: ScriptedServer, connect: Call) -> None:
    changes: list[tuple[type[Any], Change, tuple[Any, ...], str]] = [
        (pb.TokenizeResponse, lambda reply: reply.results.pop(), ("tokenize", ["a", "b"]), "1 results .* 2"),
        (pb.EncodeResponse, lambda reply: reply.results.add(), ("encode", ["a", "b"]), "3 results .* 2"),
        (pb.GetModelResponse, lambda reply: reply.ClearField("model"), ("get_model",), "hidden_size"),
        (
            pb.GetModelResponse,
            lambda reply: setattr(reply.model, "embedding_size", -4),
            ("embed", []),
            "embedding_size of the model 'scripted' is -4",
        ),
        (
            pb.GetModelResponse,
            lambda reply: setattr(reply.model.limits, "max_concurrent_inputs", -1),
            ("get_model",),
            "limit max_concurrent_inputs is -1",
        ),
        (
            pb.ListModelsResponse,
            lambda reply: setattr(reply.models[0].architecture, "num_heads", 0),
            ("list_models",),
            "num_heads of the model 'scripted' is 0",
        ),
    ]  # fmt: skip
    with connect(server.address) as call:
        for kind, change, asked, message in changes:
            server.change = only(kind, change)
            with pytest.raises(BadReplyError, match=message):
                call(*asked)
        server.change = lambda _: None
        with pytest.raises(BadReplyError, match="the model is 'scripted', expected 'other'"):
            call("get_model", "other")
        for method in ("tokenize", "encode", "encode_stream"):
            with pytest.raises(BadReplyError, match="'scripted', expected 'other'"):
                call(method, ["a"], model="other")


@pytest.mark.parametrize(
    "fields",
    [
        {"char_start": -1},
        {"char_start": 2, "char_end": 1},
        {"char_end": 4},
        {"byte_end": 5},
        {"byte_start": 2, "byte_end": 1},
        {"source": pb.TOKEN_SOURCE_SECOND_TEXT, "char_end": 2},
        {"source": pb.TOKEN_SOURCE_SPECIAL, "char_start": -1},
    ],
    ids=str,
)
def test_token_offsets_must_be_within_the_text(
    server: ScriptedServer, connect: Call, fields: dict[str, Any]
) -> None:
    """The second text is a pair: 3 characters in 4 bytes, and 1 character."""
    texts = ["ab", ("éac", "x")]

    def change(reply: Any) -> None:
        if isinstance(reply, pb.EncodeStreamResponse):
            tokens = reply.text.tokens if reply.input_index == 1 and reply.HasField("text") else []
        else:
            tokens = reply.results[1].tokens
        if tokens:
            tokens[0].MergeFrom(pb.Token(**fields))

    server.change = lambda reply: change(reply) if not isinstance(reply, pb.GetModelResponse) else None
    with connect(server.address) as call:
        for method in ("tokenize", "encode", "encode_stream", "explain"):
            with pytest.raises(BadReplyError, match=r"texts\[1\] has a token with offsets out of range"):
                call(method, texts)


def test_undecodable_bytes_are_an_invalid_response(connect: Call, garbled_server: str) -> None:
    with connect(garbled_server) as call:
        for method in ("embed", "encode", "encode_stream", "tokenize"):
            with pytest.raises(BadReplyError, match="not a message of the expected type"):
                call(method, ["a"])
