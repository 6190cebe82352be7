"""The routes of attnlens return the same results as gRPC, bit for bit."""

import base64
import json
from collections.abc import AsyncGenerator
from typing import Any, TypeVar, cast

import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.grpc_api.responses import Responses
from attnlens_server.http_api.listener import ABORT
from attnlens_server.http_api.native import NativeRoutes
from http_client import StubService, posted
from mounted import Mounted

AnyMessage = TypeVar("AnyMessage", bound=Message)

TEXTS = ["The animal didn't cross the street because it was too tired.", "", "Zoë 東京 😀"]
DTYPES = {"FLOAT32": "<f4", "FLOAT16": "<f2", "INT32": "<i4", "UINT8": "u1", "INT8": "i1"}
QUERIES = [
    {"layers": [0, -1], "heads": [3]},
    {"view": "head_mean", "reduction": {"level": "words", "special_tokens": "drop", "top_k": {"k": 2}}},
    {"layers": [2], "reduction": {"threshold": {"threshold": 0.1}}},
    {"layers": [2], "reduction": {"statistics": {"received": True, "entropy": True}}},
    {"layers": [2], "reduction": {"sqrt_uint8": {}}},
]
CONTRAST = {"to": "An animal sleeps.", "rather_than": {"text": "A street is crossed."}}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("embed", "Embed", {"inputs": TEXTS}),
    ("embed", "Embed", {"inputs": TEXTS, "data_type": "float16", "pooling": "max", "dimensions": 5}),
    ("encode", "Encode", {"inputs": TEXTS}),
    ("encode", "Encode", {"inputs": TEXTS, "attention": QUERIES, "last_hidden_state": True}),
    ("encode", "Encode", {"inputs": TEXTS, "attention": QUERIES[:1], "data_type": "float16"}),
    ("attention", "Encode", {"inputs": TEXTS, "attention": QUERIES[1:3]}),
    ("tokenize", "Tokenize", {"inputs": [*TEXTS, {"text_pair": {"first": "a", "second": "b"}}]}),
    ("explain", "Explain", {"inputs": TEXTS[:1], "contrast": CONTRAST, "head_contributions": True}),
    ("explain", "Explain", {"inputs": TEXTS[:1], "methods": ["leave_one_out"], "level": "words"}),
    ("compare", "Compare", {"pairs": [{"a": TEXTS[0], "b": "Animals"}], "matrix": "output"}),
]


def message_of(message_class: type[AnyMessage], content: dict[str, Any]) -> AnyMessage:
    """Parse a request with protobuf's own JSON mapping, which needs long names."""
    return json_format.ParseDict(json.loads(json.dumps(_long(content))), message_class())


LONG = {
    "data_type": "DATA_TYPE_",
    "pooling": "POOLING_",
    "view": "ATTENTION_VIEW_",
    "level": "",
    "special_tokens": "SPECIAL_TOKENS_",
    "methods": "EXPLAIN_METHOD_",
    "matrix": "PAIR_MATRIX_",
}


