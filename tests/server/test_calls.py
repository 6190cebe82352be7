"""From bytes to requests, and how much of them is looked at before they are refused."""

import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_server.calls import SMALL_BYTES, Parser
from attnlens_server.errors import InvalidFieldsError, MalformedRequestError

INPUTS = {"inputs": 2}
STREAM = {"encode": 1, "inputs": 2}


def test_a_message_of_millions_of_texts_is_refused_by_its_first_ones() -> None:
    parser = Parser(pb.EmbedRequest, INPUTS, max_texts=512)
    broken_behind = b"\x12\x00" * 2000 + b"\xff" * SMALL_BYTES  # a parser would say that it is no message
    with pytest.raises(InvalidFieldsError, match="inputs has more than 512 texts") as caught:
        parser.parse(broken_behind)
    assert caught.value.violations[0].field == "inputs"


def test_texts_are_counted_inside_a_message() -> None:
    parser = Parser(pb.EncodeStreamRequest, STREAM, max_texts=3)
    request = pb.EncodeStreamRequest()
    request.encode.inputs.extend([pb.Input(text="x" * SMALL_BYTES)] * 3)
    assert parser.parse(request.SerializeToString()) == request
    request.encode.inputs.add(text="one too many")
    with pytest.raises(InvalidFieldsError) as caught:
        parser.parse(request.SerializeToString())
    assert caught.value.violations[0].field == "encode.inputs"


def test_a_small_message_is_left_to_the_checks_that_count_exactly() -> None:
    request = pb.EmbedRequest(inputs=[pb.Input(text="a")] * 5)
    assert Parser(pb.EmbedRequest, INPUTS, max_texts=3).parse(request.SerializeToString()) == request


@pytest.mark.parametrize("data", [b"\xff" * 11, b"\x12\x7f", b"\x0b", b"\x0b" + bytes(SMALL_BYTES)])
def test_what_is_no_message_is_named_with_its_size(data: bytes) -> None:
    with pytest.raises(MalformedRequestError, match=f"the {len(data)} bytes .* attnlens.v1.EmbedRequest"):
        Parser(pb.EmbedRequest, INPUTS, max_texts=3).parse(data)


@pytest.mark.parametrize(
    ("message_class", "path", "field"),
    [
        (pb.EmbedRequest, INPUTS, b"\x18\x01"),  # truncate
        (pb.EncodeRequest, INPUTS, b"\x28\x01"),  # a layer, not packed
        (pb.EncodeStreamRequest, STREAM, b"\x0a\x00"),  # an empty request in the request
        (pb.EncodeStreamRequest, STREAM, b"\x0a\x02\x18\x01"),
    ],
)
def test_fields_without_end_are_not_all_looked_at(
    message_class: type[pb.EmbedRequest], path: dict[str, int], field: bytes
) -> None:
    broken_behind = field * 40_000 + b"\xff" * 11
    with pytest.raises(
        InvalidFieldsError, match=r"inputs (is among more than 1536 fields|has more than 512 texts)"
    ):
        Parser(message_class, path, max_texts=512).parse(broken_behind)


def test_what_hides_texts_behind_a_group_is_no_message_of_ours() -> None:
    """A parser skips a group that it does not know, and reads on."""
    with pytest.raises(MalformedRequestError):
        Parser(pb.EmbedRequest, INPUTS, max_texts=512).parse(b"\x7b\x7c" + b"\x12\x00" * SMALL_BYTES)
