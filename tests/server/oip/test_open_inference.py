"""Messages of the Open Inference Protocol: both forms of elements, malformed requests, descriptor pools."""

import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import Default
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from attnlens.oip import open_inference_pb2 as pb
from attnlens.oip.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attnlens_server.bundle import open_bundle
from attnlens_server.config import ServerConfig
from attnlens_server.errors import InvalidFieldsError
from attnlens_server.grpc_api.calls import SMALL_BYTES, Parser
from attnlens_server.oip.methods import CONTENTS_COPIES, SERVICE_NAME, InferenceService
from attnlens_server.oip.tensors import read_integers, read_texts
from failures import read_failure
from served import ServerProcess

if TYPE_CHECKING:
    from attnlens_server.grpc_api.calls import Call
    from attnlens_server.operations.service import ModelService

NAME = "all-MiniLM-L6-v2"
InputTensor = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferRequest.InferRequestedOutputTensor
CLIENT_ERRORS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}


@pytest.fixture(scope="module")
def inference(minilm_server: ServerProcess) -> Iterator[GRPCInferenceServiceStub]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.enable_retries", 0)]
    with grpc.insecure_channel(minilm_server.address, options=options) as channel:
        yield GRPCInferenceServiceStub(channel)


def in_contents(name: str, *rows: list[int]) -> InputTensor:
    contents = pb.InferTensorContents(int64_contents=[number for row in rows for number in row])
    return InputTensor(name=name, datatype="INT64", shape=[len(rows), len(rows[0])], contents=contents)


def test_contents_are_answered_by_contents_and_raw_elements_by_raw_elements(
    inference: GRPCInferenceServiceStub,
) -> None:
    rows = [[101, 1037, 4937, 102], [101, 102, 0, 0]]
    mask = [[1, 1, 1, 1], [1, 1, 0, 0]]
    outputs = [Output(name="last_hidden_state"), Output(name="attention_mask")]
    request = pb.ModelInferRequest(
        model_name=NAME,
        inputs=[in_contents("input_ids", *rows), in_contents("attention_mask", *mask)],
        outputs=outputs,
    )
    response = inference.ModelInfer(request)
    assert not response.raw_output_contents
    vectors, given_mask = response.outputs
    raw = pb.ModelInferRequest(model_name=NAME, outputs=outputs)
    for name, values in (("input_ids", rows), ("attention_mask", mask)):
        empty = pb.InferTensorContents()  # as MLServer sends it
        raw.inputs.add(name=name, datatype="INT32", shape=[2, 4], contents=empty)
        raw.raw_input_contents.append(np.array(values, "<i4").tobytes())
    in_raw = inference.ModelInfer(raw)
    assert not any(output.HasField("contents") for output in in_raw.outputs)
    assert np.array(vectors.contents.fp32_contents, "<f4").tobytes() == in_raw.raw_output_contents[0]
    assert np.array(given_mask.contents.int64_contents, "<i8").tobytes() == in_raw.raw_output_contents[1]
    assert list(vectors.shape) == [2, 4, 384]
    assert list(given_mask.contents.int64_contents) == [1, 1, 1, 1, 1, 1, 0, 0]


