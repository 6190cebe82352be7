"""From bytes to requests, and how much of them is looked at before they are refused."""

from typing import TypeVar

import pytest
from google.protobuf.message import Message

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_server.errors import InvalidFieldsError, MalformedRequestError
from attnlens_server.grpc_api.calls import SMALL_BYTES, Parser

INPUTS = pb.EmbedRequest.INPUTS_FIELD_NUMBER
AnyRequest = TypeVar("AnyRequest", bound=Message)


def parser_of(
    message_class: type[AnyRequest], max_texts: int, inputs_number: int | None = INPUTS
) -> Parser[AnyRequest, AnyRequest]:
    """A parser that leaves a request as it is."""
    return Parser(message_class, lambda request: request, inputs_number, max_texts)


def test_a_message_of_millions_of_texts_is_refused_by_its_first_ones() -> None:
    parser = parser_of(pb.EmbedRequest, 512)
    broken_behind = b"\x12\x00" * 2000 + b"\xff" * SMALL_BYTES  # a parser would say that it is no message
    with pytest.raises(InvalidFieldsError, match="inputs has more than 512 texts") as caught:
        parser.parse(broken_behind)
    assert caught.value.violations[0].field == "inputs"


def test_as_many_texts_as_a_request_may_have_are_parsed() -> None:
    parser = parser_of(pb.EncodeStreamRequest, 3)
    request = pb.EncodeStreamRequest(inputs=[pb.Input(text="x" * SMALL_BYTES)] * 3)
    assert parser.parse(request.SerializeToString()) == request
    request.inputs.add(text="one too many")
    with pytest.raises(InvalidFieldsError) as caught:
        parser.parse(request.SerializeToString())
    assert caught.value.violations[0].field == "inputs"


def test_a_small_message_is_left_to_the_checks_that_count_exactly() -> None:
    request = pb.EmbedRequest(inputs=[pb.Input(text="a")] * 5)
    assert parser_of(pb.EmbedRequest, 3).parse(request.SerializeToString()) == request


@pytest.mark.parametrize("data", [b"\xff" * 11, b"\x12\x7f", b"\x0b", b"\x0b" + bytes(SMALL_BYTES)])
def test_what_is_no_message_is_named_with_its_size(data: bytes) -> None:
    with pytest.raises(MalformedRequestError, match=f"the {len(data)} bytes .* attnlens.v1.EmbedRequest"):
        parser_of(pb.EmbedRequest, 3).parse(data)


@pytest.mark.parametrize(
    "field",
    [b"\x18\x01", b"\x32\x00"],
    ids=["truncate", "an empty query"],
)
def test_fields_without_end_are_not_all_looked_at(field: bytes) -> None:
    broken_behind = field * 40_000 + b"\xff" * 11
    with pytest.raises(InvalidFieldsError, match="inputs is among more than 1024 other fields"):
        parser_of(pb.EncodeRequest, 512).parse(broken_behind)


def test_what_hides_texts_behind_a_group_is_no_message_of_ours() -> None:
    """A parser skips a group that it does not know, and reads on."""
    with pytest.raises(MalformedRequestError):
        parser_of(pb.EmbedRequest, 512).parse(b"\x7b\x7c" + b"\x12\x00" * SMALL_BYTES)
