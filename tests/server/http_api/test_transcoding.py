"""Conversion between JSON and messages, compared with protobuf's own JSON mapping."""

import json
import math
from typing import Any

import numpy as np
import orjson
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from attnlens.tensors import to_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.explanation_pb2 import (
    EXPLAIN_METHOD_CONTRIBUTIONS,
    EXPLAIN_METHOD_LEAVE_ONE_OUT,
    PAIR_MATRIX_INTERACTION,
)
from attnlens.v1.manifest_pb2 import POOLING_CLS
from attnlens.v1.tensor_pb2 import DATA_TYPE_FLOAT16, DATA_TYPE_FLOAT32
from attnlens_server.errors import InvalidFieldsError
from attnlens_server.grpc_api.calls import MAX_OTHER_FIELDS
from attnlens_server.http_api.exchange import HttpError, encode_json
from attnlens_server.http_api.transcoding import fill_message, message_value, parse_json

MAX_TEXTS = 8
INPUTS = [
    pb.Input(text="Zoë 東京 😀"),
    pb.Input(text_pair=pb.TextPair(first="a", second="")),
    pb.Input(token_ids=pb.TokenIds(input_ids=[101, 102], token_type_ids=[0, 1])),
]
REQUESTS: list[Message] = [
    pb.EmbedRequest(
        inputs=INPUTS, prompt=pb.Prompt(text=""), pooling=POOLING_CLS, normalize=False, dimensions=7
    ),
    pb.EncodeRequest(
        inputs=INPUTS,
        attention=[
            pb.AttentionQuery(layers=[-1, 2], view=pb.ATTENTION_VIEW_HEAD_MEAN),
            pb.AttentionQuery(
                reduction=pb.AttentionReduction(
                    rollout_residual=0.25, rows=[1, 3], threshold=pb.Threshold(threshold=0.5)
                )
            ),
            pb.AttentionQuery(reduction=pb.AttentionReduction(sqrt_uint8=pb.SqrtUint8())),
        ],
    ),
    pb.ExplainRequest(
        inputs=INPUTS,
        direction=to_tensor(np.array([0.1, -2], np.float32), DATA_TYPE_FLOAT32),
        methods=[EXPLAIN_METHOD_CONTRIBUTIONS, EXPLAIN_METHOD_LEAVE_ONE_OUT],
    ),
    pb.ExplainRequest(own_embedding=pb.OwnEmbedding()),
    pb.CompareRequest(
        pairs=[pb.ComparedPair(a=INPUTS[0], b=INPUTS[1])], matrix=PAIR_MATRIX_INTERACTION, truncate=True
    ),
]


def filled(message_class: type[Message], content: dict[str, Any]) -> Any:
    message = message_class()
    fill_message(message, content, MAX_TEXTS)
    return message


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_messages_that_protobuf_writes_are_read_unchanged(message: Message) -> None:
    for keeps_names in (False, True):
        content = json_format.MessageToDict(message, preserving_proto_field_name=keeps_names)
        assert filled(type(message), content) == message


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_own_form_is_read_unchanged(message: Message) -> None:
    content = json.loads(encode_json(message_value(message, as_base64=True)))
    assert filled(type(message), content) == message


def test_texts_may_be_strings_and_enums_short() -> None:
    content = {"inputs": ["one", {"text": "two"}], "contrast": {"to": "x", "rather_than": "y"}}
    request = filled(pb.ExplainRequest, {**content, "methods": ["rollout", "EXPLAIN_METHOD_OUTPUT_SHARE", 3]})
    assert [each.text for each in request.inputs] == ["one", "two"]
    assert (request.contrast.to.text, request.contrast.rather_than.text) == ("x", "y")
    assert request.methods == [4, 2, 3]


def test_directions_may_be_lists_and_null_is_unset() -> None:
    request = filled(pb.ExplainRequest, {"direction": [0.1, 2], "prompt": None})
    assert np.frombuffer(request.direction.data, "<f4").tolist() == np.array([0.1, 2], np.float32).tolist()
    assert not request.HasField("prompt")


