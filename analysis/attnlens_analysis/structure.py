"""Producers and consumers of values in an ONNX graph.

Requires the package `onnx` (extra `export`), which is imported when a graph is read.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the graph.

    Attributes:
        name: Name in the graph. Not necessarily unique, and may be empty.
        operator: Operator type, e.g. `MatMul`.
        inputs: Names of the inputs in order, without omitted optional inputs.
        outputs: Names of the outputs in order.
    """

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """The nodes of a graph with lookups by value.

    Attributes:
        nodes: Nodes in topological order.
        parameters: Names of the initializers.
        scalars: Values of the initializers with one element.
    """

    nodes: tuple[Node, ...]
    parameters: frozenset[str]
    scalars: dict[str, float] = field(default_factory=dict)
    _producers: dict[str, Node] = field(default_factory=dict, repr=False)
    _consumers: dict[str, list[Node]] = field(default_factory=lambda: defaultdict(list), repr=False)

    def __post_init__(self) -> None:
        for node in self.nodes:
            for name in node.outputs:
                self._producers[name] = node
            for name in dict.fromkeys(node.inputs):
                self._consumers[name].append(node)

    def producer(self, name: str) -> Node | None:
        """Return the node that produces a value, or None for inputs and parameters."""
        return self._producers.get(name)

    def consumers(self, name: str) -> list[Node]:
        """Return the nodes that read a value, in topological order."""
        return self._consumers.get(name, [])

    def parameters_of(self, node: Node) -> list[str]:
        """Return the parameters that a node reads."""
        return [name for name in node.inputs if name in self.parameters]

    def values_of(self, node: Node) -> list[str]:
        """Return the inputs of a node that are not parameters."""
        return [name for name in node.inputs if name not in self.parameters]

    def above(self, name: str) -> Iterator[Node]:
        """Yield the nodes that a value depends on, in breadth-first order."""
        yield from self._traverse([name], lambda node: node.inputs, self._producer_list)

    def below(self, name: str) -> Iterator[Node]:
        """Yield the nodes that depend on a value, in breadth-first order."""
        yield from self._traverse([name], lambda node: node.outputs, self.consumers)

    def _producer_list(self, name: str) -> list[Node]:
        node = self.producer(name)
        return [] if node is None else [node]

    @staticmethod
    def _traverse(names: list[str], next_names: Any, nodes_of: Any) -> Iterator[Node]:  # noqa: ANN401 - functions
        seen: set[int] = set()
        while names:
            following = []
            for node in (node for name in names for node in nodes_of(name)):
                if id(node) not in seen:
                    seen.add(id(node))
                    yield node
                    following += next_names(node)
            names = following


def read_proto(path: Path) -> "onnx.ModelProto":
    """Read a graph without loading external weights.

    Raises:
        ImportError: `onnx` is not installed.
    """
    import onnx  # noqa: PLC0415 - of the extra `export`

    return onnx.load(path, load_external_data=False)


def structure_of(proto: "onnx.ModelProto") -> Structure:
    """Build the structure of a graph."""
    graph = proto.graph
    nodes = tuple(
        Node(node.name, node.op_type, tuple(filter(None, node.input)), tuple(node.output))
        for node in graph.node
    )
    parameters = frozenset(tensor.name for tensor in graph.initializer)
    return Structure(nodes, parameters, dict(_scalars(proto)))


def _scalars(proto: "onnx.ModelProto") -> Iterator[tuple[str, float]]:
    from onnx import TensorProto, numpy_helper  # noqa: PLC0415 - as above

    for tensor in proto.graph.initializer:
        if int(np.prod(tensor.dims)) == 1 and tensor.data_location != TensorProto.EXTERNAL:
            array: npt.NDArray[Any] = numpy_helper.to_array(tensor)
            yield tensor.name, float(array.reshape(-1)[0])
