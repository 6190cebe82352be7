"""A further mechanism of attention reaches the graph with no word about it in the exporter."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from attnlens.v1.manifest_pb2 import GraphPurpose
from attnlens_export.errors import LintError
from attnlens_export.graph.lint import check_graph
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_export.parity.grid import Case, Padding, make_inputs
from attnlens_export.parity.reference import run_float64
from attnlens_model import Encoder, EncoderConfig, new_encoder
from attnlens_model.attention.kinds import ATTENTION_KINDS
from configs import changed, small_config
from toy_attention import TOY_GATES, ToyAttentionConfig

NAMES = ["last_hidden_state", "attentions.0", "head_gates.0", "attentions.1", "attentions.2", "head_gates.2"]
SOFTMAX = {"kind": "softmax", "num_heads": 4}
CASES = [Case(1, 1, Padding.NONE), Case(3, 17, Padding.MIDDLE), Case(2, 40, Padding.LEFT)]


@pytest.fixture(scope="module")
def config() -> Iterator[EncoderConfig]:
    """Three layers: toy, softmax, toy."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(ATTENTION_KINDS, "toy", ToyAttentionConfig)
        yield small_config({"num_layers": 3, "attention": [{"kind": "toy", "num_heads": 3}, SOFTMAX]})


@pytest.fixture(scope="module")
def encoder(config: EncoderConfig) -> Encoder:
    return new_encoder(config, seed=0)


@pytest.fixture(scope="module")
def traced(config: EncoderConfig, encoder: Encoder) -> TracedGraph:
    return trace(encoder, config)


def open_graph(graph: TracedGraph, directory: Path) -> onnxruntime.InferenceSession:
    write_embedded(directory / "model.onnx", graph.proto, graph.weights)
    onnx.checker.check_model(directory / "model.onnx", full_check=True)
    return onnxruntime.InferenceSession(directory / "model.onnx", providers=["CPUExecutionProvider"])


def test_role_is_an_output_of_the_graph_and_has_the_numbers_of_the_encoder(
    config: EncoderConfig, encoder: Encoder, traced: TracedGraph, tmp_path: Path
) -> None:
    session = open_graph(traced, tmp_path)
    assert [output.name for output in session.get_outputs()] == NAMES
    assert session.get_outputs()[2].shape == ["batch_size", "sequence_length", 3]
    for case in CASES:
        inputs = make_inputs(case, config)
        found = dict(zip(NAMES, session.run(None, inputs.feed()), strict=True))
        feed = {name: torch.from_numpy(array) for name, array in inputs.feed().items()}
        with torch.inference_mode():
            expected = encoder(**feed, output_attentions=True)
        live = inputs.attention_mask == 1
        gates = {f"head_gates.{layer}": expected.layers[layer][TOY_GATES] for layer in (0, 2)}
        for name, tensor in ({"last_hidden_state": expected.last_hidden_state} | gates).items():
            np.testing.assert_allclose(found[name][live], tensor.numpy()[live], rtol=0, atol=1e-5)
        for layer, weights in enumerate(expected.attentions):
            np.testing.assert_allclose(found[f"attentions.{layer}"], weights.numpy(), rtol=0, atol=1e-5)


def test_lint_knows_its_operators_and_outputs_from_the_configuration(
    config: EncoderConfig, traced: TracedGraph
) -> None:
    graph = traced.proto_with_weights()
    check_graph(graph, "model.onnx", config, GraphPurpose.GRAPH_PURPOSE_ATTENTION)
    softmax = changed(config, {"attention": SOFTMAX})
    with pytest.raises(LintError, match=r"Sigmoid is not allowed(?s:.*)outputs .*head_gates\.0"):
        check_graph(graph, "model.onnx", softmax, GraphPurpose.GRAPH_PURPOSE_ATTENTION)


def test_graph_of_embeddings_has_the_hidden_states_alone(
    config: EncoderConfig, encoder: Encoder, traced: TracedGraph, tmp_path: Path
) -> None:
    session = open_graph(embeddings_graph(traced), tmp_path)
    assert [output.name for output in session.get_outputs()] == NAMES[:1]
    inputs = make_inputs(CASES[1], config)
    live = inputs.attention_mask == 1
    exact = run_float64(encoder, inputs, lambda _name, _weights: None)
    [hidden] = session.run(None, inputs.feed())
    np.testing.assert_allclose(hidden[live], exact[live], rtol=0, atol=1e-5)