def test_one_text_in_contents(inference: GRPCInferenceServiceStub) -> None:
    contents = pb.InferTensorContents(bytes_contents=["Zoë".encode()])
    tensor = InputTensor(name="any", datatype="BYTES", shape=[1, 1], contents=contents)
    [output] = inference.ModelInfer(pb.ModelInferRequest(model_name=NAME, inputs=[tensor])).outputs
    assert np.linalg.norm(output.contents.fp32_contents) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("shape", "raw", "message"),
    [
        ([1], b"", "has 0 bytes of data, which end within element 0 of 1"),
        ([1], struct.pack("<I", 5) + b"abcd", "has 8 bytes of data, which end within element 0 of 1"),
        ([2], struct.pack("<I", 1) + b"a\x01\x00", "has 7 bytes of data, which end within element 1 of 2"),
        ([1], b"\xff" * 8, "which end within element 0 of 1"),
        ([1], struct.pack("<I", 1) + b"abc", "has 2 bytes of data after the last of 1 elements"),
        ([1], struct.pack("<I", 2) + b"a\xff", "text[0] is not UTF-8 at byte 1"),
        ([-1], b"", "text is BYTES [-1]: send 1 to 512 texts per request"),
        ([], b"", "text is BYTES []: send 1 to 512 texts"),
        ([1 << 62], b"", "send 1 to 512 texts"),
        ([1, 2], b"", "text is BYTES [1, 2]: use BYTES [n] or [n, 1]"),
        ([1, 1, 1, 1, 1], b"", "text is BYTES [1, 1, 1, 1, ...]: use BYTES [n] or [n, 1]"),
    ],
)
def test_malformed_texts_are_rejected(shape: list[int], raw: bytes, message: str) -> None:
    with pytest.raises(InvalidFieldsError) as caught:
        read_texts("text", InputTensor(datatype="BYTES", shape=shape), raw, 512)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("datatype", "shape", "size", "message"),
    [
        ("INT64", [2, 3], 47, "input_ids has 47 bytes of data, but INT64 [2, 3] has 48: correct the shape"),
        ("INT32", [2, 3], 48, "input_ids has 48 bytes of data, but INT32 [2, 3] has 24"),
        (
            "INT64",
            [512, 1 << 40],
            8,
            "has 8 bytes of data, but INT64 [512, 1099511627776] has 4503599627370496",
        ),
        ("INT64", [1 << 62, 1], 8, "input_ids is INT64 [4611686018427387904, 1]: send 1 to 512 texts"),
        ("INT64", [1 << 40, 0], 0, "use INT64 or INT32 [texts, tokens]"),
        ("INT64", [1, -8], 8, "use INT64 or INT32 [texts, tokens]"),
        ("INT64", [8], 64, "input_ids is INT64 [8]: use INT64 or INT32 [texts, tokens]"),
        ("FP32", [1, 2], 8, "input_ids is FP32 [1, 2]: use INT64 or INT32 [texts, tokens]"),
    ],
)
def test_malformed_integers_are_rejected_without_allocation(
    datatype: str, shape: list[int], size: int, message: str
) -> None:
    tensor = InputTensor(datatype=datatype, shape=shape)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidFieldsError) as caught:
            read_integers("input_ids", tensor, bytes(size), 512)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message in str(caught.value)
    assert peak_bytes < 1 << 16


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({}, "inputs has no tensors: use text (BYTES), or input_ids"),
        ({"raw_input_contents": [b""]}, "raw_input_contents has 1 entries for 0 inputs"),
        (
            {"inputs": [in_contents("input_ids", [1])], "raw_input_contents": [b""]},
            "inputs[0].contents is set in addition to raw_input_contents: send only one",
        ),
        (
            {"inputs": [in_contents("input_ids", [1]), in_contents("input_ids", [1])]},
            "inputs has 'input_ids', 'input_ids': use text (BYTES), or",
        ),
        (
            {"inputs": [InputTensor(name="text", datatype="BYTES", shape=[2])]},
            "text has 0 elements in contents.bytes_contents, but BYTES [2] has 2",
        ),
        (
            {
                "inputs": [
                    in_contents("input_ids", [1, 1]),
                    InputTensor(name="attention_mask", datatype="INT32", shape=[1, 2]),
                ]
            },
            "attention_mask has 0 elements in contents.int_contents, but INT32 [1, 2] has 2",
        ),
    ],
)
def test_inconsistent_requests_are_rejected(
    inference: GRPCInferenceServiceStub, request_fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        inference.ModelInfer(pb.ModelInferRequest(model_name=NAME, **request_fields))
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in error.details()


def test_errors_have_the_details_of_the_encoder_service(inference: GRPCInferenceServiceStub) -> None:
    contents = pb.InferTensorContents(bytes_contents=[b"ok", b"word " * 300])
    tensor = InputTensor(name="text", datatype="BYTES", shape=[2], contents=contents)
    with pytest.raises(grpc.RpcError) as caught:
        inference.ModelInfer(pb.ModelInferRequest(model_name=NAME, inputs=[tensor]))
    failure = read_failure(caught.value)
    assert failure.reason == "INPUT_TOO_LONG"
    assert failure.violations == {
        "text[1]": "has 302 tokens, but the limit is 256: shorten it, or set the parameter truncate"
    }


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (InputTensor(contents=pb.InferTensorContents(bytes_contents=[b""] * 40_000)), "nested fields"),
        (InputTensor(name="x" * SMALL_BYTES), None),
    ],
)
def test_millions_of_elements_are_rejected_before_they_are_parsed(
    tensor: InputTensor, message: str | None
) -> None:
    parser = Parser(pb.ModelInferRequest, lambda request: request, frozenset({7}), 512, CONTENTS_COPIES)
    data = pb.ModelInferRequest(inputs=[tensor]).SerializeToString()
    assert len(data) > SMALL_BYTES
    if message is None:
        assert parser.parse(data).inputs[0] == tensor
        return
    with pytest.raises(InvalidFieldsError, match=message):
        parser.parse(data + b"\xff" * SMALL_BYTES)  # a complete parse would report an invalid message


async def test_readiness_follows_the_state_of_the_server(minilm_bundle: Path) -> None:
    process = SimpleNamespace(is_serving=False)
    bundle, config = open_bundle(minilm_bundle, "fp32"), ServerConfig(bundle=minilm_bundle)
    service = InferenceService(bundle, cast("ModelService", SimpleNamespace(process=process)), config)
    for is_ready in (False, True):
        process.is_serving, process.problem = is_ready, "" if is_ready else "a batch hangs"
        assert service.ServerLive(pb.ServerLiveRequest()).live
        assert service.ServerReady(pb.ServerReadyRequest()).ready is is_ready
        assert service.ModelReady(pb.ModelReadyRequest(name=NAME)).ready is is_ready
        for only_ready in (False, True):
            request = pb.RepositoryIndexRequest(ready=only_ready)
            index = pb.RepositoryIndexResponse.FromString(
                await service.RepositoryIndex(request, cast("Call", None))
            )
            expected = [("READY", "")] * 3 if is_ready else [("UNAVAILABLE", "a batch hangs")] * 3
            assert [(model.state, model.reason) for model in index.models] == (
                [] if only_ready and not is_ready else expected
            )


