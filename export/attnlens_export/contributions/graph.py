"""Construction of the contributions graph: the embeddings graph, pooling, and the backward sweep."""

import copy
from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from attnlens_export.contributions import heads, tail
from attnlens_export.contributions.one_token import limit_to_one_token
from attnlens_export.contributions.state import SweepState
from attnlens_export.contributions.sweep import sweep
from attnlens_export.contributions.writer import GraphWriter
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import (
    BASELINE,
    NUM_DIMENSIONS,
    POOLING_WEIGHTS,
    TOKEN_CONTRIBUTIONS,
    contribution_inputs,
    contribution_outputs,
    inner_name,
    layer_outputs,
)
from attnlens_export.graph.trace import TracedGraph, drop_unread
from attnlens_model import EncoderConfig


def contributions_graph(
    embeddings: TracedGraph,
    config: EncoderConfig,
    dense: Sequence[tail.DenseWeights],
    *,
    pools_one_token: bool = False,
) -> TracedGraph:
    """Derive the contributions graph from the embeddings graph. Both use the same weights.

    Args:
        embeddings: Graph returned by `embeddings_graph`.
        config: Configuration of its encoder.
        dense: Dense layers after pooling, whose weights are added to the graph.
        pools_one_token: Whether all pooling weights but one are 0. If there is a rule for the last layer, it
            is then computed only for this token.

    Returns:
        Contributions graph. docs/bundle.md lists its inputs and outputs.

    Raises:
        GraphError: The encoder contains an operator without a rule.
    """
    if pools_one_token:
        embeddings = limit_to_one_token(embeddings, POOLING_WEIGHTS) or embeddings
    proto = copy.deepcopy(embeddings.proto)
    graph = proto.graph
    graph.name = "contributions"
    writer = GraphWriter(graph, embeddings.weights, embeddings.shapes)
    gated = heads.add_gates(writer, config)
    vector = tail.add_dense(writer, tail.add_pooling(writer), dense)
    gradient = tail.add_target(writer, vector)
    state = SweepState(writer, {inner_name(name) for name in layer_outputs(config)})
    _check_heads(state, gated)
    scores, baseline = sweep(state, vector, gradient)
    _check_gradients(state, gated)
    heads.add_contributions(writer, gated, [state.gradient(layer.after) for layer in gated])
    for name, value in ((TOKEN_CONTRIBUTIONS, scores), (BASELINE, baseline)):
        writer.add("Identity", value, name=name, shape=writer.shape(value))
    _declare(graph, config, int(writer.shape(vector)[-1]))
    read = drop_unread(graph)
    return TracedGraph(
        proto, {name: array for name, array in writer.weights.items() if name in read}, writer.shapes
    )


def _check_heads(state: SweepState, gated: Sequence[heads.GatedHeads]) -> None:
    """Raise GraphError if the outputs of the heads of a layer are not linear, so no sweep reaches them."""
    for layer, results in enumerate(gated):
        if not state.flow(results.after).is_linear:
            raise GraphError(
                f"no contributions: the head outputs of layer {layer} are not linear in the token embeddings"
                f"{state.obstacle(results.before)}"
            )


def _check_gradients(state: SweepState, gated: Sequence[heads.GatedHeads]) -> None:
    """Raise GraphError if no gradient has reached the outputs of the heads of a layer."""
    for layer, results in enumerate(gated):
        if results.after not in state.gradients:
            raise GraphError(
                f"no contributions: the result is not linear in the head outputs of layer {layer}"
                f"{state.obstacle_after(results.after)}"
            )


def _declare(graph: onnx.GraphProto, config: EncoderConfig, size: int) -> None:
    """Declare the additional inputs, and the outputs, of the graph."""
    known = {value.name for value in graph.input}
    for name, axes in contribution_inputs(config, size).items():
        if name not in known:
            kind = TensorProto.INT64 if name == NUM_DIMENSIONS else TensorProto.FLOAT
            graph.input.append(helper.make_tensor_value_info(name, kind, axes))
    del graph.output[:]
    for name, axes in contribution_outputs(config, size).items():
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, axes))
