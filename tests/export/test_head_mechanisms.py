"""Graphs of overlapping, mixed and composed heads, and of values of another size, in a pattern of layers."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file

from attnlens.bundle import read_manifest
from attnlens.v1.manifest_pb2 import GraphPurpose
from attnlens_export import ExportOptions, SourceError, check_bundle, export_bundle
from attnlens_export.graph.lint import check_graph
from attnlens_export.graph.names import (
    ATTENTIONS_PATH,
    CONTRIBUTIONS_PATH,
    EMBEDDINGS_PATH,
    layer_outputs,
    output_names,
)
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_export.parity.grid import Case, Padding, small_grid
from attnlens_export.parity.long_context import one_head_config
from attnlens_export.parity.reference import make_clear_inputs, run_fp32
from attnlens_export.published.side_files import write_config
from attnlens_model import Encoder, EncoderConfig, new_encoder
from configs import small_config
from mechanisms import mechanism_config

OVERLAPPING = {"kind": "overlapping", "num_heads": 4, "overlap": 5}
MIXTURE = {"kind": "mixture", "num_heads": 6, "shared_heads": 2, "active_heads": 2}
COMPOSED = {"kind": "composed", "num_heads": 3}
SOFTMAX = {"kind": "softmax", "num_heads": 4}
CONFIGS: dict[str, EncoderConfig] = {
    "each kind": mechanism_config("heads"),
    "options": small_config(
        {
            "family": "attnlens",
            "num_layers": 6,
            "attention": [
                OVERLAPPING | {"overlap": 12},
                OVERLAPPING | {"overlap": 0},
                MIXTURE | {"gates": "paper", "shared_heads": 0, "router": "norm"},
                MIXTURE | {"shared_heads": 6, "active_heads": 0},
                COMPOSED | {"by_key": False, "before_softmax": False, "static": True, "rank": 1},
                COMPOSED | {"by_query": False, "after_softmax": False},
            ],
        }
    ),
    "values of another size": small_config(
        {
            "family": "attnlens",
            "num_layers": 3,
            "attention": [
                SOFTMAX | {"value_head_size": 7, "num_key_value_heads": 2},
                SOFTMAX | {"value_head_size": 12, "head_size": 6, "output_projection": False},
                SOFTMAX | {"value_head_size": 30, "rotary": {"theta": 100.0}, "window": 3},
            ],
        }
    ),
}
# None has the length of the trace, 9.
CASES = [
    Case(1, 1, Padding.NONE),
    Case(3, 17, Padding.MIDDLE),
    Case(2, 40, Padding.LEFT),
    Case(3, 7, Padding.EMPTY_ROW),
    Case(2, 12, Padding.RIGHT),
]


@pytest.fixture(scope="module", params=CONFIGS)
def encoder(request: pytest.FixtureRequest) -> Encoder:
    encoder = new_encoder(CONFIGS[request.param], seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            # As large as after training: fresh kernels and routers hardly do anything.
            if any(part in name for part in ("router", "before", "after")):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return encoder


@pytest.fixture(scope="module")
def graph(encoder: Encoder) -> TracedGraph:
    return trace(encoder, encoder.config)


def open_graph(graph: TracedGraph, directory: Path) -> onnxruntime.InferenceSession:
    write_embedded(directory / "model.onnx", graph.proto, graph.weights)
    onnx.checker.check_model(directory / "model.onnx", full_check=True)
    return onnxruntime.InferenceSession(directory / "model.onnx", providers=["CPUExecutionProvider"])


def test_graph_has_the_numbers_of_the_encoder(encoder: Encoder, graph: TracedGraph, tmp_path: Path) -> None:
    names, described = output_names(encoder.config), layer_outputs(encoder.config)
    session = open_graph(graph, tmp_path)
    alone = open_graph(embeddings_graph(graph), tmp_path)
    assert [output.name for output in session.get_outputs()] == names
    for case in CASES:
        inputs = make_clear_inputs(case, encoder.config, encoder)
        expected = run_fp32(encoder, inputs, with_attentions=True)
        found = dict(zip(names, session.run(None, inputs.feed()), strict=True))
        live = inputs.attention_mask == 1
        for name, tensor in found.items():
            is_dense = name in described and described[name][1].layout == "dense"
            chosen = (each.transpose(0, 2, 1, 3) if is_dense else each for each in (tensor, expected[name]))
            measured, right = (each[live] for each in chosen)
            limit = 1e-5 * max(1.0, float(np.abs(right).max()))
            np.testing.assert_allclose(measured, right, rtol=0, atol=limit, err_msg=f"{name} at {case}")
            if is_dense:
                assert not tensor.transpose(0, 3, 1, 2)[~live].any()
                assert not tensor[~live.any(axis=1)].any()
        [hidden] = alone.run(None, inputs.feed())
        np.testing.assert_allclose(hidden[live], found["last_hidden_state"][live], rtol=0, atol=1e-5)


def test_graph_is_portable_and_has_every_parameter_by_name(encoder: Encoder, graph: TracedGraph) -> None:
    purpose = GraphPurpose.GRAPH_PURPOSE_ATTENTION
    check_graph(graph.proto_with_weights(), "model.onnx", encoder.config, purpose)
    for name, parameter in encoder.state_dict().items():
        weight = graph.weights.get(name)
        stored = graph.weights[f"{name}.T"].T if weight is None else weight
        np.testing.assert_array_equal(stored, parameter.numpy())


def test_operators_lists_only_required_operators() -> None:
    for attention in (OVERLAPPING | {"overlap": 0}, MIXTURE | {"shared_heads": 6, "active_heads": 0}):
        [layer] = {each.operators for each in small_config({"attention": attention}).layer_attentions}
        assert layer == frozenset()


def test_bundle_of_layers_without_an_output_projection_is_complete(tmp_path: Path) -> None:
    encoder = new_encoder(CONFIGS["values of another size"], seed=1)
    source, bundle = tmp_path / "source", tmp_path / "bundle"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(encoder.config.to_hugging_face()), encoding="utf-8")
    save_file(encoder.state_dict(), source / "model.safetensors")
    options = ExportOptions(pooling="mean", grid=small_grid(40), faithfulness=False)
    export_bundle(source, bundle, options)
    assert check_bundle(bundle, source, grid=small_grid(40)).verdict.passed
    paths = [graph.path for graph in read_manifest(bundle).graphs]
    assert paths == [EMBEDDINGS_PATH, ATTENTIONS_PATH, CONTRIBUTIONS_PATH]
    assert one_head_config(encoder.config) is not None


def test_family_of_published_checkpoints_cannot_express_values_of_another_size(tmp_path: Path) -> None:
    config = small_config({"attention": SOFTMAX | {"value_head_size": 7}})
    with pytest.raises(SourceError, match=r"of the bert family cannot express .*value_head_size"):
        write_config(tmp_path, None, config, external_data=False)


def test_configuration_round_trip_is_exact(encoder: Encoder) -> None:
    assert EncoderConfig.from_json(encoder.config.to_json()) == encoder.config
