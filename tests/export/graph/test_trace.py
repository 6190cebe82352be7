"""Traced graphs: results, contents and files."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

from attnlens.v1.manifest_pb2 import GraphPurpose
from attnlens_export import GraphError
from attnlens_export.graph.lint import check_graph
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_model import Encoder, EncoderConfig, MultiHeadSelfAttention, new_encoder
from configs import changed
from trace_cache import TraceCache

# Scores that are not scaled, as in T5.
UNSCALED: dict[str, object] = {
    "attention.scale": 1.0,
    "num_layers": 1,
    "attention.num_heads": 1,
    "hidden_size": 45,
    "feed_forward.activation": "gelu_tanh",
    "embeddings.type_vocab_size": 0,
}
VARIANTS: dict[str, dict[str, object]] = {
    "causal, two layers, relu, three heads": {
        "is_causal": True,
        "hidden_size": 96,
        "attention.num_heads": 3,
        "feed_forward.activation": "relu",
    },
    "unscaled, one head, odd width, tanh, no token types": UNSCALED,
}


def run(directory: Path, graph: TracedGraph, feed: dict[str, torch.Tensor]) -> list[np.ndarray]:
    write_embedded(directory / "model.onnx", graph.proto, graph.weights)
    onnx.checker.check_model(directory / "model.onnx", full_check=True)
    session = onnxruntime.InferenceSession(directory / "model.onnx", providers=["CPUExecutionProvider"])
    outputs: list[np.ndarray] = session.run(None, {name: each.numpy() for name, each in feed.items()})
    return outputs


def random_feed(config: EncoderConfig, batch_size: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (batch_size, length)
    feed = {
        "input_ids": torch.randint(0, config.embeddings.vocab_size, shape, generator=generator),
        "attention_mask": torch.randint(0, 2, shape, generator=generator),
    }
    feed["attention_mask"][0] = 1
    if config.embeddings.type_vocab_size:
        feed["token_type_ids"] = torch.randint(
            0, config.embeddings.type_vocab_size, shape, generator=generator
        )
    return feed


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_graph_matches_the_encoder_at_shapes_that_were_not_traced(
    variant: dict[str, object], tiny_config: EncoderConfig, tmp_path: Path
) -> None:
    config = changed(tiny_config, variant)
    encoder = new_encoder(config, seed=1)
    graph = trace(encoder, config)
    check_graph(graph.proto_with_weights(), "model.onnx", config, GraphPurpose.GRAPH_PURPOSE_ATTENTION)
    for batch_size, length in ((1, 1), (3, 17), (2, 40), (5, 2)):
        feed = random_feed(config, batch_size, length)
        hidden, *attentions = run(tmp_path, graph, feed)
        with torch.inference_mode():
            expected = encoder(**feed, output_attentions=True)
        live = feed["attention_mask"].numpy() == 1
        np.testing.assert_allclose(hidden[live], expected.last_hidden_state.numpy()[live], rtol=0, atol=1e-5)
        assert len(attentions) == config.num_layers
        for found, wanted in zip(attentions, expected.attentions, strict=True):
            np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=1e-5)


def test_scores_in_the_thousands_leave_exact_zeros_at_padding(
    tiny_config: EncoderConfig, tmp_path: Path
) -> None:
    """Scores far larger than any trained ones."""
    config = changed(tiny_config, UNSCALED)
    encoder = new_encoder(config, seed=1)
    [attention] = [each for each in encoder.modules() if isinstance(each, MultiHeadSelfAttention)]
    feed = random_feed(config, 4, 30)
    feed["attention_mask"][3] = 0
    with torch.no_grad():
        attention.query.weight.mul_(500)
        embedded = encoder.embeddings(feed["input_ids"], feed["attention_mask"], None)
        query, key, _ = attention.project(embedded)
        scores = query @ key.transpose(-2, -1)
    assert 4000 < scores.max() - scores.min() < 32_000
    _, weights = run(tmp_path, trace(encoder, config), feed)
    masked = feed["attention_mask"].numpy() == 0
    assert np.isfinite(weights).all()
    assert (weights.transpose(0, 3, 1, 2)[masked] == 0).all()
    assert (weights[3] == 0).all()
    np.testing.assert_allclose(weights[:3].sum(axis=-1), 1, rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_length", [1, 2])
def test_encoder_of_few_positions_is_traced(
    max_length: int, tiny_config: EncoderConfig, tmp_path: Path
) -> None:
    config = changed(
        tiny_config,
        {"positions.max_position_embeddings": max_length, "num_layers": 1, "is_causal": max_length == 2},
    )
    encoder = new_encoder(config, seed=1)
    graph = trace(encoder, config)
    for batch_size, length in ((1, 1), (3, max_length)):
        feed = random_feed(config, batch_size, length)
        feed["attention_mask"][:] = 1
        with torch.inference_mode():
            expected = encoder(**feed).last_hidden_state.numpy()
        np.testing.assert_allclose(run(tmp_path, graph, feed)[0], expected, rtol=0, atol=1e-5)


def test_tracing_failure_is_reported_in_one_line(
    tiny_config: EncoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def depend_on_data(encoder: Encoder, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        hidden: torch.Tensor = encoder.embeddings(input_ids, None)
        return hidden if hidden.sum() > 0 else -hidden

    monkeypatch.setattr(Encoder, "forward", depend_on_data)
    with pytest.raises(GraphError, match=r"cannot trace the bert encoder: \w+: ") as caught:
        trace(new_encoder(tiny_config, seed=0), tiny_config)
    assert "\n" not in str(caught.value)
    assert "step 1/3" not in str(caught.value)


def test_embeddings_graph_is_the_attention_graph_without_its_maps(
    tiny_config: EncoderConfig, tiny_trace: TracedGraph, tmp_path: Path
) -> None:
    embeddings = embeddings_graph(tiny_trace)
    operators, all_operators = (
        Counter(node.op_type for node in each.proto.graph.node) for each in (embeddings, tiny_trace)
    )
    assert all_operators - operators == Counter(Mul=tiny_config.num_layers)  # what makes exact zeros
    feed = random_feed(tiny_config, 3, 11)
    assert not feed["attention_mask"].all()
    (hidden,) = run(tmp_path, embeddings, feed)
    assert np.array_equal(hidden, run(tmp_path, tiny_trace, feed)[0])


def test_encoder_in_training_mode_exports_the_same_bytes_and_stays_in_training_mode(
    tiny_config: EncoderConfig, tiny_trace: TracedGraph, trace_cache: TraceCache
) -> None:
    encoder = new_encoder(tiny_config, seed=0).train()
    encoder.layers[0].eval()
    with trace_cache.disabled():
        graph = trace(encoder, tiny_config)
    assert "Dropout" not in {node.op_type for node in graph.proto.graph.node}
    assert graph.proto.SerializeToString(deterministic=True) == tiny_trace.proto.SerializeToString(
        deterministic=True
    )
    assert list(graph.weights) == list(tiny_trace.weights)
    assert encoder.training
    training = {name: module.training for name, module in encoder.named_modules()}
    assert training["layers.1.attention.dropout"]
    assert not training["layers.0"]
    assert not training["layers.0.attention.dropout"]
    assert all(parameter.requires_grad for parameter in encoder.parameters())


def test_every_parameter_is_an_initializer_even_where_two_are_equal(
    tiny_encoder: Encoder, tiny_trace: TracedGraph
) -> None:
    for name, parameter in tiny_encoder.state_dict().items():
        stored = tiny_trace.weights.get(name)
        if stored is None:
            stored = tiny_trace.weights[f"{name}.T"].T
        assert np.array_equal(stored, parameter.numpy())


def test_reshape_targets_are_constants_without_allowzero(tiny_trace: TracedGraph) -> None:
    targets = set()
    for node in tiny_trace.proto.graph.node:
        if node.op_type == "Reshape":
            assert not node.attribute
            targets.add(tuple(tiny_trace.weights[node.input[1]].tolist()))
    assert targets == {(0, 0, 4, 12), (0, 0, 48)}


def test_products_get_factors_whose_last_two_axes_are_swapped_at_most(tiny_trace: TracedGraph) -> None:
    nodes = tiny_trace.proto.graph.node
    orders = {
        node.output[0]: tuple(helper.get_node_attr_value(node, "perm"))
        for node in nodes
        if node.op_type == "Transpose"
    }
    factors = [value for node in nodes if node.op_type == "MatMul" for value in node.input]
    found = Counter(orders[value] for value in factors if value in orders)
    layers = 2
    assert found == {(0, 2, 1, 3): layers, (0, 1, 3, 2): layers}  # values; keys, whose rows moved before
    assert Counter(orders.values()) == {(0, 2, 1, 3): 4 * layers, (0, 1, 3, 2): layers}


def test_bert_graph_has_the_portable_operators_only(tiny_trace: TracedGraph) -> None:
    counts: dict[str, int] = {}
    for node in tiny_trace.proto.graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    layers = 2
    assert counts == {
        "Shape": 1,
        "Slice": 1,
        "Gather": 2,
        "Cast": 1,
        "Unsqueeze": 1,
        "Sub": 1,
        "Add": 2 + 10 * layers,
        "Mul": 1 + 4 * layers,
        "MatMul": 8 * layers,
        "Reshape": 4 * layers,
        "Transpose": 5 * layers,
        "Softmax": layers,
        "Div": layers,
        "Erf": layers,
        "LayerNormalization": 1 + 2 * layers,
    }


def test_nothing_in_a_graph_tells_of_the_machine_that_made_it(tiny_trace: TracedGraph) -> None:
    proto = tiny_trace.proto
    assert not proto.metadata_props
    assert not proto.doc_string
    assert not proto.graph.value_info
    for node in proto.graph.node:
        assert not node.doc_string
        assert not node.metadata_props
    for value in (*proto.graph.input, *proto.graph.output):
        assert not value.doc_string
        assert not value.metadata_props
    assert "/" not in str(proto)  # its text form: in bytes a length can be that of a slash
