"""A bundle whose layers have outputs other than attention weights, one of them with a row per token."""

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.manifest_pb2 import (
    OUTPUT_ROLE_ATTENTION_COMPOSED,
    OUTPUT_ROLE_ATTENTION_WEIGHTS,
    OUTPUT_ROLE_HEAD_GATES,
    OUTPUT_ROLE_LAST_HIDDEN_STATE,
    ROW_SUM_UNBOUNDED,
    ROW_SUM_UNSPECIFIED,
)
from served import ServerProcess
from tampered import ATTENTIONS, change_graph, constant, copy_of, manifest_of, put_hashes_right

NUM_HEADS = 3
GATES = pb.AttentionQuery(role=OUTPUT_ROLE_HEAD_GATES)
COMPOSED = pb.AttentionQuery(role=OUTPUT_ROLE_ATTENTION_COMPOSED)
INPUTS = [pb.Input(text=text) for text in ("the", "a man and the man", "the man")]


def add_outputs(graph: onnx.GraphProto) -> None:
    """Gates (B, T, H): first components of each token vector. Composed weights: -3 times the attention."""
    for name, number in (("first", 0), ("last", NUM_HEADS), ("axis", 2)):
        values = helper.make_tensor(name, TensorProto.INT64, [1], [number])
        graph.node.append(helper.make_node("Constant", [], [name], value=values))
    graph.node.extend(
        [
            helper.make_node("Slice", ["last_hidden_state", "first", "last", "axis"], ["gates.0"]),
            constant("factor", -3.0),
            helper.make_node("Mul", ["attentions.0", "factor"], ["composed.0"]),
        ]
    )
    dense: list[str | int | None] = ["batch_size", NUM_HEADS, "sequence_length", "sequence_length"]
    per_token: list[str | int | None] = ["batch_size", "sequence_length", NUM_HEADS]
    for name, axes in (("gates.0", per_token), ("composed.0", dense)):
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, axes))


@pytest.fixture(scope="module")
def stub(
    small_bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EncoderServiceStub]:
    bundle = copy_of(small_bundle("wordpiece"), tmp_path_factory.mktemp("roles"))
    change_graph(bundle, ATTENTIONS, add_outputs)
    with manifest_of(bundle) as manifest:
        outputs = manifest["graphs"][1]["outputs"]
        weights = outputs[-1]
        composed = {"role": "OUTPUT_ROLE_ATTENTION_COMPOSED", "row_sum": "ROW_SUM_UNBOUNDED"}
        gates = {"role": "OUTPUT_ROLE_HEAD_GATES", "layout": "OUTPUT_LAYOUT_PER_TOKEN", "row_sum": 0}
        axes = weights["value"]["axes"]
        per_token = [axes[0], axes[2], axes[1]]
        value = weights["value"]
        outputs.append(weights | gates | {"value": value | {"name": "gates.0", "axes": per_token}})
        outputs.append(weights | composed | {"value": value | {"name": "composed.0"}})
    put_hashes_right(bundle)
    with ServerProcess(bundle) as server, grpc.insecure_channel(server.address) as channel:
        yield EncoderServiceStub(channel)


def test_model_info_lists_the_outputs_of_each_layer(stub: EncoderServiceStub) -> None:
    outputs = stub.GetModel(pb.GetModelRequest()).model.outputs
    assert [(output.role, output.layer, output.num_heads) for output in outputs] == [
        (OUTPUT_ROLE_LAST_HIDDEN_STATE, 0, 0),
        (OUTPUT_ROLE_ATTENTION_WEIGHTS, 0, NUM_HEADS),
        (OUTPUT_ROLE_HEAD_GATES, 0, NUM_HEADS),
        (OUTPUT_ROLE_ATTENTION_COMPOSED, 0, NUM_HEADS),
    ]
    assert outputs[2].row_sum == ROW_SUM_UNSPECIFIED


def test_each_role_has_its_own_shape_alone_or_combined(stub: EncoderServiceStub) -> None:
    queries = [
        GATES,
        pb.AttentionQuery(),
        COMPOSED,
        pb.AttentionQuery(role=OUTPUT_ROLE_HEAD_GATES, heads=[2, 0]),
        pb.AttentionQuery(role=OUTPUT_ROLE_HEAD_GATES, view=pb.ATTENTION_VIEW_HEAD_MEAN, heads=[1, 2]),
    ]
    request = pb.EncodeRequest(inputs=INPUTS, last_hidden_state=True, attention=queries)
    for result in stub.Encode(request).results:
        hidden, num_tokens = from_tensor(result.last_hidden_state), len(result.tokens)
        gates, weights, composed, chosen, mean = result.attention
        assert [attention.WhichOneof("data") for attention in result.attention] == [
            "per_token", "dense", "dense", "per_token", "per_token",
        ]  # fmt: skip
        expected = hidden[:, :NUM_HEADS]
        np.testing.assert_array_equal(from_tensor(gates.per_token), expected[np.newaxis])
        np.testing.assert_array_equal(from_tensor(chosen.per_token)[0], expected[:, [2, 0]])
        np.testing.assert_allclose(
            from_tensor(mean.per_token)[0], expected[:, 1:].mean(axis=1, keepdims=True), atol=1e-6
        )
        dense = from_tensor(weights.dense)
        assert dense.shape == (1, NUM_HEADS, num_tokens, num_tokens)
        np.testing.assert_allclose(from_tensor(composed.dense), -3 * dense, atol=1e-6)
        assert composed.row_sum == ROW_SUM_UNBOUNDED
        assert list(chosen.heads) == [2, 0]


def test_stream_returns_each_role_as_a_part(stub: EncoderServiceStub) -> None:
    fields = {"inputs": INPUTS[1:2], "attention": [COMPOSED, GATES]}
    [whole] = stub.Encode(pb.EncodeRequest(**fields)).results  # type: ignore[arg-type]
    text, composed, gates = stub.EncodeStream(pb.EncodeStreamRequest(**fields))  # type: ignore[arg-type]
    assert text.num_attention_parts == 2
    assert not text.text.HasField("last_hidden_state")
    assert composed.attention == whole.attention[0]
    assert gates.attention == whole.attention[1]


def test_attention_weights_remain_the_default_with_more_roles(stub: EncoderServiceStub) -> None:
    [result] = stub.Encode(pb.EncodeRequest(inputs=INPUTS[:1], attention=[pb.AttentionQuery()])).results
    assert result.attention[0].role == OUTPUT_ROLE_ATTENTION_WEIGHTS
    np.testing.assert_allclose(from_tensor(result.attention[0].dense).sum(axis=-1), 1, atol=1e-5)
