"""What goes into the products of a graph, over calibration texts. B batch, T tokens, K width."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from attnlens_export.graph.trace import TracedGraph
from attnlens_export.graph.write import Place, write_referring
from attnlens_export.int8.products import FloatArray, Group
from attnlens_export.int8.sessions import open_session
from attnlens_export.int8.texts import Batch

MAX_SAMPLE_ROWS = 1024
# Of all groups whose inputs are collected in one pass over the texts.
MAX_COVARIANCE_BYTES = 2**29

Progress = Callable[[int, int], None]


@dataclass
class Activations:
    """The inputs of a group, live tokens only.

    In a mean every kind of text counts the same, so does every text of a kind, and so does every token of a
    text: else the few tokens of very short texts would count next to nothing.

    Attributes:
        lowest: the least value of each column, (K,).
        highest: the largest value of each column, (K,).
        covariance: the mean of x x', (K, K).
        rows: samples of x that stand for the same share of that mean each, (R, K).
    """

    lowest: FloatArray
    highest: FloatArray
    covariance: FloatArray
    rows: FloatArray

    @property
    def largest(self) -> FloatArray:
        """The largest magnitude of each column, (K,)."""
        return np.maximum(np.abs(self.lowest), np.abs(self.highest))

    @property
    def mean_squares(self) -> FloatArray:
        """The mean of x^2, (K,)."""
        return np.asarray(np.diag(self.covariance))


class _Collector:
    def __init__(self) -> None:
        self._sum_weights = 0.0
        self._samples: list[FloatArray] = []
        self._lowest: FloatArray = np.zeros(0, np.float32)
        self._highest: FloatArray = np.zeros(0, np.float32)
        self._squares: FloatArray = np.zeros((0, 0), np.float32)

    def add(self, rows: FloatArray, weights: FloatArray) -> None:
        """Take rows (M, K) with their weights (M,): the sum of all weights is 1."""
        if not self._samples:
            self._lowest, self._highest = rows[0].copy(), rows[0].copy()
            self._squares = np.zeros((rows.shape[1], rows.shape[1]), np.float32)
        # A row is as many samples as there are multiples of the step within its part of the whole.
        ends = (self._sum_weights + np.cumsum(weights, dtype=np.float64)) * MAX_SAMPLE_ROWS
        counts = np.diff(np.floor(ends), prepend=np.floor(self._sum_weights * MAX_SAMPLE_ROWS))
        self._samples.append(np.repeat(rows, counts.astype(np.int64), axis=0))
        self._sum_weights = float(ends[-1]) / MAX_SAMPLE_ROWS
        np.minimum(self._lowest, rows.min(axis=0), out=self._lowest)
        np.maximum(self._highest, rows.max(axis=0), out=self._highest)
        self._squares += (rows * weights[:, None]).T @ rows

    def result(self) -> Activations:
        return Activations(self._lowest, self._highest, self._squares, np.concatenate(self._samples))


def collect(
    graph: TracedGraph,
    groups: Sequence[Group],
    kinds: Sequence[Sequence[Batch]],
    directory: Path,
    places: Mapping[str, Place],
    progress: Progress,
) -> dict[str, Activations]:
    """Run a graph and look at the inputs of all groups.

    Args:
        graph: in fp32.
        groups: those of the graph.
        kinds: what to run, by the kind of text.
        directory: where the weights are, and where a temporary graph is written.
        places: of the weights.
        progress: called before each pass with its number and the number of passes.

    Returns:
        By source. A value that is not one row for each token, such as the table of a relative bias, is left
        out.
    """
    parts = list(_parts(groups, graph))
    found: dict[str, Activations] = {}
    for number, part in enumerate(parts):
        progress(number, len(parts))
        found |= _collect_part(graph, part, kinds, directory, places)
    return found


def _parts(groups: Sequence[Group], graph: TracedGraph) -> Iterator[list[str]]:
    """Divide the groups so that their covariances fit into memory."""
    part: list[str] = []
    size_bytes = 0
    for group in groups:
        group_bytes = 4 * graph.weights[group.weights[0]].shape[0] ** 2
        if part and size_bytes + group_bytes > MAX_COVARIANCE_BYTES:
            yield part
            part, size_bytes = [], 0
        part.append(group.source)
        size_bytes += group_bytes
    yield part


def _collect_part(
    graph: TracedGraph,
    sources: list[str],
    kinds: Sequence[Sequence[Batch]],
    directory: Path,
    places: Mapping[str, Place],
) -> dict[str, Activations]:
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    present = {output.name for output in proto.graph.output}
    proto.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        for name in sources
        if name not in present
    )
    path = directory / ".calibration.onnx"
    write_referring(path, proto, graph.weights, places)
    session = open_session(path)
    path.unlink()
    collectors = {name: _Collector() for name in sources}
    for kind in kinds:
        num_texts = sum(len(batch.places) for batch in kind)
        for batch in kind:
            live = batch.inputs.attention_mask == 1
            weights = (live / live.sum(axis=1, keepdims=True) / num_texts / len(kinds))[live]  # (M,)
            for name, value in zip(sources, session.run(sources, batch.inputs.feed()), strict=True):
                if value.shape[:-1] != live.shape:
                    collectors.pop(name, None)
                elif name in collectors:
                    collectors[name].add(value[live], weights.astype(np.float32))
    return {name: each.result() for name, each in collectors.items()}
