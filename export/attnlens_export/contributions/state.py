"""State of a sweep: gradients of linear values, and terms of the baseline. B batch."""

from collections.abc import Collection

import onnx
from onnx import TensorProto

from attnlens_export.contributions.flow import Flow, find_flows
from attnlens_export.contributions.writer import GraphWriter
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import ATTENTION_MASK, BATCH_AXIS, LENGTH_AXIS


class SweepState:
    """State of a sweep.

    Attributes:
        writer: Writer of the graph.
        flows: Dependence of each value on the embeddings.
        baseline: Names of terms of the baseline, (B, 1) each.
        gradients: Names of the gradients that each value received. Their sum is its gradient.
    """

    def __init__(self, writer: GraphWriter, frozen: Collection[str]) -> None:
        self.writer = writer
        self._frozen = frozen
        self.flows = find_flows(writer.graph, writer.weights, frozen)
        self.baseline: list[str] = []
        self.gradients: dict[str, list[str]] = {}

    def flow(self, value: str) -> Flow:
        """Return the dependence of a value on the embeddings."""
        return self.flows.get(value, Flow.CONSTANT)

    def obstacle(self, value: str) -> str:
        """Return a clause with the node at which the path to a value stops being linear, or ""."""
        producers = {name: node for node in self.writer.graph.node for name in node.output}
        pending, seen = [value], set[str]()
        while pending:
            name = pending.pop()
            node = producers.get(name)
            if node is None or name in seen or name in self._frozen:
                continue
            seen.add(name)
            if any(self.flow(each).is_linear for each in node.input):
                return _describe(node)
            pending.extend(node.input)
        return ""

    def obstacle_after(self, value: str) -> str:
        """Return a clause with the first node that makes something nonlinear of a linear value, or ""."""
        linear = {value}
        for node in self.writer.graph.node:
            if not linear.isdisjoint(node.input):
                if not self.flow(node.output[0]).is_linear:
                    return _describe(node)
                linear.update(node.output)
        return ""

    def add_gradient(self, value: str, gradient: str) -> None:
        """Add a gradient to those of a linear value."""
        self.gradients.setdefault(value, []).append(gradient)

    def gradient(self, value: str) -> str:
        """Return the sum of the gradients of a value."""
        first, *others = self.gradients[value]
        for other in others:
            first = self.writer.add("Add", first, other, shape=self.writer.shape(value))
        return first

    def add_baseline(self, node: onnx.NodeProto, value: str, gradient: str) -> None:
        """Add the contribution of a constant summand to the baseline.

        Raises:
            GraphError: The value depends on the text nonlinearly.
        """
        if self.flow(value) is Flow.FROZEN:
            raise GraphError(
                f"no contributions: {node.op_type} {node.name!r} adds {value!r} to a linear function of the "
                f"embeddings, but the value depends on the text nonlinearly{self.obstacle(value)}"
            )
        self.baseline.append(self._constant_part(value, gradient))

    def _constant_part(self, value: str, gradient: str) -> str:
        """Return the dot product of a value and its gradient over all axes but that of the batch: (B, 1)."""
        writer = self.writer
        shape = writer.shape(gradient)
        is_row = len(shape) == 3 and shape[:2] == (BATCH_AXIS, LENGTH_AXIS)  # noqa: PLR2004 - (B, T, D)
        if is_row and len(writer.shape(value)) == 1:
            # A product with a row of ones, because ReduceSum over this axis takes ten times as long. The mask
            # can serve as this row, because gradients of padding are 0.
            row = writer.add("Cast", ATTENTION_MASK, to=TensorProto.FLOAT, shape=(BATCH_AXIS, LENGTH_AXIS))
            row = writer.add("Unsqueeze", row, writer.constant([1]), shape=(BATCH_AXIS, 1, LENGTH_AXIS))
            summed = writer.add("MatMul", row, gradient, shape=(BATCH_AXIS, 1, shape[-1]))
            column = writer.add("Unsqueeze", value, writer.constant([1]))  # OpenCV does not support vectors
            product = writer.add("MatMul", summed, column)  # (B, 1, 1)
            return writer.add("Squeeze", product, writer.constant([2]), shape=(BATCH_AXIS, 1))
        if BATCH_AXIS not in shape:
            raise GraphError(
                f"no contributions: {value!r} is added to values without an axis of texts, {shape}"
            )
        product = writer.add("Mul", gradient, value, shape=shape)
        if shape[0] != BATCH_AXIS:  # such as (T, B, D)
            order = sorted(range(len(shape)), key=lambda axis: shape[axis] != BATCH_AXIS)
            shape = tuple(shape[axis] for axis in order)
            product = writer.add("Transpose", product, perm=order, shape=shape)
        others = list(range(1, len(shape)))
        summed = writer.sum(product, others[:-1]) if others[1:] else product
        return writer.sum(summed, [1], keepdims=True)


def _describe(node: onnx.NodeProto) -> str:
    return f": there is no rule for {node.op_type} {node.name!r} with these inputs"
