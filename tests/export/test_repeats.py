"""The determinism gate, with a graph of real width and with an operator that is known to race."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import frozen_encoder
from attnlens.v1.manifest_pb2 import GraphPurpose
from attnlens_export.contributions.graph import contributions_graph
from attnlens_export.contributions.measure import make_feed, measure_case
from attnlens_export.errors import LintError
from attnlens_export.graph.lint import check_graph
from attnlens_export.graph.names import CONTRIBUTIONS_PATH, EMBEDDINGS_PATH
from attnlens_export.graph.trace import embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_export.parity.grid import Case, Padding, make_inputs
from attnlens_export.parity.sessions import Graph
from attnlens_export.repeats import measure_repeats, repeated_case
from attnlens_model import Encoder, new_encoder
from configs import changed, small_config

LONGFORMER = small_config(
    {
        "hidden_size": 384,
        "num_layers": 1,
        "attention": {"kind": "longformer", "num_heads": 12, "window": 64, "num_global_tokens": 1},
        "positions.max_position_embeddings": 460,
    }
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Encoder]:
    """The graphs of embeddings and of contributions, as files."""
    directory = tmp_path_factory.mktemp("wide")
    (directory / "onnx").mkdir()
    encoder = new_encoder(LONGFORMER, seed=0)
    embeddings = embeddings_graph(trace(encoder, LONGFORMER))
    contributions = contributions_graph(embeddings, LONGFORMER, ())
    for path, graph in ((EMBEDDINGS_PATH, embeddings), (CONTRIBUTIONS_PATH, contributions)):
        write_embedded(directory / path, graph.proto, graph.weights)
    return directory, encoder


def test_contributions_at_real_width_are_exact_and_the_same_in_each_run(wide: tuple[Path, Encoder]) -> None:
    directory, encoder = wide
    result = measure_repeats(directory, [EMBEDDINGS_PATH, CONTRIBUTIONS_PATH], LONGFORMER, lambda *_: None)
    assert result.failures() == []
    assert [(each.graph, each.inputs) for each in result.comparisons] == [
        (path, f"{repeated_case(LONGFORMER)}, {threads} threads")
        for path in (EMBEDDINGS_PATH, CONTRIBUTIONS_PATH)
        for threads in (2, 4)
    ]
    case = Case(2, 450, Padding.RIGHT)
    inputs = make_inputs(case, LONGFORMER)
    feed = make_feed(inputs, LONGFORMER, 384)
    hidden = Graph(directory, EMBEDDINGS_PATH, threads=2).run(inputs)["last_hidden_state"]
    graph = Graph(directory, CONTRIBUTIONS_PATH, threads=2)
    assert all(each.passed for each in measure_case(graph.run_feed, case, inputs, LONGFORMER, hidden))
    found, expected = graph.run_feed(feed), frozen_encoder.contributions(encoder, feed)
    for _ in range(5):
        assert all(np.array_equal(array, found[name]) for name, array in graph.run_feed(feed).items())
    scale = np.linalg.norm(feed["direction"], axis=1).max()
    assert np.abs(found["token_contributions"] - expected.tokens).max() < 1e-6 * scale
    assert np.abs(found["head_contributions"] - expected.heads).max() < 1e-6 * scale


def test_inputs_are_longer_than_every_window_and_block() -> None:
    plain = small_config({"positions.max_position_embeddings": 512})
    assert repeated_case(plain) == Case(1, 128, Padding.NONE)
    longer = changed(LONGFORMER, {"attention.window": 150})
    assert repeated_case(longer) == Case(1, 153, Padding.NONE)
    assert repeated_case(small_config()) == Case(1, 40, Padding.NONE)


def racing(nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    """A graph that adds the row of each token to one of 4 rows 512 times."""
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch_size", "sequence_length"])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    sums = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [4, 384])
    generator = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {
        "table": generator.standard_normal((101, 384)).astype(np.float32),
        "copies": np.array([512, 1], np.int64),
        "rows": np.array([-1], np.int64),
        "four": np.array(4, np.int64),
        "zeros": np.zeros((4, 384), np.float32),
        "last": np.array([1], np.int64),
    }
    graph = helper.make_graph(
        nodes, "racing", inputs, [sums], [onnx.numpy_helper.from_array(a, n) for n, a in arrays.items()]
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


RACE = [
    helper.make_node("Tile", ["input_ids", "copies"], ["ids"]),
    helper.make_node("Reshape", ["ids", "rows"], ["flat"]),
    helper.make_node("Gather", ["table", "flat"], ["updates"]),
    helper.make_node("Mod", ["flat", "four"], ["indices"]),
    helper.make_node("Unsqueeze", ["indices", "last"], ["places"]),
    helper.make_node("ScatterND", ["zeros", "places", "updates"], ["last_hidden_state"], reduction="add"),
]


def test_operator_that_races_fails_the_gate(tmp_path: Path) -> None:
    onnx.save(racing(RACE), tmp_path / "racing.onnx")
    result = measure_repeats(tmp_path, ["racing.onnx"], small_config(), lambda *_: None)
    assert not result.passed
    assert any(each.worst == "last_hidden_state" and each.value > 0 for each in result.comparisons)
    assert "racing.onnx: max repeat difference on " in result.failures()[0]
    [gate] = result.gates()
    assert gate.value > gate.limit == 0


@pytest.mark.parametrize("purpose", [purpose for purpose in GraphPurpose.values() if purpose])
def test_lint_rejects_it_in_every_graph(purpose: GraphPurpose.ValueType) -> None:
    with pytest.raises(LintError, match="ScatterND with the reduction 'add' loses updates"):
        check_graph(racing(RACE), "a.onnx", small_config(), purpose, more_operators=frozenset({"ScatterND"}))
