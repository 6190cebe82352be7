"""Vectors that overflow float16, produced by a bundle whose last norm scales them up."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest

from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.tensor_pb2 import DataType
from attnlens_server.errors import InvalidFieldsError
from attnlens_server.operations.values import FLOAT16, FLOAT32, check_range
from failures import read_failure
from served import ServerProcess

HALF = DataType.DATA_TYPE_FLOAT16
INPUTS = [pb.Input(text="a cat")]


@pytest.fixture(scope="module")
def scaled_bundle(small_bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose token vectors exceed 65504: about 100,000 times their original length."""
    bundle = tmp_path_factory.mktemp("loud") / "bundle"
    shutil.copytree(small_bundle("wordpiece"), bundle)
    graph = onnx.load(bundle / "onnx" / "model.onnx")
    [weight] = [tensor for tensor in graph.graph.initializer if tensor.name == "layers.0.output_norm.weight"]
    scaled_weight = (100_000 * onnx.numpy_helper.to_array(weight)).tobytes()
    manifest = json.loads((bundle / "manifest.json").read_text())
    for file in manifest["files"]:
        path = bundle / file["path"]
        if path.suffix == ".onnx":
            content = path.read_bytes()
            assert content.count(weight.raw_data) <= 1  # the graphs may share the tensor
            path.write_bytes(content.replace(weight.raw_data, scaled_weight))
            file["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    return bundle


@pytest.fixture(scope="module")
def stub(scaled_bundle: Path) -> Iterator[EncoderServiceStub]:
    with (
        ServerProcess(scaled_bundle, "--provider", "cpu") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        yield EncoderServiceStub(channel)


def test_float16_overflow_is_rejected_with_the_largest_value(stub: EncoderServiceStub) -> None:
    embedding = from_tensor(stub.Embed(pb.EmbedRequest(inputs=INPUTS, normalize=False)).embeddings)
    [text] = stub.Encode(pb.EncodeRequest(inputs=INPUTS)).results
    expected = {"Embed": embedding, "Encode": from_tensor(text.last_hidden_state)}
    encode = pb.EncodeRequest(inputs=INPUTS, data_type=HALF)
    calls: dict[str, Callable[[], Any]] = {
        "Embed": lambda: stub.Embed(pb.EmbedRequest(inputs=INPUTS, normalize=False, data_type=HALF)),
        "Encode": lambda: stub.Encode(encode),
    }
    for name, call in calls.items():
        largest = expected[name].flat[np.abs(expected[name]).argmax()]
        with pytest.raises(grpc.RpcError) as caught:
            call()
        failure = read_failure(caught.value)
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert failure.violations == {
            "data_type": "is DATA_TYPE_FLOAT16, whose maximum is 65504, but the result has the value "
            f"{largest:.6g}: use DATA_TYPE_FLOAT32"
        }
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.EncodeStream(pb.EncodeStreamRequest(inputs=INPUTS, data_type=HALF)))
    assert list(read_failure(caught.value).violations) == ["data_type"]


def test_values_in_the_float16_range_are_returned(stub: EncoderServiceStub) -> None:
    embedding = from_tensor(
        stub.Embed(pb.EmbedRequest(inputs=INPUTS, data_type=HALF, normalize=True)).embeddings
    )
    assert np.linalg.norm(embedding.astype(np.float32)) == pytest.approx(1, abs=1e-3)
    request = pb.EncodeRequest(inputs=INPUTS, attention=[pb.AttentionQuery()], data_type=HALF)
    [text] = stub.Encode(request).results
    assert from_tensor(text.attention[0].dense).dtype == np.float16


@pytest.mark.parametrize(
    ("value", "is_rejected"),
    [(-65504, False), (65505, True), (-65505, True), (np.inf, False), (np.nan, False)],
)
def test_only_values_lost_in_float16_are_rejected(value: float, *, is_rejected: bool) -> None:
    vectors = np.array([[1, value]], dtype=np.float32)
    check_range(vectors, FLOAT32)
    if is_rejected:
        with pytest.raises(InvalidFieldsError, match=f"the value {value}:"):
            check_range(vectors, FLOAT16)
    else:
        check_range(vectors, FLOAT16)
