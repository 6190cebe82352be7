"""Lower precisions: a bundle may contain further graphs that compute embeddings or logits in fp16 or int8.

To add a precision, implement `Precision` and add an instance to `contents.PRECISIONS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import Gate, Graph
from attnlens_export.errors import GraphError
from attnlens_export.graph.trace import TracedGraph
from attnlens_export.graph.write import Place, write_embedded
from attnlens_export.parity.measure import Subject
from attnlens_export.progress import Progress
from attnlens_export.results import Result
from attnlens_model import EncoderConfig


@dataclass(frozen=True)
class Fp32Graph:
    """The graph of token vectors in fp32, from which other graphs are derived.

    Attributes:
        directory: Bundle directory. Contains everything but graphs in lower precisions, report and manifest.
        config: Configuration of the encoder.
        embeddings: Graph of the token vectors.
        places: Locations of its weights.
        max_bytes: Maximum size of all weights in a single ONNX file.
        complete: Appends the head of a classifier to a graph of token vectors.
    """

    directory: Path
    config: EncoderConfig
    embeddings: TracedGraph
    places: Mapping[str, Place]
    max_bytes: int
    complete: Callable[[TracedGraph], TracedGraph] = field(default=lambda graph: graph)


@dataclass(frozen=True)
class Stated:
    """Properties of a lower-precision graph that the manifest states and that do not follow from its file.

    Attributes:
        graph: Manifest entry with these properties.
        gates: Limits of the graph.
    """

    graph: Graph
    gates: tuple[Gate, ...] = ()


class Precision(ABC):
    """A lower precision. An instance contains its options.

    Attributes:
        name: Value of the option `--precision`.
        path: Path of the graph in the bundle.
        number: Precision in the manifest.
        operators: Operators that the graph may contain in addition to those of fp32.
        element_types: Types of weights other than fp32, as in `onnx.TensorProto`.
    """

    name: ClassVar[str]
    path: ClassVar[str]
    number: ClassVar[manifest_pb2.Precision.ValueType]
    operators: ClassVar[frozenset[str]] = frozenset()
    element_types: ClassVar[frozenset[int]]

    @abstractmethod
    def write(self, source: Fp32Graph, progress: Progress) -> Stated:
        """Write the graph, and all files that `measure` needs, into the bundle.

        Returns:
            The argument `stated` of `measure`.

        Raises:
            GraphError: The graph can't be converted.
            SourceError: The bundle lacks a file that the conversion needs.
            AccuracyError: No graph passes the gate.
        """

    def save(self, source: Fp32Graph, graph: TracedGraph) -> None:
        """Write the graph as a single file.

        Raises:
            GraphError: The weights are too large for a single file.
        """
        size_bytes = sum(array.nbytes for array in graph.weights.values())
        if size_bytes > source.max_bytes:
            raise GraphError(
                f"the weights of {Path(self.path).name} have {size_bytes} bytes, but a single file can "
                f"contain {source.max_bytes}: export without --precision {self.name}"
            )
        write_embedded(source.directory / self.path, graph.proto, graph.weights)

    def store_references(self, subject: Subject) -> None:  # noqa: B027 - most precisions need none
        """Compute all results of the PyTorch encoder that `measure` needs."""

    @abstractmethod
    def measure(self, subject: Subject, stated: Stated, progress: Progress) -> Result:
        """Measure the graph of a bundle.

        Args:
            subject: Bundle and reference.
            stated: Result of `write`, or the entry of the bundle's manifest.
            progress: Called before each step.

        Raises:
            BundleError, GraphError: The files contradict the manifest or each other.
        """
