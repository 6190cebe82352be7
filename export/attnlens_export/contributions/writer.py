"""Builder that appends nodes and constants to an ONNX graph."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from attnlens_export.errors import GraphError
from attnlens_export.graph.simplify import CONSTANT_PREFIX, TARGET_PREFIX, Shape

Array = npt.NDArray[np.generic]


class GraphWriter:
    """Appends nodes to a graph and keeps track of shapes.

    Attributes:
        graph: Graph to extend.
        weights: Existing and new initializers by name.
        shapes: Known shapes of values by name.

    Args:
        prefix: Prefix of generated names.
    """

    def __init__(
        self,
        graph: onnx.GraphProto,
        weights: Mapping[str, Array],
        shapes: Mapping[str, Shape],
        prefix: str = "sweep",
    ) -> None:
        self.graph = graph
        self._prefix = prefix
        self.weights = dict(weights)
        self.shapes: dict[str, Shape] = dict(shapes) | {name: array.shape for name, array in weights.items()}
        self._names: dict[tuple[object, ...], str] = {
            (array.dtype.str, array.shape, array.tobytes()): name
            for name, array in weights.items()
            if name.startswith((CONSTANT_PREFIX, TARGET_PREFIX))
        }
        self._count = 0
        self._made: dict[tuple[object, ...], str] = {}

    def add(
        self,
        op_type: str,
        *inputs: str,
        name: str = "",
        shape: Shape | None = None,
        **attributes: Any,  # noqa: ANN401 - any ONNX attribute
    ) -> str:
        """Append a node, unless an equal node exists, and return the name of its result.

        Args:
            op_type: Operator.
            inputs: Names of input values.
            name: Name of the result. If empty, a name is generated.
            shape: Shape of the result, or None if no later step needs it.
            attributes: Attributes of the node.
        """
        key = (op_type, inputs, tuple(sorted((key, str(value)) for key, value in attributes.items())))
        if not name and key in self._made:
            return self._made[key]
        self._count += 1
        result = name or f"{self._prefix}_{op_type.lower()}_{self._count}"
        self.graph.node.append(helper.make_node(op_type, list(inputs), [result], name=result, **attributes))
        if shape is not None:
            self.shapes[result] = shape
        self._made[key] = result
        return result

    def constant(self, value: Array | float | Sequence[int], *, name: str = "") -> str:
        """Return the name of an initializer: fp32 for a float, int64 for integers."""
        if isinstance(value, float):
            value = np.array(value, dtype=np.float32)
        array = value if isinstance(value, np.ndarray) else np.array(value, dtype=np.int64)
        key = (array.dtype.str, array.shape, array.tobytes())
        if not name and key in self._names:
            return self._names[key]
        found = name or f"{self._prefix}_constant_{len(self.weights)}"
        self.weights[found] = array
        self.shapes[found] = array.shape
        self._names[key] = found
        return found

    def shape(self, name: str) -> Shape:
        """Return the shape of a value.

        Raises:
            GraphError: The shape is unknown.
        """
        if name not in self.shapes:
            raise GraphError(f"no contributions: the shape of {name!r} is not known from the trace")
        return self.shapes[name]

    def reshape(self, value: str, target: Sequence[int], shape: Shape) -> str:
        """Reshape to a constant target, in which 0 copies the length of an axis and -1 is inferred."""
        return self.add("Reshape", value, self.constant(list(target)), shape=shape)

    def sum(self, value: str, axes: Sequence[int], *, keepdims: bool = False) -> str:
        """Sum over non-negative axes."""
        before = self.shape(value)
        after = tuple(1 if axis in axes else size for axis, size in enumerate(before))
        if not keepdims:
            after = tuple(size for axis, size in enumerate(before) if axis not in axes)
        return self.add("ReduceSum", value, self.constant(list(axes)), keepdims=int(keepdims), shape=after)
