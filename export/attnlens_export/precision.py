"""What a lower precision has to provide: a bundle may hold the graph of the embeddings in it, too.

A further precision is one folder with a `Precision`, and one line in `contents.PRECISIONS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import Gate, Graph, ParityFigure
from attnlens_export.errors import GraphError
from attnlens_export.graph.trace import TracedGraph
from attnlens_export.graph.write import Place, write_embedded
from attnlens_export.parity.measure import Subject
from attnlens_export.progress import Progress
from attnlens_model import EncoderConfig


@dataclass(frozen=True)
class Fp32Graph:
    """What a graph in a lower precision is made from.

    Attributes:
        directory: the bundle, complete but for graphs in lower precisions, report and manifest.
        config: the encoder's.
        embeddings: the graph in `onnx/model.onnx`.
        places: of its weights.
        max_bytes: the largest sum of the weights of a graph that is a single file.
    """

    directory: Path
    config: EncoderConfig
    embeddings: TracedGraph
    places: Mapping[str, Place]
    max_bytes: int


@dataclass(frozen=True)
class Stated:
    """What a manifest says, or will say, of a graph in a lower precision.

    Attributes:
        graph: its entry, as far as it does not follow from its file.
        gates: what it has to meet.
    """

    graph: Graph
    gates: tuple[Gate, ...] = ()


@dataclass(frozen=True)
class Table:
    """What was measured, as the report and the terminal show it.

    Attributes:
        caption: what was measured on what.
        headings: of the columns; none where remarks say it all.
        rows: a cell for each heading.
        remarks: further lines.
    """

    caption: str
    headings: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    remarks: tuple[str, ...] = ()


class GraphResult(ABC):
    """What was measured of a graph besides the two that compute what the encoder does in fp32.

    Attributes:
        name: of what it is: a precision, or `contributions`.
        path: of the graph in the bundle.
    """

    name: ClassVar[str]
    path: ClassVar[str]

    @property
    def title(self) -> str:
        """The heading above it in the report."""
        return f"In {self.name}"

    @property
    def passed(self) -> bool:
        """Whether every gate held."""
        return not self.failures()

    @abstractmethod
    def failures(self) -> list[str]:
        """Return a line for each gate that did not hold, the worst first."""

    @abstractmethod
    def figures(self) -> list[ParityFigure]:
        """Return its figures among those of the manifest's parity; none where `describe` states them."""

    @abstractmethod
    def gates(self) -> list[Gate]:
        """Return each gate with what was found."""

    @abstractmethod
    def describe(self, graph: Graph) -> None:
        """Put into the manifest's entry of the graph what does not follow from its file."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return every measurement as JSON values; a NaN or an infinity becomes None."""

    @abstractmethod
    def table(self) -> Table:
        """Return what people are shown."""


class Precision(ABC):
    """A lower precision. An instance holds its options.

    Attributes:
        name: what `--precision` calls it.
        path: of its graph in the bundle.
        number: what the manifest calls it.
        operators: what the graph may hold besides the operators of fp32.
        element_types: what its weights may be in besides fp32, as in `onnx.TensorProto`.
    """

    name: ClassVar[str]
    path: ClassVar[str]
    number: ClassVar[manifest_pb2.Precision.ValueType]
    operators: ClassVar[frozenset[str]] = frozenset()
    element_types: ClassVar[frozenset[int]]

    @abstractmethod
    def write(self, source: Fp32Graph, progress: Progress) -> Stated:
        """Write the graph, and the files that `measure` needs, into the bundle.

        Returns:
            What `measure` has to know.

        Raises:
            GraphError: the graph can't be made.
            SourceError: the bundle lacks what it is made with.
            AccuracyError: no graph passes the gate.
        """

    def save(self, source: Fp32Graph, graph: TracedGraph) -> None:
        """Write the graph, always as a single file.

        Raises:
            GraphError: it would be too large for one.
        """
        size_bytes = sum(array.nbytes for array in graph.weights.values())
        if size_bytes > source.max_bytes:
            raise GraphError(
                f"{Path(self.path).name} would hold {size_bytes} bytes of weights, one file at most "
                f"{source.max_bytes}: export without --precision {self.name}"
            )
        write_embedded(source.directory / self.path, graph.proto, graph.weights)

    @abstractmethod
    def measure(self, subject: Subject, stated: Stated, progress: Progress) -> GraphResult:
        """Measure the graph of a bundle.

        Args:
            subject: the bundle and its reference.
            stated: what `write` returned, or the bundle's manifest says.
            progress: called before each step.

        Raises:
            BundleError, GraphError: the files contradict what is stated, or one another.
        """
