"""Whatever a client sends, it gets a result or is told what is wrong with it."""

import grpc
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from failures import read_failure

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
numbers = st.integers(-(2**31), 2**31 - 1)
inputs = st.one_of(
    st.builds(pb.Input, text=texts),
    st.builds(
        lambda ids: pb.Input(token_ids=pb.TokenIds(ids=ids)), st.lists(st.integers(-1, 40_000), max_size=20)
    ),
    st.just(pb.Input()),
)
embed_requests = st.builds(
    pb.EmbedRequest,
    model=st.one_of(st.sampled_from(["", "all-MiniLM-L6-v2"]), texts),
    inputs=st.lists(inputs, max_size=4),
    truncate=st.booleans(),
    pooling=st.integers(-1, 7),
    normalize=st.booleans(),
    dimensions=st.one_of(st.integers(0, 400), numbers),
    data_type=st.integers(-1, 4),
)
prompted = st.one_of(
    st.builds(dict),
    st.builds(lambda text: {"prompt": text}, texts),
    st.builds(lambda name: {"prompt_name": name}, texts),
)
encode_requests = st.builds(
    pb.EncodeRequest,
    inputs=st.lists(inputs, max_size=3),
    outputs=st.lists(st.integers(0, 3), max_size=3),
    layers=st.lists(st.one_of(st.integers(-7, 7), numbers), max_size=4),
    heads=st.lists(st.integers(-13, 13), max_size=4),
    head_reduction=st.integers(0, 3),
    data_type=st.integers(0, 3),
)
quietly = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}


@given(embed_requests, prompted)
@quietly
def test_embed_answers_or_refuses(
    stub: EncoderServiceStub, request: pb.EmbedRequest, prompt: dict[str, str]
) -> None:
    request.MergeFrom(pb.EmbedRequest(**prompt))  # type: ignore[arg-type]
    try:
        response = stub.Embed(request, timeout=60)
    except grpc.RpcError as error:
        assert read_failure(error).code in REFUSALS
        return
    vectors = from_tensor(response.embeddings)
    assert vectors.shape == (len(request.inputs), request.dimensions or 384)
    assert np.isfinite(vectors).all()


@given(encode_requests)
@quietly
def test_encode_answers_or_refuses(stub: EncoderServiceStub, request: pb.EncodeRequest) -> None:
    try:
        response = stub.Encode(request, timeout=60)
    except grpc.RpcError as error:
        assert read_failure(error).code in REFUSALS
        return
    assert len(response.results) == len(request.inputs)
    for result in response.results:
        if pb.ENCODE_OUTPUT_ATTENTIONS in request.outputs:
            weights = from_tensor(result.attention.weights).astype(np.float32)
            np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=2e-2 if request.data_type == 2 else 1e-5)
