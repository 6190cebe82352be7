"""Builds the logits graph of a classifier and compares it with PyTorch.

The graph consists of the encoder, followed by the pooling and linear layers of the head.

Shapes: B texts in a batch, T tokens, D hidden size, C labels.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from onnx import TensorProto, helper
from torch.nn import functional

from attnlens.v1.manifest_pb2 import Activation, Pooling
from attnlens_export.contributions.one_token import last_hidden_state_of_one_token
from attnlens_export.contributions.tail import DenseWeights, add_dense
from attnlens_export.contributions.write import read_layer
from attnlens_export.contributions.writer import GraphWriter
from attnlens_export.graph.names import (
    ATTENTION_MASK,
    BATCH_AXIS,
    HIDDEN_OUTPUT,
    LENGTH_AXIS,
    LOGITS_OUTPUT,
    MODEL_PATH,
)
from attnlens_export.graph.trace import TracedGraph, drop_unread
from attnlens_export.parity.grid import Inputs
from attnlens_export.parity.measure import (
    Subject,
    compare_output,
    draw_inputs,
    shortest_text,
)
from attnlens_export.parity.reference import TOLERANCE, allowed_error, max_abs_difference
from attnlens_export.parity.sessions import Graph, RunnableGraph
from attnlens_export.progress import StageProgress, report_each
from attnlens_export.published.classifier import read_stored_pooling
from attnlens_export.results import Comparison, Result

Array = npt.NDArray[np.floating]


def logits_graph(
    embeddings: TracedGraph, pooling: Pooling.ValueType, layers: Sequence[DenseWeights]
) -> TracedGraph:
    """Derive the logits graph from the embeddings graph. Both use the same weights.

    Args:
        embeddings: Embeddings graph, as returned by `embeddings_graph`.
        pooling: Pooling of the head: cls, mean or last token.
        layers: Linear layers of the head.

    Returns:
        Graph with the output `logits` (B, C).
    """
    proto = copy.deepcopy(embeddings.proto)
    graph = proto.graph
    graph.name = "logits"
    writer = GraphWriter(graph, embeddings.weights, embeddings.shapes, "head")
    logits = add_dense(writer, _add_pooling(writer, pooling), layers)
    writer.add("Identity", logits, name=LOGITS_OUTPUT, shape=writer.shape(logits))
    del graph.output[:]
    axes = (BATCH_AXIS, len(layers[-1].weight))
    graph.output.append(helper.make_tensor_value_info(LOGITS_OUTPUT, TensorProto.FLOAT, axes))
    read = drop_unread(graph)
    weights = {name: array for name, array in writer.weights.items() if name in read}
    return TracedGraph(proto, weights, writer.shapes)


def _add_pooling(writer: GraphWriter, pooling: Pooling.ValueType) -> str:
    """Add nodes that pool the token vectors and ignore padding, and return the name of the result (B, D)."""
    tokens = (BATCH_AXIS, LENGTH_AXIS)
    weights = writer.add("Cast", ATTENTION_MASK, to=TensorProto.FLOAT, shape=tokens)
    if pooling == Pooling.POOLING_MEAN:
        count = writer.sum(weights, [1], keepdims=True)
        one = writer.constant(1.0)
        # Avoid division by zero for a text without tokens: max(x, 1) = relu(x - 1) + 1.
        count = writer.add("Sub", count, one, shape=(BATCH_AXIS, 1))
        count = writer.add("Relu", count, shape=(BATCH_AXIS, 1))
        count = writer.add("Add", count, one, shape=(BATCH_AXIS, 1))
        weights = writer.add("Div", weights, count, shape=tokens)
    else:
        # Count tokens from the start or the end. At the pooled token, the count and relu(2 - count) are 1.
        # At later tokens, relu(2 - count) is 0. The mask removes padding.
        is_last = pooling == Pooling.POOLING_LAST_TOKEN
        count = writer.add(
            "CumSum", weights, writer.constant(np.array(1, np.int64)), reverse=int(is_last), shape=tokens
        )
        selected = writer.add(
            "Relu", writer.add("Sub", writer.constant(2.0), count, shape=tokens), shape=tokens
        )
        weights = writer.add("Mul", selected, weights, shape=tokens)
        width = int(writer.shape(HIDDEN_OUTPUT)[-1])
        vector = last_hidden_state_of_one_token(writer, weights)
        if vector is not None:
            return writer.reshape(vector, [0, width], (BATCH_AXIS, width))
    weights = writer.add("Unsqueeze", weights, writer.constant([2]), shape=(*tokens, 1))
    vectors = writer.add("Mul", HIDDEN_OUTPUT, weights, shape=writer.shape(HIDDEN_OUTPUT))
    return writer.sum(vectors, [1])


def measure_logits(subject: Subject, progress: StageProgress, graph: RunnableGraph | None = None) -> Result:
    """Compare a bundle's logits graph with the PyTorch encoder and head for every case.

    Args:
        subject: Bundle and reference.
        progress: Called before each case.
        graph: Graph opened in another runtime. If None, ONNX Runtime opens the bundle's graph.

    Returns:
        The measurements. Differences do not raise an exception; see `Result.failures`.
    """
    directory = subject.directory
    head = HeadReference(directory, subject.config.vector_size)
    graph = graph or Graph(directory, MODEL_PATH)
    inputs = draw_inputs(subject)
    comparisons: list[Comparison] = []
    all_errors = []
    for case in report_each(subject.cases, progress):
        mask = inputs[case].attention_mask
        live: npt.NDArray[np.bool_] = np.asarray(mask.any(axis=1))
        found = graph.run(inputs[case])[LOGITS_OUTPUT]
        hidden = subject.references.fp32(inputs[case])[HIDDEN_OUTPUT]
        expected = head.logits(hidden, mask, torch.float32)
        exact_hidden = subject.references.float64(inputs[case])[HIDDEN_OUTPUT]
        exact = head.logits(exact_hidden, mask, torch.float64)
        # Logits are compared as one token per text.
        measured, fp32, float64 = (array[:, None] for array in (found, expected, exact))
        errors = compare_output(
            MODEL_PATH, LOGITS_OUTPUT, LOGITS_OUTPUT, measured, fp32, float64, live[:, None]
        )
        scale = max(1.0, float(np.abs(expected[live]).max()))
        limit = max(TOLERANCE * scale, allowed_error(errors.torch_max_abs_error_float64))
        comparisons += errors.compare(str(case), limit, _max_batch_difference(graph, inputs[case], found))
        all_errors.append(replace(errors, num_tokens=case.length))
    progress("", len(subject.cases), len(subject.cases))
    return Result(
        title="Logits",
        reference="the PyTorch encoder and head",
        inputs=f"{len(subject.cases)} input shapes",
        comparisons=tuple(comparisons),
        errors=tuple(all_errors),
    )


def _max_batch_difference(graph: RunnableGraph, inputs: Inputs, found: Array) -> float:
    row = shortest_text(inputs)
    if row is None:
        return 0.0
    return max_abs_difference(graph.run(inputs.alone(row))[LOGITS_OUTPUT][0], found[row])


class HeadReference:
    """PyTorch implementation of the head, independent of the graph."""

    def __init__(self, directory: Path, hidden_size: int) -> None:
        defaults = read_stored_pooling(directory, hidden_size)
        self._pooling = defaults.pooling
        self._layers = [read_layer(directory, layer) for layer in defaults.dense]

    def logits(self, hidden: Array, mask: npt.NDArray[np.int64], dtype: torch.dtype) -> Array:
        """Return the logits (B, C) for token vectors (B, T, D)."""
        rows = [
            self._pool(torch.from_numpy(text[live == 1]).to(dtype))
            if live.any()
            else torch.zeros(text.shape[1])
            for text, live in zip(hidden, mask, strict=True)
        ]
        values = torch.stack([row.to(dtype) for row in rows])
        for layer in self._layers:
            bias = None if layer.bias is None else torch.from_numpy(layer.bias).to(dtype)
            values = functional.linear(values, torch.from_numpy(layer.weight).to(dtype), bias)
            values = _ACTIVATIONS[layer.activation](values)
            if layer.norm is not None:
                scale, shift = (torch.from_numpy(array).to(dtype) for array in layer.norm)
                values = functional.layer_norm(values, values.shape[1:], scale, shift, layer.norm_epsilon)
        logits: Array = values.numpy()
        return logits

    def _pool(self, vectors: torch.Tensor) -> torch.Tensor:
        match self._pooling:
            case Pooling.POOLING_MEAN:
                return vectors.mean(dim=0)
            case Pooling.POOLING_LAST_TOKEN:
                return vectors[-1]
        return vectors[0]


_ACTIVATIONS: dict[Activation.ValueType, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.ACTIVATION_IDENTITY: lambda x: x,
    Activation.ACTIVATION_TANH: torch.tanh,
    Activation.ACTIVATION_RELU: torch.relu,
    Activation.ACTIVATION_GELU: functional.gelu,
    Activation.ACTIVATION_GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.ACTIVATION_SILU: functional.silu,
}
