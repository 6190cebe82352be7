"""Quantized embeddings of a real server, through each client."""

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import attnlens_server
from attnlens.embedding_types import EmbeddingType, quantize
from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.tensor_pb2 import DataType, Tensor
from attnlens_client import BadReplyError, Client, InvalidRequestError
from attnlens_server.errors import StartupError
from attnlens_server.operations.values import FLOAT32
from failures import read_failure
from references import TEXTS
from scripted import ScriptedServer, vectors
from served import ServerProcess

Call = Callable[..., Any]
RANGES = np.stack([np.full(384, -0.12), np.full(384, 0.1)]).astype(np.float32)
TYPES = ("int8", "uint8", "binary", "ubinary")


def write_ranges(bundle: Path, ranges: Any) -> None:
    """Replace the ranges in the manifest. None removes them, as in a bundle of an earlier version."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest.pop("embedding_ranges", None)
    if ranges is not None:
        data = base64.b64encode(ranges.astype("<f4").tobytes()).decode()
        values = {"data_type": "DATA_TYPE_FLOAT32", "shape": ranges.shape, "data": data}
        manifest["embedding_ranges"] = {"values": values, "num_texts": 5}
    (bundle / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def bundle(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copied = Path(shutil.copytree(minilm_bundle, tmp_path_factory.mktemp("ranges") / "bundle"))
    write_ranges(copied, RANGES)
    return copied


@pytest.fixture(scope="module")
def address(bundle: Path) -> Iterator[str]:
    with ServerProcess(bundle) as server:
        yield server.address


@pytest.fixture(scope="module")
def old_bundle(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copied = Path(shutil.copytree(minilm_bundle, tmp_path_factory.mktemp("old") / "bundle"))
    write_ranges(copied, None)
    return copied


@pytest.mark.parametrize("embedding_type", TYPES)
def test_quantized_embeddings_equal_the_quantized_floats_in_any_batch(
    embedding_type: str, address: str, connect: Call
) -> None:
    with connect(address) as call:
        floats = call("embed", TEXTS)
        expected = quantize(floats, EmbeddingType[embedding_type.upper()], RANGES)
        together = call("embed", TEXTS, embedding_type=embedding_type)
        alone = [call("embed", [text], embedding_type=embedding_type)[0] for text in TEXTS]
        [*batches] = call("embed_iter", TEXTS, embedding_type=embedding_type, batch_size=4)
        empty = call("embed", [], embedding_type=embedding_type)
    assert together.dtype == expected.dtype
    np.testing.assert_array_equal(together, expected)
    np.testing.assert_array_equal(alone, expected)
    np.testing.assert_array_equal(np.concatenate([batch.vectors for batch in batches]), expected)
    assert (empty.dtype, empty.shape) == (expected.dtype, (0, expected.shape[1]))


def test_model_in_this_process_returns_the_same_bytes(bundle: Path, address: str) -> None:
    with attnlens_server.local(bundle, threads=1) as model, Client(address) as client:
        for embedding_type in ("int8", "binary"):
            found, expected = (each.embed(TEXTS, embedding_type=embedding_type) for each in (model, client))
            np.testing.assert_array_equal(found, expected)


def test_ranges_are_returned(address: str, connect: Call) -> None:
    with connect(address, batch_size=2) as call:
        measured = call("embed_with_usage", TEXTS, embedding_type="uint8")
        chosen = call(
            "embed_with_usage", TEXTS, embedding_type="uint8", dimensions=9, ranges=2 * RANGES[:, :9]
        )
        binary = call("embed_with_usage", TEXTS, embedding_type="binary")
        floats = call("embed", TEXTS, dimensions=9)
    np.testing.assert_array_equal(measured.ranges, RANGES)
    np.testing.assert_array_equal(chosen.ranges, 2 * RANGES[:, :9])
    np.testing.assert_array_equal(chosen.vectors, quantize(floats, EmbeddingType.UINT8, 2 * RANGES[:, :9]))
    assert binary.ranges is None


def test_bits_need_no_ranges_for_any_dimensions(address: str) -> None:
    options: dict[str, Any] = {"pooling": "cls", "normalize": False, "dimensions": 13}
    with Client(address) as client:
        found = client.embed(TEXTS, embedding_type="ubinary", **options)
        assert found.shape == (len(TEXTS), 2)
        np.testing.assert_array_equal(found, np.packbits(client.embed(TEXTS, **options) > 0, axis=1))


def test_bundle_without_ranges_needs_them_in_the_request(old_bundle: Path) -> None:
    with attnlens_server.local(old_bundle, threads=1) as model:
        floats = model.embed(TEXTS)
        np.testing.assert_array_equal(
            model.embed(TEXTS, embedding_type="binary"), quantize(floats, EmbeddingType.BINARY)
        )
        np.testing.assert_array_equal(
            model.embed(TEXTS, embedding_type="int8", ranges=RANGES),
            quantize(floats, EmbeddingType.INT8, RANGES),
        )
        message = (
            r"needs ranges, and the bundle does not contain any: send ranges of shape \[2, 384\], or export"
        )
        with pytest.raises(InvalidRequestError, match=message):
            model.embed(TEXTS, embedding_type="int8")


@pytest.mark.parametrize(
    ("fields", "field", "description"),
    [
        (
            {"embedding_type": 2, "data_type": DataType.DATA_TYPE_FLOAT32},
            "data_type",
            "is set, but embedding_type is EMBEDDING_TYPE_INT8: omit it",
        ),
        (
            {"embedding_type": 9},
            "embedding_type",
            f"is 9: use one of {', '.join(name for name, number in pb.EmbeddingType.items() if number)}",
        ),
        (
            {"embedding_type": 2, "ranges": Tensor(data_type=DataType.DATA_TYPE_INT8)},
            "ranges.data_type",
            "is 7: use DATA_TYPE_FLOAT32",
        ),
        (
            {"embedding_type": 2, "ranges": Tensor(shape=[2, 384], data=b"abc")},
            "ranges",
            "is not a valid tensor: 3 bytes of float32 do not fill the shape (2, 384)",
        ),
        (
            {"embedding_type": 2, "ranges": Tensor()},
            "ranges",
            "is not a valid tensor: 0 bytes of float32 do not fill the shape ()",
        ),
        (
            {"ranges": Tensor(shape=[1], data=bytes(4))},
            "ranges",
            "is set, but embedding_type is EMBEDDING_TYPE_FLOAT, which does not use ranges: omit it",
        ),
    ],
)
def test_invalid_fields_are_rejected(
    address: str, fields: dict[str, Any], field: str, description: str
) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        EncoderServiceStub(channel).Embed(pb.EmbedRequest(inputs=[pb.Input(text="a")], **fields))
    failure = read_failure(caught.value)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failure.violations == {field: description}


def test_response_of_the_default_type_has_no_ranges(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = EncoderServiceStub(channel)
        inputs = [pb.Input(text="a")]
        one = stub.Embed(pb.EmbedRequest(inputs=inputs))
        other = stub.Embed(pb.EmbedRequest(inputs=inputs, embedding_type=pb.EMBEDDING_TYPE_FLOAT))
    assert not one.HasField("ranges")
    assert from_tensor(one.embeddings).dtype == FLOAT32
    assert one.embeddings == other.embeddings


@pytest.mark.parametrize(
    "ranges", [RANGES[:, :9], RANGES[::-1], np.full_like(RANGES, np.nan)], ids=["shape", "order", "nan"]
)
def test_bundle_with_defective_ranges_is_rejected(ranges: Any, old_bundle: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(old_bundle, tmp_path / "bundle"))
    write_ranges(copied, ranges)
    with pytest.raises(
        StartupError, match=r"manifest\.json: embedding_ranges (has|contains) .*export the bun"
    ):
        attnlens_server.local(copied)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"embedding_type": "int4"}, ValueError, "embedding_type is 'int4': use one of float, int8, uint8"),
        (
            {"embedding_type": "int8", "dtype": "float16"},
            ValueError,
            "dtype is set, but embedding_type is 'int8': omit it",
        ),
        ({"embedding_type": "int8", "ranges": "wide"}, TypeError, r"ranges is str: use an array of numbers"),
        (
            {"embedding_type": "int8", "ranges": [[1, 0], [0, 1]]},
            ValueError,
            "ranges has a minimum above the maximum in component 0: use the minimum and maximum of each",
        ),
    ],
)
def test_invalid_arguments_are_rejected_without_a_server(
    connect: Call, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with connect("127.0.0.1:1") as call, pytest.raises(error, match=message):
        call("embed", ["a"], **options)


def int8_reply(request: pb.EmbedRequest, width: int = 4, **ranges: Any) -> pb.EmbedResponse:
    response = vectors(request)
    shape = [len(request.inputs), width]
    response.embeddings.CopyFrom(
        Tensor(data_type=DataType.DATA_TYPE_INT8, shape=shape, data=bytes(shape[0] * width))
    )
    response.ranges.CopyFrom(Tensor(data_type=DataType.DATA_TYPE_FLOAT32, **ranges))
    return response


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({}, r"ranges of texts\[0:1\]: shape \(\), expected \(2, 4\)"),
        ({"shape": [2, 4], "data": np.full(8, np.nan, "<f4").tobytes()}, "ranges of .*: contains NaN"),
        ({"shape": [2, 4], "data": bytes(32)}, "ranges of .*: not the requested ranges"),
    ],
)
def test_reply_with_other_ranges_is_rejected(
    server: ScriptedServer, connect: Call, ranges: dict[str, Any], message: str
) -> None:
    server.embed = lambda request, _: int8_reply(request, **ranges)
    with connect(server.address) as call, pytest.raises(BadReplyError, match=message):
        call("embed", ["a"], embedding_type="int8", ranges=RANGES[:, :4])


def test_replies_with_different_ranges_are_rejected(server: ScriptedServer, connect: Call) -> None:
    numbers = iter([b"\0", b"\1"])
    server.embed = lambda request, _: int8_reply(request, shape=[2, 4], data=next(numbers) * 32)
    with (
        connect(server.address, batch_size=1, max_in_flight=1) as call,
        pytest.raises(BadReplyError, match=r"the ranges of texts\[1:2\]"),
    ):
        call("embed", ["a", "b"], embedding_type="int8")


def test_older_server_that_ignores_the_type_is_detected(server: ScriptedServer, connect: Call) -> None:
    with connect(server.address) as call, pytest.raises(BadReplyError, match="float32, expected uint8"):
        call("embed", ["a"], embedding_type="ubinary")
