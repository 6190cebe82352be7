"""Planted mistakes in the sweep that the gate must detect, and encoders that it rejects."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from attnlens.dense import DenseLayer
from attnlens.pooling import Pooling
from attnlens.v1.manifest_pb2 import Activation
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.contents import Verdict, measure_graphs
from attnlens_export.contributions import transposes
from attnlens_export.contributions.flow import Flow, find_flows
from attnlens_export.contributions.graph import contributions_graph
from attnlens_export.contributions.heads import limit_to_sweep
from attnlens_export.contributions.measure import compare_slope, make_feed, measure_case
from attnlens_export.contributions.state import SweepState
from attnlens_export.contributions.sweep import sweep
from attnlens_export.contributions.tail import DenseWeights
from attnlens_export.contributions.writer import GraphWriter
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import ATTENTIONS_PATH, CONTRIBUTIONS_PATH, HEAD_CONTRIBUTIONS
from attnlens_export.graph.trace import TracedGraph, embeddings_graph
from attnlens_export.parity.grid import Case, Inputs, Padding, make_inputs, small_grid
from attnlens_export.parity.measure import Subject
from attnlens_export.parity.stored import References
from attnlens_export.progress import no_progress
from attnlens_export.results import Comparison, Result
from attnlens_model import Encoder, new_encoder
from configs import small_config
from tampered import change_graph, constant, through

Run = Callable[[dict[str, Any]], dict[str, np.ndarray]]


def opened(graph: TracedGraph) -> Run:
    session = onnxruntime.InferenceSession(graph.proto_with_weights().SerializeToString())
    names = [output.name for output in session.get_outputs()]
    return lambda feed: dict(zip(names, session.run(None, feed), strict=True))


@pytest.fixture(scope="module")
def biased(tiny_trace: TracedGraph) -> TracedGraph:
    """The graph of embeddings with biases and norms that are not those of the start."""
    generator = np.random.default_rng(5)
    weights: dict[str, Any] = {
        name: np.asarray(array + generator.standard_normal(array.shape), dtype=np.float32)
        if name.endswith(("bias", "norm.weight"))
        else array
        for name, array in dict[str, Any](tiny_trace.weights).items()
    }
    return embeddings_graph(TracedGraph(tiny_trace.proto, weights, tiny_trace.shapes))


def measured(
    embeddings: TracedGraph, encoder: Encoder, change: Callable[[Run], Run] = lambda run: run
) -> list[Comparison]:
    config = encoder.config
    case = Case(5, 9, Padding.MIDDLE)
    inputs = make_inputs(case, config)
    hidden = opened(embeddings)(dict(inputs.feed()))["last_hidden_state"]
    run = change(opened(contributions_graph(embeddings, config, ())))
    return measure_case(run, case, inputs, config, hidden)


def failures(comparisons: list[Comparison]) -> list[str]:
    return Result(comparisons=tuple(comparisons)).failures()


def test_sweep_passes(biased: TracedGraph, tiny_encoder: Encoder) -> None:
    assert failures(measured(biased, tiny_encoder)) == []


def _without_mean(state: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """(w g) / deviation, the mean left in."""
    transposes.TRANSPOSES["true norm"](state, node, gradient)
    quotient = state.writer.graph.node[-1]
    (centered,) = [made for made in state.writer.graph.node if made.output[0] == quotient.input[0]]
    assert (quotient.op_type, centered.op_type) == ("Div", "Sub")
    quotient.input[0] = centered.input[0]


def _not_transposed(state: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """A g in place of A' g."""
    if state.flow(node.input[0]) is Flow.FROZEN:
        value = node.input[1]
        state.add_gradient(
            value, state.writer.add("MatMul", node.input[0], gradient, shape=state.writer.shape(value))
        )
    else:
        transposes.TRANSPOSES["true product"](state, node, gradient)