# --- Fuzzing --------------------------------------------------------------------------------------

names = st.sampled_from(["text", "input_ids", "attention_mask", "token_type_ids", "", "x"])
numbers = st.one_of(st.integers(-2, 5), st.integers(-(2**63), 2**63 - 1))
parameters = st.dictionaries(
    st.sampled_from(
        ["truncate", "normalize", "dimensions", "pooling", "prompt_name", "timeout", "priority", "x", ""]
    ),
    st.one_of(
        st.builds(pb.InferParameter, bool_param=st.booleans()),
        st.builds(pb.InferParameter, int64_param=st.sampled_from([60_000_000, -1, 2**63 - 1])),
        st.builds(pb.InferParameter, uint64_param=st.sampled_from([60_000_000, 2**64 - 1])),
        st.builds(pb.InferParameter, string_param=st.sampled_from(["mean", "\n", "x" * 99])),
        st.just(pb.InferParameter()),
    ),
    max_size=2,
)
tensors = st.one_of(
    st.builds(
        InputTensor,
        name=names,
        datatype=st.sampled_from(["BYTES", "INT64", "INT32", "FP32", "", "é"]),
        shape=st.lists(numbers, max_size=3),
        contents=st.builds(
            pb.InferTensorContents,
            bytes_contents=st.lists(st.binary(max_size=8), max_size=3),
            int64_contents=st.lists(numbers, max_size=4),
            int_contents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
        ),
    ),
    st.builds(
        in_contents,
        names,
        st.lists(st.one_of(st.integers(0, 1), numbers), min_size=3, max_size=3),
    ),
)
raw_elements = st.one_of(
    st.binary(max_size=24), st.binary(max_size=8).map(lambda text: struct.pack("<I", len(text)) + text)
)
requests = st.builds(
    pb.ModelInferRequest,
    model_name=st.sampled_from([NAME, f"{NAME}_tokens", f"{NAME}_attentions", "", "x"]),
    model_version=st.sampled_from(["", "1", "1", "2"]),
    id=st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    inputs=st.lists(tensors, max_size=3),
    outputs=st.lists(
        st.builds(
            Output,
            name=st.sampled_from(
                ["embedding", "attention_mask", "contributions", "attentions.5", "last_hidden_state", "y"]
            ),
        ),
        max_size=2,
    ),
    parameters=parameters,
    raw_input_contents=st.one_of(st.just([]), st.lists(raw_elements, max_size=3)),
)
IDS = [in_contents("input_ids", [101, 102]), in_contents("attention_mask", [1, 1])]


@given(requests.map(pb.ModelInferRequest.SerializeToString) | st.binary(max_size=60))
@example(pb.ModelInferRequest(inputs=IDS, outputs=[Output(name="contributions")]).SerializeToString())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_request_gets_a_result_or_a_clear_error(minilm_server: ServerProcess, data: bytes) -> None:
    with grpc.insecure_channel(minilm_server.address) as channel:
        call: Any = channel.unary_unary(f"/{SERVICE_NAME}/ModelInfer")
        try:
            response = pb.ModelInferResponse.FromString(call(data, timeout=60))
        except grpc.RpcError as error:
            failure: Any = error
            assert failure.code() in CLIENT_ERRORS, failure.details()
            return
    assert response.outputs
    assert len(response.raw_output_contents) in (0, len(response.outputs))


# --- Descriptor pools -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_and_describes_both_services(minilm_server: ServerProcess, version: str) -> None:
    encoder = "attnlens.v1.EncoderService"
    symbols = [SERVICE_NAME, "inference.ModelInferRequest", encoder, "google.rpc.BadRequest"]
    with grpc.insecure_channel(minilm_server.address) as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
        requests += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in symbols]
        requests += [reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.None")]
        listed, *described, missing = call(iter(requests))
    assert {SERVICE_NAME, encoder} <= {each.name for each in listed.list_services_response.service}
    assert all(each.file_descriptor_response.file_descriptor_proto for each in described)
    assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


ORDERS = [
    "import attnlens_server.oip.methods, tritonclient.grpc",
    "import tritonclient.grpc, attnlens_server.oip.methods",
]


@pytest.mark.parametrize("imports", ORDERS)
def test_messages_can_be_imported_beside_those_of_tritonclient(imports: str) -> None:
    """Parse a message from one library with the other one."""
    program = f"""{imports}
from attnlens.oip import open_inference_pb2 as ours
from tritonclient.grpc import service_pb2 as theirs
request = theirs.ModelInferRequest(model_name="m", raw_input_contents=[b"1"])
request.parameters["timeout"].int64_param = 7
assert ours.ModelInferRequest.FromString(request.SerializeToString()).parameters["timeout"].int64_param == 7
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_default_pool_does_not_contain_the_messages() -> None:
    assert pb.DESCRIPTOR.pool is not Default()