@pytest.mark.parametrize(
    ("content", "field", "description"),
    [
        ({"inptus": []}, "inptus", "is unknown: use model, inputs, "),
        ({"inputs": [{"txt": "a"}]}, "inputs[0].txt", "is unknown: use text, text_pair, token_ids"),
        ({"inputs": "a"}, "inputs", "is not a list"),
        ({"inputs": ["a", 3]}, "inputs[1]", "is 3: send a string or an object"),
        ({"inputs": [{"text": 3}]}, "inputs[0].text", "is 3: send a string"),
        ({"inputs": [{"text": "a", "textPair": {}}]}, "inputs[0].textPair", "is set in addition to text"),
        ({"inputs": [{"token_ids": {"input_ids": [1, 1 << 40]}}]}, "inputs[0].token_ids.input_ids", "range"),
        ({"inputs": [{"token_ids": {"input_ids": [1, 0.5]}}]}, "inputs[0].token_ids.input_ids[1]", "integer"),
        ({"inputs": ["a"] * 9}, "inputs", "has more than 8 texts"),
        ({"prompt": "query"}, "prompt", "is query: send an object"),
        ({"truncate": 1}, "truncate", "is 1: use true or false"),
        ({"dimensions": True}, "dimensions", "is true: send a number"),
        ({"dimensions": 1e300}, "dimensions", "is out of range"),
        ({"dimensions": math.inf}, "dimensions", "send an integer"),
        ({"dimensions": 1 << 31}, "dimensions", "is out of range"),
        ({"pooling": "mode"}, "pooling", "is mode: use one of unspecified, mean, cls"),
        ({"pooling": ["mean"]}, "pooling", "use one of"),
        ({"pooling": 1 << 40}, "pooling", "is out of range"),
        ({"x" * 99: 1}, "x" * 40 + "...", "is unknown"),
    ],
)
def test_invalid_fields_are_named(content: dict[str, Any], field: str, description: str) -> None:
    with pytest.raises(InvalidFieldsError) as caught:
        filled(pb.EmbedRequest, content)
    [violation] = caught.value.violations
    assert violation.field == field
    assert description in violation.description


@pytest.mark.parametrize(
    ("direction", "description"),
    [
        ([[1], [1, 2]], "is not a rectangular array"),
        (["1"], "is not an array of numbers"),
        ([True], "is not an array of numbers"),
        ("AAAA", "is AAAA: send a list or an object"),
        ({"shape": [1], "data": "?"}, "is not valid base64"),
    ],
)
def test_invalid_arrays_are_rejected(direction: Any, description: str) -> None:
    with pytest.raises(InvalidFieldsError, match="direction") as caught:
        filled(pb.ExplainRequest, {"direction": direction})
    assert description in caught.value.message


def test_many_submessages_are_rejected_before_they_are_built() -> None:
    with pytest.raises(InvalidFieldsError, match=f"attention has more than {MAX_OTHER_FIELDS} entries"):
        filled(pb.EncodeRequest, {"attention": [{}] * (MAX_OTHER_FIELDS + 1)})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b"[" * 100_000, b'{"a": "\\ud800"}', b"\xff"])
def test_bodies_that_are_not_objects_are_rejected(body: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        parse_json(body)
    assert (caught.value.http_status, caught.value.reason) == (400, "MALFORMED_REQUEST")


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=1, max_dims=4, max_side=4), elements=FLOATS))
def test_digits_of_lists_are_exact(array: np.ndarray[Any, Any]) -> None:
    response = pb.EmbedResponse(embeddings=to_tensor(array, DATA_TYPE_FLOAT32))
    content = json.loads(encode_json(message_value(response, as_base64=False)))
    read = np.array(content["embeddings"], np.float32)
    assert (read.shape, read.tobytes()) == (array.shape, array.tobytes())


def test_nan_is_null_and_other_types_keep_their_values() -> None:
    half = pb.EmbedResponse(embeddings=to_tensor(np.array([[0.1, math.nan]]), DATA_TYPE_FLOAT16))
    content = json.loads(encode_json(message_value(half, as_base64=False)))
    [[value, missing]] = content["embeddings"]
    assert missing is None
    assert np.float16(value) == np.float16(0.1)


def test_unset_fields_are_omitted_and_others_written() -> None:
    token = pb.Token(id=5, text="a", source=pb.TOKEN_SOURCE_TEXT)
    response = pb.TokenizeResponse(results=[pb.TokenizedText(tokens=[token])])
    content = json.loads(encode_json(message_value(response, as_base64=False)))
    [result] = content["results"]
    offsets = dict.fromkeys(("byte_start", "byte_end", "char_start", "char_end"), 0)
    assert result == {
        "tokens": [{"id": 5, "text": "a", "source": "text", **offsets}],
        "exceeds_max_tokens": False,
    }


@pytest.mark.parametrize("shape", [(5,), (0,), (0, 3), (3, 4), (1, 100_000), (2, 3, 40_000), (100, 500)])
def test_arrays_in_pieces_have_the_bytes_of_orjson(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    value = {"a": np.asarray(array), "b": ["\0", np.ones(2, np.float32)], "c": None}
    assert encode_json(value) == orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
