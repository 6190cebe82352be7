"""Every request gets a result or an error that names the problem."""

from typing import Any

import grpc
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnlens.tensors import from_tensor, to_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.tensor_pb2 import DataType, Tensor
from failures import read_failure

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
numbers = st.integers(-(2**31), 2**31 - 1)
ids = st.builds(
    pb.TokenIds,
    input_ids=st.lists(st.integers(-1, 40_000), max_size=20),
    token_type_ids=st.lists(st.integers(-1, 2), max_size=3),
)
inputs = st.one_of(
    st.builds(pb.Input, text=texts),
    st.builds(pb.Input, text_pair=st.builds(pb.TextPair, first=texts, second=texts)),
    st.builds(pb.Input, token_ids=ids),
    st.just(pb.Input()),
)
prompts = st.one_of(
    st.none(),
    st.builds(pb.Prompt),
    st.builds(pb.Prompt, text=texts),
    st.builds(pb.Prompt, name=texts),
)
embed_requests = st.builds(
    pb.EmbedRequest,
    model=st.one_of(st.sampled_from(["", "all-MiniLM-L6-v2"]), texts),
    inputs=st.lists(inputs, max_size=4),
    prompt=prompts,
    truncate=st.booleans(),
    pooling=st.integers(-1, 7),
    normalize=st.booleans(),
    dimensions=st.one_of(st.integers(0, 400), numbers),
    data_type=st.integers(-1, 4),
)
queries = st.builds(
    pb.AttentionQuery,
    role=st.sampled_from([0, 0, 2, 2, 2, 5, 9]),
    layers=st.lists(st.one_of(st.integers(-7, 7), numbers), max_size=4),
    heads=st.lists(st.integers(-13, 13), max_size=4),
    view=st.integers(0, 3),
)
encode_requests = st.builds(
    pb.EncodeRequest,
    inputs=st.lists(inputs, max_size=3),
    prompt=prompts,
    last_hidden_state=st.booleans(),
    attention=st.lists(queries, max_size=3),
    data_type=st.integers(0, 3),
)
tensors = st.one_of(
    st.builds(Tensor, shape=st.lists(st.integers(-1, 400), max_size=3), data=st.binary(max_size=20)),
    st.builds(
        lambda row: to_tensor(np.array(row, np.float32), DataType.DATA_TYPE_FLOAT32),
        st.lists(st.floats(width=32), min_size=384, max_size=384) | st.just([0.5] * 384),
    ),
)
methods = st.lists(st.integers(0, 6), max_size=4)
explain_fields: dict[str, st.SearchStrategy[Any]] = {
    "truncate": st.booleans(),
    "pooling": st.integers(0, 7),
    "dimensions": st.sampled_from([0, 0, 7, 400]),
    "methods": methods,
    "level": st.integers(0, 3),
    "head_contributions": st.booleans(),
}
explain_requests = st.builds(
    lambda target, **fields: pb.ExplainRequest(**fields, **target),
    inputs=st.lists(inputs, max_size=3),
    prompt=prompts,
    target=st.one_of(
        st.just({}),
        st.builds(lambda to: {"to": to}, inputs),
        st.builds(lambda direction: {"direction": direction}, tensors),
        st.builds(
            lambda to, rather_than: {"contrast": pb.Contrast(to=to, rather_than=rather_than)}, inputs, inputs
        ),
    ),
    **explain_fields,
)
compare_requests = st.builds(
    pb.CompareRequest,
    pairs=st.lists(st.builds(pb.ComparedPair, a=inputs, b=inputs), max_size=2),
    prompt_a=prompts,
    prompt_b=prompts,
    matrix=st.integers(0, 3),
    **explain_fields,
)
quietly = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CLIENT_ERRORS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}


@given(embed_requests)
@quietly
def test_embed_returns_a_result_or_a_clear_error(stub: EncoderServiceStub, request: pb.EmbedRequest) -> None:
    try:
        response = stub.Embed(request, timeout=60)
    except grpc.RpcError as error:
        assert read_failure(error).code in CLIENT_ERRORS
        return
    vectors = from_tensor(response.embeddings)
    assert vectors.shape == (len(request.inputs), request.dimensions or 384)
    assert np.isfinite(vectors).all()


@given(encode_requests)
@quietly
def test_encode_returns_a_result_or_a_clear_error(
    stub: EncoderServiceStub, request: pb.EncodeRequest
) -> None:
    try:
        response = stub.Encode(request, timeout=60)
    except grpc.RpcError as error:
        assert read_failure(error).code in CLIENT_ERRORS
        return
    assert len(response.results) == len(request.inputs)
    for result in response.results:
        assert len(result.attention) == len(request.attention)
        for attention in result.attention:
            weights = from_tensor(attention.dense).astype(np.float32)
            np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=2e-2 if request.data_type == 2 else 1e-5)


@given(explain_requests)
@quietly
def test_explain_returns_a_result_or_a_clear_error(
    stub: EncoderServiceStub, request: pb.ExplainRequest
) -> None:
    try:
        response = stub.Explain(request, timeout=60)
    except grpc.RpcError as error:
        assert read_failure(error).code in CLIENT_ERRORS
        return
    assert len(response.results) == len(request.inputs)
    for text in response.results:
        for scores in text.scores:
            values = from_tensor(scores.values)
            if scores.HasField("expected_sum"):
                size = np.abs(values).sum(dtype=np.float64) + abs(scores.baseline)
                assert abs(scores.sum - scores.expected_sum) <= 1e-4 * max(1, size)


@given(compare_requests)
@quietly
def test_compare_returns_a_result_or_a_clear_error(
    stub: EncoderServiceStub, request: pb.CompareRequest
) -> None:
    try:
        response = stub.Compare(request, timeout=60)
    except grpc.RpcError as error:
        assert read_failure(error).code in CLIENT_ERRORS
        return
    assert len(response.results) == len(request.pairs)
    assert all(abs(pair.similarity) <= 1 + 1e-6 for pair in response.results)
