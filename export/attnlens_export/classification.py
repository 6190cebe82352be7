"""Builds the logits graph of a classifier and compares it with PyTorch.

The graph consists of the encoder, followed by the pooling and linear layers of the head.

Shapes: B texts in a batch, T tokens, D hidden size, C labels.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from onnx import TensorProto, helper
from torch.nn import functional

from attnlens.v1.manifest_pb2 import Activation, GateKind, OutputRole, ParityFigure, Pooling
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
from attnlens_export.json_files import finite
from attnlens_export.parity.grid import Inputs
from attnlens_export.parity.measure import (
    Errors,
    Subject,
    draw_inputs,
    exact_hidden_states,
    shortest_text,
    worst_errors,
)
from attnlens_export.parity.reference import (
    TOLERANCE,
    allowed_error,
    max_abs_difference,
    run_fp32,
)
from attnlens_export.parity.sessions import Graph, RunnableGraph
from attnlens_export.progress import StageProgress, report_each
from attnlens_export.published.classifier import read_stored_pooling
from attnlens_export.results import Figure, FigureSet, GraphResult, Table, max_or_nan

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


@dataclass(frozen=True)
class LogitsCase(Errors, FigureSet):
    """Logit errors for one input shape.

    Attributes:
        case: Input shape.
        length: Number of tokens.
        allowed_error: Limit for `max_abs_error` and `max_batch_difference`.
        max_batch_difference: Maximum difference of the shortest text's logits alone and in the batch.
    """

    case: str
    length: int
    allowed_error: float
    max_batch_difference: float

    def figures(self) -> list[Figure]:
        """Return the error relative to PyTorch and the batch difference."""
        limit = f"(limit {self.allowed_error:.2e})"
        where, role = f"{MODEL_PATH} at {self.case}", OutputRole.OUTPUT_ROLE_LOGITS
        return [
            Figure(MODEL_PATH, value, self.allowed_error, f"{where}: {failure} {limit}", kind, role)
            for value, failure, kind in (
                (
                    self.max_abs_error,
                    f"logits differ from PyTorch by {self.max_abs_error:.2e}",
                    GateKind.GATE_KIND_MAX_ABS_ERROR,
                ),
                (
                    self.max_batch_difference,
                    f"logits of a text alone differ by {self.max_batch_difference:.2e}",
                    GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE,
                ),
            )
        ]


@dataclass(frozen=True)
class LogitsResult(GraphResult):
    """All measurements of the logits graph."""

    name: ClassVar[str] = "logits"
    path: ClassVar[str] = MODEL_PATH
    title: ClassVar[str] = "Logits"

    cases: tuple[LogitsCase, ...]

    def figures(self) -> list[Figure]:
        """Return the figures of all cases."""
        return [figure for case in self.cases for figure in case.figures()]

    def manifest_figures(self) -> list[ParityFigure]:
        """Return the worst errors over all cases."""
        return [worst_errors(self.cases, max(case.length for case in self.cases))]

    def to_json(self) -> dict[str, Any]:
        """Return all measurements as JSON values. Non-finite numbers become None."""
        return {"cases": [finite(asdict(case)) for case in self.cases]}

    def table(self) -> Table:
        """Return the maximum errors as a remark."""
        error = max_or_nan(case.max_abs_error for case in self.cases)
        limit = max(case.allowed_error for case in self.cases)
        difference = max_or_nan(case.max_batch_difference for case in self.cases)
        remark = (
            f"logits: within {error:.1e} of PyTorch, and within {difference:.1e} for a text alone and in "
            f"a batch (limit for both: {limit:.1e})"
        )
        return Table(f"{len(self.cases)} input shapes", remarks=(remark,))


def measure_logits(
    subject: Subject, progress: StageProgress, graph: RunnableGraph | None = None
) -> LogitsResult:
    """Compare a bundle's logits graph with the PyTorch encoder and head for every case.

    Args:
        subject: Bundle and reference.
        progress: Called before each case.
        graph: Graph opened in another runtime. If None, ONNX Runtime opens the bundle's graph.

    Returns:
        The measurements. Differences do not raise an exception; see `LogitsResult.failures`.
    """
    directory = subject.directory
    head = HeadReference(directory, subject.config.vector_size)
    graph = graph or Graph(directory, MODEL_PATH)
    inputs = draw_inputs(subject)
    cases = []
    for case in report_each(subject.cases, progress):
        mask = inputs[case].attention_mask
        live: npt.NDArray[np.bool_] = np.asarray(mask.any(axis=1))
        found = graph.run(inputs[case])[LOGITS_OUTPUT][live]
        hidden = run_fp32(subject.encoder, inputs[case], with_attentions=False)[HIDDEN_OUTPUT]
        expected = head.logits(hidden, mask, torch.float32)[live]
        exact_states = exact_hidden_states(subject, case, inputs[case])
        exact = head.logits(exact_states, mask, torch.float64)[live]
        scale = max(1.0, float(np.abs(expected).max()))
        cases.append(
            LogitsCase(
                graph=MODEL_PATH,
                role="logits",
                case=str(case),
                length=case.length,
                allowed_error=max(TOLERANCE * scale, allowed_error(max_abs_difference(expected, exact))),
                max_batch_difference=_max_batch_difference(graph, inputs[case], found, live),
                **_errors(found, expected, exact),
            )
        )
    progress("", len(cases), len(cases))
    return LogitsResult(tuple(cases))


def _errors(found: Array, expected: Array, exact: Array) -> dict[str, Any]:
    """Return the fields of `Errors` that compare logits."""
    errors = np.abs(np.subtract(found, expected, dtype=np.float64))
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosines = np.divide((found * expected).sum(axis=1), norms, out=np.ones_like(norms), where=norms > 0)
    return {
        "max_abs_error": float(errors.max()),
        "max_abs_error_float64": max_abs_difference(found, exact),
        "torch_max_abs_error_float64": max_abs_difference(expected, exact),
        "mean_abs_error": float(errors.mean()),
        "p99_abs_error": float(np.percentile(errors, 99)),
        "min_cosine": float(cosines.min()),
        "num_elements": errors.size,
    }


def _max_batch_difference(
    graph: RunnableGraph, inputs: Inputs, found: Array, live: npt.NDArray[np.bool_]
) -> float:
    row = shortest_text(inputs)
    if row is None:
        return 0.0
    alone = graph.run(inputs.alone(row))[LOGITS_OUTPUT]
    return max_abs_difference(alone[0], found[int(live[:row].sum())])


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
