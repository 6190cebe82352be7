"""Runs of a changed graph from shortly before the first change, instead of from the start of the graph.

At a few positions, usually two per layer, only two or three values connect the nodes before with those after.
These values are computed once in fp32 and saved for each batch.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from attnlens_export.graph.trace import TracedGraph, drop_unread
from attnlens_export.int8.texts import Batch, FloatArray, Session
from attnlens_export.parity.sessions import Feed

MAX_SAVED_BYTES = 2**29

Open = Callable[[TracedGraph], Session]
Values = dict[str, npt.NDArray[np.generic]]


class Resumption:
    """Saved values of a graph in fp32 for some batches.

    Attributes:
        saved: Values by name for each batch, by `_key`.
    """

    def __init__(
        self, graph: TracedGraph, sources: Sequence[str], batches: Sequence[Batch], open_graph: Open
    ) -> None:
        """Run the graph.

        Args:
            graph: Graph in fp32.
            sources: Values whose readers may change.
            batches: Inputs of later runs.
            open_graph: Opens a graph in ONNX Runtime.
        """
        self._graph = graph
        self._open = open_graph
        self._cuts = dict(find_cuts(graph.proto.graph, frozenset(sources)))
        self.saved: dict[bytes, Values] = {}
        if self._cuts and batches:
            self._save(batches)

    def open(self, changed: TracedGraph) -> Session:
        """Open a graph that equals the one in fp32 up to its first change."""
        pairs = zip(self._graph.proto.graph.node, changed.proto.graph.node, strict=False)
        first_change = next((index for index, (node, other) in enumerate(pairs) if node != other), 0)
        position = max((position for position in self._cuts if position <= first_change), default=0)
        proto = onnx.ModelProto()
        proto.CopyFrom(changed.proto)
        before = {name for node in proto.graph.node[:position] for name in node.output}
        del proto.graph.node[:position]
        read = drop_unread(proto.graph)
        names = sorted(before & read)
        examples = next(iter(self.saved.values()), {})
        if not names or not examples.keys() >= set(names):
            return self._open(changed)
        inputs = [value for value in proto.graph.input if value.name in read]
        del proto.graph.input[:]
        proto.graph.input.extend(inputs)
        proto.graph.input.extend(
            helper.make_tensor_value_info(
                name,
                helper.np_dtype_to_tensor_dtype(examples[name].dtype),
                self._graph.shapes.get(name, [None] * examples[name].ndim),
            )
            for name in names
        )
        weights = {name: array for name, array in changed.weights.items() if name in read}
        session = self._open(TracedGraph(proto, weights, changed.shapes))
        return _Resumed(session, self.saved, names, [value.name for value in inputs])

    def _save(self, batches: Sequence[Batch]) -> None:
        """Save the values of all cuts, or of every n-th if they exceed `MAX_SAVED_BYTES`."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self._graph.proto)
        del proto.graph.output[:]
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._names())
        drop_unread(proto.graph)
        session = self._open(TracedGraph(proto, self._graph.weights, self._graph.shapes))
        first = batches[0].inputs
        num_bytes = sum(value.nbytes for value in session.run(self._names(), first.feed()))
        num_tokens = sum(batch.inputs.input_ids.size for batch in batches)
        step = -(-num_bytes * num_tokens // (first.input_ids.size * MAX_SAVED_BYTES))
        self._cuts = dict(list(self._cuts.items())[step - 1 :: step])
        for batch in batches if self._cuts else ():
            feed = batch.inputs.feed()
            values = session.run(self._names(), feed)
            self.saved[_key(feed)] = dict(zip(self._names(), values, strict=True))

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for names in self._cuts.values() for name in names))


class _Resumed:
    """A graph that starts at saved values. Callers feed the inputs of the whole graph."""

    def __init__(
        self, session: Session, values: dict[bytes, Values], names: Sequence[str], inputs: Sequence[str]
    ) -> None:
        self._session = session
        self._values = values
        self._names = names
        self._inputs = inputs

    def run(self, names: list[str], feed: Feed, /) -> Sequence[FloatArray]:
        """Return the named outputs."""
        values = self._values[_key(feed)]
        selected = {name: values[name] for name in self._names}
        return self._session.run(names, selected | {name: feed[name] for name in self._inputs})


def _key(feed: Feed) -> bytes:
    return b"".join(array.tobytes() for array in feed.values())


def find_cuts(graph: onnx.GraphProto, sources: frozenset[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the positions that the fewest values cross, or one more, and the names of these values.

    In the last layer, the mask is no longer needed, so that one value less crosses it than other layers.

    A position is the index of the next node. The first and last positions are between the first and last
    node that reads one of `sources`. Of adjacent positions with as
    many values, only the first is returned.
    """
    readers = [index for index, node in enumerate(graph.node) if not sources.isdisjoint(node.input)]
    last_read = {name: index for index, node in enumerate(graph.node) for name in node.input}
    last_read |= {output.name: len(graph.node) for output in graph.output}
    crossing: dict[int, tuple[str, ...]] = {}
    live: list[str] = []
    for index, node in enumerate(graph.node):
        live = [name for name in live if last_read[name] >= index]
        if readers and readers[0] < index <= readers[-1]:
            crossing[index] = tuple(live)
        live += [name for name in node.output if name in last_read]
    fewest = min((len(names) for names in crossing.values()), default=0)
    for index, names in crossing.items():
        if len(names) <= fewest + 1 and len(names) < len(crossing.get(index - 1, ())):
            yield index, names
