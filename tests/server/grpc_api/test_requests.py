"""The server's enums match the protocol's, and messages are converted to jobs."""

from enum import IntEnum
from typing import Any

import pytest

from attnlens.embedding_types import EmbeddingType
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1 import manifest_pb2
from attnlens.v1.tensor_pb2 import DATA_TYPE_FLOAT16
from attnlens_server.bundle import Layout, OutputRole, RowSum
from attnlens_server.grpc_api.requests import MAX_INDICES, embed_request, encode_request
from attnlens_server.operations.attention import AttentionView
from attnlens_server.operations.inputs import Prompt
from attnlens_server.operations.values import FLOAT16
from attnlens_server.text import Input, TextPair, TokenSource

# Kinds of graph output that no query selects.
NO_LAYER_OUTPUTS = {"EMBEDDING", "TOKEN_CONTRIBUTIONS", "BASELINE", "HEAD_CONTRIBUTIONS"}


@pytest.mark.parametrize(
    ("server_enum", "protocol_enum", "prefix", "not_served"),
    [
        (OutputRole, manifest_pb2.OutputRole, "OUTPUT_ROLE_", NO_LAYER_OUTPUTS),
        (Layout, manifest_pb2.OutputLayout, "OUTPUT_LAYOUT_", set()),
        (RowSum, manifest_pb2.RowSum, "ROW_SUM_", set()),
        (AttentionView, pb.AttentionView, "ATTENTION_VIEW_", set()),
        (TokenSource, pb.TokenSource, "TOKEN_SOURCE_", set()),
        (EmbeddingType, pb.EmbeddingType, "EMBEDDING_TYPE_", set()),
    ],
)
def test_enums_have_the_names_and_numbers_of_the_protocol(
    server_enum: type[IntEnum], protocol_enum: Any, prefix: str, not_served: set[str]
) -> None:
    expected = {name.removeprefix(prefix): number for name, number in protocol_enum.items() if number}
    found = {member.name: member.value for member in server_enum if member}
    assert found == {name: number for name, number in expected.items() if name not in not_served}


def test_unset_fields_of_a_message_are_left_to_the_model() -> None:
    job = embed_request(pb.EmbedRequest(inputs=[pb.Input(text="a")]))
    assert (job.prompt, job.pooling, job.normalize, job.dimensions) == (None, None, None, 0)
    pair = pb.Input(text_pair=pb.TextPair(first="a", second="b"))
    request = pb.EmbedRequest(
        inputs=[pair, pb.Input()], normalize=False, data_type=DATA_TYPE_FLOAT16, prompt=pb.Prompt(text="")
    )
    job = embed_request(request)
    assert job.inputs == [Input(text_pair=TextPair("a", "b")), Input()]
    assert (job.prompt, job.normalize, job.data_type) == (Prompt(text=""), False, FLOAT16)
    assert not job.violations


def test_job_keeps_no_reference_to_the_message() -> None:
    """A view of one field would keep the message alive, which may be many times larger."""
    given = pb.Input(token_ids=pb.TokenIds(input_ids=[101, 102], token_type_ids=[0, 1]))
    request = pb.EncodeRequest(inputs=[given], attention=[pb.AttentionQuery(layers=[1], heads=[2])])
    job = encode_request(request)
    ids, query = request.inputs[0].token_ids, request.attention[0]
    for numbers in (ids.input_ids, ids.token_type_ids, query.layers, query.heads):
        numbers[0] = 7
    copied = job.inputs[0].token_ids
    assert copied is not None
    found = (copied.input_ids, copied.token_type_ids, job.attention[0].layers, job.attention[0].heads)
    assert [list(each) for each in found] == [[101, 102], [0, 1], [1], [2]]


def test_overlong_lists_are_not_copied_completely() -> None:
    query = pb.AttentionQuery(layers=[0] * 100_000, heads=[0] * 100_000)
    [read] = encode_request(pb.EncodeRequest(inputs=[pb.Input(text="a")], attention=[query])).attention
    assert (len(read.layers), len(read.heads)) == (MAX_INDICES + 1, MAX_INDICES + 1)


def test_token_ids_count_towards_the_memory_of_a_job() -> None:
    job = embed_request(pb.EmbedRequest(inputs=[pb.Input(token_ids=pb.TokenIds(input_ids=range(10_000)))]))
    assert job.memory_bytes > 40_000


def test_both_attention_requests_become_the_same_job() -> None:
    fields: dict[str, Any] = {
        "inputs": [pb.Input(text="a")],
        "attention": [pb.AttentionQuery(layers=[1], view=pb.ATTENTION_VIEW_HEAD_MEAN)],
        "last_hidden_state": True,
    }
    job = encode_request(pb.EncodeRequest(**fields))
    assert job == encode_request(pb.EncodeStreamRequest(**fields))
    [query] = job.attention
    assert (query.role, query.view) == (OutputRole.ATTENTION_WEIGHTS, AttentionView.HEAD_MEAN)
    assert (list(query.layers), list(query.heads)) == ([1], [])