def _shared(state: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """Half of the gradient to each of two addends."""
    transposes.TRANSPOSES["true sum"](
        state,
        node,
        state.writer.add("Mul", gradient, state.writer.constant(0.5), shape=state.writer.shape(gradient)),
    )


@pytest.mark.parametrize(
    ("operator", "mistake"),
    [("LayerNormalization", _without_mean), ("MatMul", _not_transposed), ("Add", _shared)],
)
def test_wrong_rule_fails_the_gate(
    biased: TracedGraph,
    tiny_encoder: Encoder,
    monkeypatch: pytest.MonkeyPatch,
    operator: str,
    mistake: transposes.Transpose,
) -> None:
    monkeypatch.setitem(transposes.TRANSPOSES, "true norm", transposes.TRANSPOSES["LayerNormalization"])
    monkeypatch.setitem(transposes.TRANSPOSES, "true product", transposes.TRANSPOSES["MatMul"])
    monkeypatch.setitem(transposes.TRANSPOSES, "true sum", transposes.TRANSPOSES["Add"])
    monkeypatch.setitem(transposes.TRANSPOSES, operator, mistake)
    found = measured(biased, tiny_encoder)
    assert found[0].value > 1e-3
    assert "max incompleteness of token_contributions on 5x9 middle is " in failures(found)[0]


def test_missing_bias_fails_the_gate(
    biased: TracedGraph, tiny_encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = SweepState.add_baseline

    def forget(state: SweepState, node: onnx.NodeProto, value: str, gradient: str) -> None:
        if value != "layers.1.feed_forward.up.bias":
            settle(state, node, value, gradient)

    monkeypatch.setattr(SweepState, "add_baseline", forget)
    assert measured(biased, tiny_encoder)[0].value > 1e-3


def test_other_mistakes_fail_their_gates(biased: TracedGraph, tiny_encoder: Encoder) -> None:
    def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> list[str]:
        def wrap(run: Run) -> Run:
            return lambda feed: {
                key: change(array) if key == name else array for key, array in run(feed).items()
            }

        return failures(measured(biased, tiny_encoder, wrap))

    padded = changed("token_contributions", lambda scores: scores + np.float32(1e-9))
    assert "score of padding on 5x9 middle is 1e-09 (limit 0)" in padded[0]
    other = changed("embedding", lambda vectors: vectors + np.float32(0.01))
    assert any("error of the embedding" in line for line in other)
    crowded = changed(
        "token_contributions", lambda scores: scores + np.float32(len(scores) - 5) * (scores != 0)
    )
    assert any("max batch difference of token_contributions" in line for line in crowded)
    broken = changed("head_contributions", lambda heads: heads * np.float32(np.nan))
    assert "number of outputs with NaN or infinity on 5x9 middle is 1 (limit 0)" in broken[0]


HEAD_MISTAKES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "reversed": lambda heads: heads[:, :, ::-1],
    "of another layer": lambda heads: heads[:, ::-1],
    "times -7": lambda heads: heads * np.float32(-7),
    "one too large": lambda heads: heads * np.array([1, 1, 1.01, 1], np.float32),
}


@pytest.mark.parametrize("mistake", [None, *HEAD_MISTAKES])
def test_wrong_head_contributions_fail_the_gate(
    biased: TracedGraph, tiny_encoder: Encoder, mistake: str | None
) -> None:
    config = tiny_encoder.config
    graph = contributions_graph(biased, config, ())
    limit_to_sweep(graph.proto)
    run = opened(graph)

    def changed(feed: dict[str, Any]) -> dict[str, np.ndarray]:
        found = run(feed)
        heads = found[HEAD_CONTRIBUTIONS]
        return found | {HEAD_CONTRIBUTIONS: HEAD_MISTAKES[mistake](heads) if mistake else heads}

    found = compare_slope(changed, config, config.hidden_size)
    assert found.name == "max incompleteness of head_contributions"
    assert found.limit == 1e-5
    assert found.passed is (mistake is None)


def verdict_with(
    directory: Path, quick: ExportOptions, path: str, change: Callable[[onnx.GraphProto], None]
) -> Verdict:
    """Measure a bundle of which one graph was changed."""
    config = small_config()
    export_bundle(config, directory, quick)
    change_graph(directory, path, change)
    subject = Subject(directory, References(new_encoder(config, seed=0)), config, "", small_grid(16))
    return measure_graphs(subject, {}, no_progress, beyond_grid=False)


def measured_with(directory: Path, quick: ExportOptions, change: Callable[[onnx.GraphProto], None]) -> Result:
    """Measure a bundle whose contribution graph was changed."""
    contributions = verdict_with(directory, quick, CONTRIBUTIONS_PATH, change).contributions
    assert contributions is not None
    return contributions


@pytest.mark.parametrize(
    ("path", "output", "message"),
    [
        (ATTENTIONS_PATH, "attentions.0", "max abs error of attention_weights on "),
        (CONTRIBUTIONS_PATH, "head_contributions", "max abs error of head_contributions"),
    ],
)
def test_graph_with_heads_in_another_order_fails(
    path: str, output: str, message: str, tmp_path: Path, quick: ExportOptions
) -> None:
    """All sums and row sums remain the same."""
    axis = 1 if path == ATTENTIONS_PATH else 2
    nodes = [
        constant("order", [1, 0, 2, 3], TensorProto.INT64),
        helper.make_node("Gather", ["inner", "order"], [output], axis=axis),
    ]
    failures = verdict_with(tmp_path / "bundle", quick, path, through(output, *nodes)).failures()
    assert any(message in line for line in failures)


def test_graph_with_the_right_sum_and_wrong_scores_fails(tmp_path: Path, quick: ExportOptions) -> None:
    """Every token gets the same score, so that all gates pass that only add scores."""
    nodes = [
        helper.make_node("Cast", ["attention_mask"], ["live"], to=1),
        constant("tokens", [1], TensorProto.INT64),
        helper.make_node("ReduceSum", ["inner", "tokens"], ["total"], keepdims=1),
        helper.make_node("ReduceSum", ["live", "tokens"], ["count"], keepdims=1),
        constant("one", 1.0),
        helper.make_node("Max", ["count", "one"], ["divisor"]),
        helper.make_node("Div", ["total", "divisor"], ["mean"]),
        helper.make_node("Mul", ["mean", "live"], ["token_contributions"]),
    ]
    found = measured_with(tmp_path / "bundle", quick, through("token_contributions", *nodes))
    [failure] = found.failures()
    assert "max abs error of token_contributions on " in failure
    assert failure.endswith(": the reference is PyTorch's gradient")


def test_gate_that_closes_another_head_fails(tmp_path: Path, quick: ExportOptions) -> None:
    """The embedding with some heads removed is that of PyTorch without the same heads."""

    def measured(change: Callable[[onnx.GraphProto], None]) -> Result:
        return measured_with(tmp_path / change.__name__, quick, change)

    def unchanged(_graph: onnx.GraphProto) -> None:
        pass

    def other_layer(graph: onnx.GraphProto) -> None:
        """Layer 0 reads the gates of layer 1, in the sweep as well: scores add up all the same."""
        first, second = [
            node for node in graph.node if node.op_type == "Gather" and "head_gates" in node.input
        ]
        first.input[1] = second.input[1]

    def never_closed(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.output[0].startswith("gated_"):
                node.op_type = "Identity"
                del node.input[1:]

    assert measured(unchanged).failures() == []
    assert any(
        "max abs error of embedding on 1x16 none without some heads" in line
        for line in measured(other_layer).failures()
    )
    assert any("incompleteness without some heads" in line for line in measured(never_closed).failures())


def test_gates_are_1e_5_or_0(biased: TracedGraph, tiny_encoder: Encoder) -> None:
    found = measured(biased, tiny_encoder)
    assert {each.name: each.limit for each in found} == {
        "max incompleteness of token_contributions": 1e-5,
        "max batch difference of token_contributions": 1e-5,
        "number of outputs with NaN or infinity": 0,
        "error of the embedding": 1e-5,
        "score of padding": 0,
    }


def test_limit_of_logits_follows_the_error_of_pytorch(biased: TracedGraph, tiny_encoder: Encoder) -> None:
    """A logit whose terms cancel is less exact than the token vectors, in PyTorch as well."""
    config, case = tiny_encoder.config, Case(1, 9, Padding.NONE)
    inputs = make_inputs(case, config)
    hidden = opened(biased)(dict(inputs.feed()))["last_hidden_state"]
    pooled = hidden[0].mean(axis=0, dtype=np.float64)
    weight = np.random.default_rng(3).standard_normal(pooled.shape)
    weight = weight - weight @ pooled / (pooled @ pooled) * pooled
    weight = (1e3 * weight[None]).astype(np.float32)
    to_logits = DenseWeights(weight, None, Activation.ACTIVATION_IDENTITY, normalize_input=False)
    run = opened(contributions_graph(biased, config, [to_logits]))

    def measure(change: float, exact: np.ndarray | None) -> list[Comparison]:
        def changed(feed: dict[str, Any]) -> dict[str, np.ndarray]:
            outputs = run(feed)
            return outputs | {"embedding": outputs["embedding"] + np.float32(change)}

        dense = [DenseLayer(weight, None, lambda x: x, normalize_input=False)]
        return measure_case(changed, case, inputs, config, hidden, dense, Pooling.MEAN, exact)

    exact = hidden * (1 + 1e-7 * np.random.default_rng(4).standard_normal(hidden.shape))

    def limit(found: list[Comparison]) -> float:
        [each] = [each for each in found if each.name == "error of the embedding"]
        return each.limit

    found = measure(0.0, exact)
    assert 1e-5 < limit(found) < 0.01
    assert failures(found) == []
    assert limit(measure(0.0, None)) == pytest.approx(1e-5)
    [failure] = failures(measure(0.1, exact))
    assert "error of the embedding" in failure


def small_graph(*nodes: onnx.NodeProto) -> tuple[GraphWriter, str]:
    """A graph from embeddings (B, T, D) over a bias to `out`, and the name of a gradient."""
    graph = onnx.GraphProto()
    graph.node.extend(nodes)
    rows = ("batch_size", "sequence_length", 4)
    shapes = dict.fromkeys(("embedded", "inner", "out", "gradient"), rows)
    return GraphWriter(graph, {"bias": np.ones(4, dtype=np.float32)}, shapes), "gradient"


def test_unsupported_operators_are_rejected_by_name() -> None:
    unknown = small_graph(helper.make_node("Sin", ["embedded"], ["out"], name="sin_0"))
    with pytest.raises(GraphError, match=r"no contributions: out is not linear in the token embeddings"):
        sweep(SweepState(unknown[0], ()), "out", unknown[1])
    added = small_graph(
        helper.make_node("Sin", ["embedded"], ["inner"], name="sin_0"),
        helper.make_node("Add", ["embedded", "inner"], ["out"], name="add_0"),
    )
    with pytest.raises(GraphError, match=r"Add 'add_0' adds 'inner' to a linear function of the embeddings"):
        sweep(SweepState(added[0], ()), "out", added[1])
    shapeless = small_graph(helper.make_node("Add", ["embedded", "bias"], ["out"], name="add_0"))
    del shapeless[0].shapes["gradient"]
    with pytest.raises(GraphError, match=r"the shape of 'gradient' is not known from the trace"):
        sweep(SweepState(shapeless[0], ()), "out", shapeless[1])


def test_subtrahend_gets_the_negated_gradient() -> None:
    writer, gradient = small_graph(helper.make_node("Sub", ["bias", "embedded"], ["out"]))
    state = SweepState(writer, ())
    transposes.TRANSPOSES["Sub"](state, writer.graph.node[0], gradient)
    [node] = [made for made in writer.graph.node if made.output[0] == state.gradient("embedded")]
    numbers = np.array([[[1.0, -2.0, 0.0, 3.0]]], dtype=np.float32)
    feed = {name: writer.weights.get(name, numbers) for name in node.input}
    assert gradient in feed
    [found] = ReferenceEvaluator(node).run(None, feed)
    np.testing.assert_array_equal(found, -numbers)


def test_operator_without_a_rule_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, gradient = small_graph(helper.make_node("Relu", ["embedded"], ["out"], name="relu_0"))
    monkeypatch.delitem(transposes.TRANSPOSES, "Relu")
    with pytest.raises(GraphError, match="the operator Relu of 'relu_0', which is between"):
        sweep(SweepState(writer, ()), "out", gradient)


@pytest.mark.parametrize(
    ("projection", "message"),
    [
        ("value", "the head outputs of layer 1 are not linear in the token embeddings: .* Sin 'sin_0'"),
        ("output", "Add '.*' adds '.*' .* nonlinearly: .* Sin 'sin_0'"),
    ],
)
def test_operator_that_makes_heads_nonlinear_is_named(
    projection: str, message: str, biased: TracedGraph, tiny_encoder: Encoder
) -> None:
    proto = copy.deepcopy(biased.proto)
    nodes = list(proto.graph.node)
    place, value = next(
        (place, node)
        for place, node in enumerate(nodes)
        if node.op_type == "MatMul" and node.input[1].endswith(f"layers.1.attention.{projection}.weight.T")
    )
    is_before = projection == "value"
    source = value.input[0] if is_before else value.output[0]
    bent = helper.make_node("Sin", [source], ["bent"], name="sin_0")
    for node in [value] if is_before else nodes[place + 1 :]:
        node.input[:] = ["bent" if name == source else name for name in node.input]
    shapes = {**biased.shapes, "bent": biased.shapes[source]}
    place += not is_before
    del proto.graph.node[:]
    proto.graph.node.extend([*nodes[:place], bent, *nodes[place:]])
    with pytest.raises(GraphError, match=message):
        contributions_graph(TracedGraph(proto, biased.weights, shapes), tiny_encoder.config, ())


def test_flows() -> None:
    nodes = [
        helper.make_node("MatMul", ["embedded", "weight"], ["linear"]),
        helper.make_node("MatMul", ["linear", "embedded"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"]),
        helper.make_node("MatMul", ["weights", "linear"], ["context"]),
        helper.make_node("ReduceSum", ["weights"], ["sums"]),
        helper.make_node("Mul", ["sums", "weight"], ["weighed bias"]),
        helper.make_node("Sigmoid", ["linear"], ["ratio"]),
        helper.make_node("Mul", ["linear", "ratio"], ["activated"]),
        helper.make_node("Mul", ["context", "activated"], ["gated"]),
        helper.make_node("Mul", ["context", "linear"], ["square"]),
        helper.make_node("MatMul", ["square", "weight"], ["projected square"]),
        helper.make_node("Mul", ["embedded", "constant_0"], ["zeros"]),
        helper.make_node("Mul", ["activated", "gated"], ["square of activations"]),
        helper.make_node("Sqrt", ["square"], ["deviation"]),
        helper.make_node("Div", ["linear", "deviation"], ["normalised"]),
        helper.make_node("Mul", ["normalised", "activated"], ["gated norm"]),
        helper.make_node("Div", ["activated", "deviation"], ["normalised activation"]),
        helper.make_node("Pow", ["activated", "two"], ["square of an activation"]),
        helper.make_node("Pow", ["activated", "three"], ["cube of an activation"]),
        helper.make_node("Pow", ["linear", "two"], ["square of a linear value"]),
    ]
    weights = {"two": np.array(2.0, np.float32), "three": np.array(3.0, np.float32)}
    weights |= {"weight": np.ones((4, 4), np.float32), "constant_0": np.zeros((), np.float32)}
    flows = find_flows(onnx.GraphProto(node=nodes), weights, ())
    assert [flows.get(node.output[0], Flow.CONSTANT) for node in nodes] == [
        Flow.LINEAR,
        Flow.FROZEN,
        Flow.FROZEN,
        Flow.LINEAR,
        Flow.FROZEN,
        Flow.OFFSET,
        Flow.FROZEN,
        Flow.ACTIVATED,
        Flow.ACTIVATED,
        Flow.FROZEN,
        Flow.FROZEN,
        Flow.CONSTANT,
        Flow.FROZEN,
        Flow.FROZEN,
        Flow.LINEAR,
        Flow.ACTIVATED,
        Flow.ACTIVATED,
        Flow.ACTIVATED,
        Flow.FROZEN,
        Flow.FROZEN,
    ]


def test_gate_turns_a_head_off(tiny_encoder: Encoder, biased: TracedGraph) -> None:
    """Its contribution is 0 then, and the embedding another."""
    config = tiny_encoder.config
    inputs: Inputs = make_inputs(Case(3, 9, Padding.RIGHT), config)
    feed = make_feed(inputs, config, config.hidden_size)
    run = opened(contributions_graph(biased, config, ()))
    whole = run(feed)
    gates = feed["head_gates"].copy()
    gates[1, 0, 2] = 0
    found = run(feed | {"head_gates": gates})
    assert np.array_equal(found["embedding"][[0, 2]], whole["embedding"][[0, 2]])
    assert np.abs(found["embedding"][1] - whole["embedding"][1]).max() > 1e-3
    weights = dict(biased.weights)
    width = config.hidden_size // 4
    name = "layers.0.attention.output.weight.T"
    weights[name] = weights[name].copy()
    weights[name][2 * width : 3 * width] = 0
    without = opened(contributions_graph(TracedGraph(biased.proto, weights, biased.shapes), config, ()))(feed)
    assert np.allclose(found["embedding"][1], without["embedding"][1], atol=2e-6)
