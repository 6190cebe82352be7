"""What goes into the products of a graph, over calibration texts. B batch, T tokens, K width."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from attnlens_export.graph import TracedGraph
from attnlens_export.grid import Inputs
from attnlens_export.int8.products import FloatArray, Group
from attnlens_export.int8.sessions import open_session
from attnlens_export.weights import Place, write_referring

MAX_SAMPLE_ROWS = 1536
# Of all groups whose inputs are collected in one pass over the texts.
MAX_COVARIANCE_BYTES = 2**29

Progress = Callable[[int, int], None]


@dataclass
class Activations:
    """The inputs of a group, live tokens only.

    Attributes:
        largest: the largest magnitude of each column, (K,).
        covariance: the mean of x x', (K, K).
        rows: evenly spread samples of x, (R, K).
    """

    largest: FloatArray
    covariance: FloatArray
    rows: FloatArray

    @property
    def mean_squares(self) -> FloatArray:
        """The mean of x^2, (K,)."""
        return np.asarray(np.diag(self.covariance))


class _Collector:
    def __init__(self, num_tokens: int) -> None:
        self._step = max(1, -(-num_tokens // MAX_SAMPLE_ROWS))
        self._num_tokens = 0
        self._samples: list[FloatArray] = []
        self._largest: FloatArray = np.zeros(0, np.float32)
        self._squares: FloatArray = np.zeros((0, 0), np.float32)

    def add(self, rows: FloatArray) -> None:
        if not self._num_tokens:
            self._largest = np.zeros(rows.shape[1], np.float32)
            self._squares = np.zeros((rows.shape[1], rows.shape[1]), np.float32)
        # The same tokens whatever the batches are.
        self._samples.append(rows[-self._num_tokens % self._step :: self._step].copy())
        self._num_tokens += len(rows)
        np.maximum(self._largest, np.abs(rows).max(axis=0), out=self._largest)
        self._squares += rows.T @ rows

    def result(self) -> Activations:
        self._squares /= np.float32(self._num_tokens)
        return Activations(self._largest, self._squares, np.concatenate(self._samples))


def collect(
    graph: TracedGraph,
    groups: Sequence[Group],
    batches: Sequence[Inputs],
    directory: Path,
    places: Mapping[str, Place],
    progress: Progress,
) -> dict[str, Activations]:
    """Run a graph and look at the inputs of all groups.

    Args:
        graph: in fp32.
        groups: those of the graph.
        batches: what to run.
        directory: where the weights are, and where a graph is written for the while.
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
        found |= _collect_part(graph, part, batches, directory, places)
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
    batches: Sequence[Inputs],
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
    num_tokens = sum(int(each.attention_mask.sum()) for each in batches)
    collectors = {name: _Collector(num_tokens) for name in sources}
    for batch in batches:
        live = batch.attention_mask == 1
        for name, value in zip(sources, session.run(sources, batch.feed()), strict=True):
            if value.shape[:-1] != live.shape:
                collectors.pop(name, None)
            elif name in collectors:
                collectors[name].add(value[live])
    return {name: each.result() for name, each in collectors.items()}