def _long(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        prefix = "ATTENTION_LEVEL_" if "special_tokens" in value else "EXPLAIN_LEVEL_"
        return {
            key: prefix + each.upper() if key == "level" else _long(each, key) for key, each in value.items()
        }
    if isinstance(value, list):
        return [_long(each, name) for each in value]
    if isinstance(value, str) and name in LONG:
        return LONG[name] + value.upper()
    return (
        {"text": value}
        if name in ("inputs", "a", "b", "to", "rather_than") and isinstance(value, str)
        else value
    )


def check(found: Any, expected: Any, path: str = "") -> None:
    """Compare a response with the JSON of protobuf, in which `as_dict` writes all fields."""
    if isinstance(expected, dict) and {"data_type", "shape", "data"} == expected.keys():
        check_array(found, expected, path)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for name, value in expected.items():
            if name != "timings":
                check(found[name], value, f"{path}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for index, value in enumerate(expected):
            check(found[index], value, f"{path}[{index}]")
    elif expected == "NaN":
        assert found is None, path
    elif isinstance(expected, str) and expected.endswith(f"_{found}".upper()):
        assert found.islower(), path  # an enum
    else:
        assert found == expected, path


def check_array(found: Any, expected: dict[str, Any], path: str) -> None:
    name = expected["data_type"].removeprefix("DATA_TYPE_")
    shape = [int(length) for length in expected["shape"]]
    array = np.frombuffer(base64.b64decode(expected["data"]), DTYPES[name]).reshape(shape)
    if isinstance(found, dict):
        assert found == {"data_type": name.lower(), "shape": shape, "data": expected["data"]}, path
        return
    read = np.array(found, np.float64).astype(array.dtype)  # None becomes NaN
    if array.size == 0:  # lists end at the first axis of length 0
        read = read.reshape(array.shape)
    assert read.shape == array.shape, path
    assert np.array_equal(read, array, equal_nan=array.dtype.kind == "f"), path


def as_dict(message: Message) -> Any:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


@pytest.mark.parametrize("arrays", ["lists", "base64"])
@pytest.mark.parametrize(("route", "method", "content"), CASES)
def test_responses_equal_those_of_grpc(
    mounted: Mounted, stub: EncoderServiceStub, route: str, method: str, content: dict[str, Any], arrays: str
) -> None:
    request = message_of(getattr(pb, f"{method}Request"), content)
    response = mounted.ask("POST", f"/v1/attnlens/{route}", {**content, "arrays": arrays})
    assert response.status == 200, response.body
    assert response.headers["content-type"] == "application/json"
    check(response.json, as_dict(getattr(stub, method)(request)))
    timings = response.json.get("timings", {"compute": 0.0})
    assert all(isinstance(seconds, float) and 0 <= seconds < 60 for seconds in timings.values())


def test_attention_defaults_to_all_weights(mounted: Mounted, stub: EncoderServiceStub) -> None:
    found = mounted.ask("POST", "/v1/attnlens/attention", {"inputs": TEXTS[:1]}).json
    request = pb.EncodeRequest(inputs=[pb.Input(text=TEXTS[0])], attention=[pb.AttentionQuery()])
    check(found, as_dict(stub.Encode(request)))
    assert "last_hidden_state" not in found["results"][0]


@pytest.mark.parametrize("arrays", ["lists", "base64"])
def test_lines_of_a_stream_equal_the_messages_of_grpc(
    mounted: Mounted, stub: EncoderServiceStub, arrays: str
) -> None:
    content = {"inputs": TEXTS, "attention": QUERIES[:2], "last_hidden_state": True}
    response = mounted.ask("POST", "/v1/attnlens/encode_stream", {**content, "arrays": arrays})
    assert response.headers["content-type"] == "application/x-ndjson"
    expected = list(stub.EncodeStream(message_of(pb.EncodeStreamRequest, content)))
    lines = response.body.splitlines()
    assert len(lines) == len(expected)
    for line, message in zip(lines, expected, strict=True):
        check(json.loads(line), as_dict(message))


def test_models_equal_those_of_grpc(mounted: Mounted, stub: EncoderServiceStub) -> None:
    differing = ("limits", "device", "execution_providers")  # the servers have different options
    [expected] = as_dict(stub.ListModels(pb.ListModelsRequest()))["models"]
    models = mounted.ask("GET", "/v1/attnlens/models").json
    found = mounted.ask("GET", f"/v1/attnlens/models/{expected['name']}").json
    assert models == {"models": [found["model"]]}
    assert found["model"]["limits"]["max_response_bytes"] == int(expected["limits"]["max_response_bytes"])
    for name in differing:
        del found["model"][name], expected[name]
    check(found["model"], expected)


def test_large_requests_and_responses_are_converted_in_worker_threads(
    mounted: Mounted, stub: EncoderServiceStub
) -> None:
    texts = ["word " * 250] * 40
    response = mounted.ask("POST", "/v1/attnlens/tokenize", {"inputs": texts})
    assert len(response.body) > 1_000_000
    check(
        response.json,
        as_dict(stub.Tokenize(pb.TokenizeRequest(inputs=[pb.Input(text=each) for each in texts]))),
    )


@pytest.mark.parametrize(
    ("route", "content", "status", "reason", "field"),
    [
        ("embed", {}, 400, "INVALID_FIELD", "inputs"),
        ("embed", {"inputs": ["a"], "arrays": "list"}, 400, "INVALID_FIELD", "arrays"),
        ("embed", {"inputs": ["a"], "arrays": {}}, 400, "INVALID_FIELD", "arrays"),
        ("explain", {"inputs": ["a"], "direction": [1e300] * 384}, 400, "INVALID_FIELD", "direction"),
        ("embed", {"inputs": ["a"], "normalise": True}, 400, "INVALID_FIELD", "normalise"),
        ("embed", {"inputs": ["a"], "pooling": 99}, 400, "INVALID_FIELD", "pooling"),
        ("embed", {"inputs": [{}]}, 400, "INVALID_FIELD", "inputs[0]"),
        ("embed", {"inputs": ["a"] * 2049}, 400, "INVALID_FIELD", "inputs"),
        ("embed", {"inputs": ["word " * 300]}, 400, "INPUT_TOO_LONG", "inputs[0]"),
        ("embed", {"inputs": ["a"], "model": "other"}, 404, "MODEL_NOT_FOUND", None),
        ("encode_stream", {"inputs": ["a"], "attention": [{"layers": [6]}]}, 400, "INVALID_FIELD", None),
        ("attention", {"inputs": ["word " * 250] * 99}, 400, "RESPONSE_TOO_LARGE", None),
        ("explain", {"inputs": ["a"], "to": {"txt": "b"}}, 400, "INVALID_FIELD", "to.txt"),
        ("compare", {"pairs": [["a", "b"]]}, 400, "INVALID_FIELD", "pairs[0]"),
    ],
)
def test_errors_name_the_field(
    mounted: Mounted, route: str, content: dict[str, Any], status: int, reason: str, field: str | None
) -> None:
    response = mounted.ask("POST", f"/v1/attnlens/{route}", content)
    assert (response.status, response.json["reason"]) == (status, reason)
    if field is not None:
        assert response.json["violations"][0]["field"] == field


def test_an_error_in_a_stream_is_its_last_line(mounted: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    serialize = Responses.stream_part

    def fail_later(self: Responses, part: Any, data_type: Any) -> bytes:
        if part.input_index == 1:
            raise InvalidFieldsError([FieldViolation("inputs[1]", "exceeds the range of float16")])
        return serialize(self, part, data_type)

    monkeypatch.setattr(Responses, "stream_part", fail_later)
    response = mounted.ask("POST", "/v1/attnlens/encode_stream", {"inputs": ["a", "b", "c"]})
    first, error = map(json.loads, response.body.splitlines())
    assert (response.status, first["input_index"]) == (200, 0)
    assert (error["reason"], error["violations"][0]["field"]) == ("INVALID_FIELD", "inputs[1]")


async def test_a_stream_is_closed_even_if_nothing_of_it_is_sent() -> None:
    is_closed = False

    class Methods:
        async def encode_parts(self, *_: object) -> AsyncGenerator[bytes]:
            nonlocal is_closed
            try:
                yield b""
            finally:
                is_closed = True

    async def receive() -> Any:
        return {"type": "http.request", "body": b'{"inputs": ["a"]}'}

    async def send(_: Any) -> None:
        raise OSError  # as some servers do if the client has disconnected

    stub = StubService(np.ones((1, 4), np.float32))
    routes = NativeRoutes(cast("Any", stub), cast("Any", Methods()), max_texts=1).routes()
    await stub.app(routes)({**posted("/v1/attnlens/encode_stream"), ABORT: None}, receive, send)
    assert is_closed
