"""Calibration: statistics of the inputs of matrix products over the calibration texts.

Shapes: B texts in a batch, T tokens, M tokens of a batch without padding, K width of an input.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from attnlens_export.graph.trace import TracedGraph
from attnlens_export.graph.write import Place, write_referring
from attnlens_export.int8.recipes import Activations, FloatArray, Group
from attnlens_export.int8.texts import Batch
from attnlens_export.parity.sessions import open_session

MAX_SAMPLE_ROWS = 1024
# Maximum size of the covariances that are collected in one pass over the texts.
MAX_COVARIANCE_BYTES = 2**29

Progress = Callable[[int, int], None]


class _Collector:
    def __init__(self) -> None:
        self._sum_weights = 0.0
        self._samples: list[FloatArray] = []
        self._lowest: FloatArray = np.zeros(0, np.float32)
        self._highest: FloatArray = np.zeros(0, np.float32)
        self._squares: FloatArray = np.zeros((0, 0), np.float32)

    def add(self, rows: FloatArray, weights: FloatArray) -> None:
        """Add rows (M, K) with their weights (M,). The sum of the weights of all calls is 1."""
        if not self._samples:
            self._lowest, self._highest = rows[0].copy(), rows[0].copy()
            self._squares = np.zeros((rows.shape[1], rows.shape[1]), np.float32)
        # Each row covers an interval of the length of its weight. It is repeated for each multiple of
        # 1 / MAX_SAMPLE_ROWS in this interval, so that each sample represents the same share.
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
    """Run a graph on calibration texts and collect statistics of the inputs of all groups.

    Args:
        graph: Graph in fp32.
        groups: Groups of the graph.
        kinds: Batches of each kind of text.
        directory: Directory of the weights. A temporary graph is written to it.
        places: Locations of the weights.
        progress: Called before each pass with its index and the number of passes.

    Returns:
        Statistics by source. Sources that do not have one row per token are omitted, such as the table of a
        relative position bias.
    """
    parts = list(_divide(groups, graph))
    activations: dict[str, Activations] = {}
    for index, sources in enumerate(parts):
        progress(index, len(parts))
        activations |= _collect_part(graph, sources, kinds, directory, places)
    return activations


def _divide(groups: Sequence[Group], graph: TracedGraph) -> Iterator[list[str]]:
    """Yield the sources of as many groups as have covariances of at most `MAX_COVARIANCE_BYTES`."""
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
        num_texts = sum(len(batch.text_indices) for batch in kind)
        for batch in kind:
            live = batch.inputs.attention_mask == 1
            weights = (live / live.sum(axis=1, keepdims=True) / num_texts / len(kinds))[live]  # (M,)
            for name, value in zip(sources, session.run(sources, batch.inputs.feed()), strict=True):
                if value.shape[:-1] != live.shape:
                    collectors.pop(name, None)
                elif name in collectors:
                    collectors[name].add(value[live], weights.astype(np.float32))
    return {name: collector.result() for name, collector in collectors.items()}
