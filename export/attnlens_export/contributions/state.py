"""What a sweep has come to: the gradients of linear values, and the terms of the baseline. B batch."""

from collections.abc import Collection

import onnx
from onnx import TensorProto

from attnlens_export.contributions.flow import Flow, find_flows
from attnlens_export.contributions.writer import GraphWriter
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import ATTENTION_MASK, BATCH_AXIS, LENGTH_AXIS


class SweepState:
    """The state of a sweep.

    Attributes:
        writer: what the nodes are added to.
        flows: how each value depends on the embeddings.
        baseline: names of terms (B, 1) whose sum is the baseline.
        gradients: of each value, the gradients that it was given; its own is their sum.
    """

    def __init__(self, writer: GraphWriter, frozen: Collection[str]) -> None:
        self.writer = writer
        self.flows = find_flows(writer.graph, writer.weights, frozen)
        self.baseline: list[str] = []
        self.gradients: dict[str, list[str]] = {}

    def flow(self, value: str) -> Flow:
        """Return how a value depends on the embeddings."""
        return self.flows.get(value, Flow.CONSTANT)

    def give(self, value: str, gradient: str) -> None:
        """Hand a gradient to a value that is linear."""
        self.gradients.setdefault(value, []).append(gradient)

    def gradient(self, value: str) -> str:
        """Return the sum of what a value was given."""
        first, *others = self.gradients[value]
        for other in others:
            first = self.writer.add("Add", first, other, shape=self.writer.shape(value))
        return first

    def settle(self, node: onnx.NodeProto, value: str, gradient: str) -> None:
        """Add to the baseline what a value gives that a node adds to linear ones.

        Raises:
            GraphError: the value depends on the text, and not linearly.
        """
        if self.flow(value) is Flow.FROZEN:
            raise GraphError(
                f"no contributions: {node.op_type} {node.name!r} adds {value!r} to what is linear in the "
                "embeddings. It depends on the text in another way, and no rule says what to take as it is"
            )
        self.baseline.append(self._constant_part(value, gradient))

    def _constant_part(self, value: str, gradient: str) -> str:
        """Return the product of a value and the gradient of its sum, over all axes but the first: (B, 1)."""
        writer = self.writer
        shape = writer.shape(gradient)
        is_row = len(shape) == 3 and shape[1] == LENGTH_AXIS  # noqa: PLR2004 - (B, T, D)
        if is_row and len(writer.shape(value)) == 1:
            # As a product with a row of ones, since ReduceSum over this axis takes ten times as long. The
            # mask is such a row: gradients of padding are 0.
            row = writer.add("Cast", ATTENTION_MASK, to=TensorProto.FLOAT, shape=(BATCH_AXIS, LENGTH_AXIS))
            row = writer.add("Unsqueeze", row, writer.constant([1]), shape=(BATCH_AXIS, 1, LENGTH_AXIS))
            summed = writer.add("MatMul", row, gradient, shape=(BATCH_AXIS, 1, shape[-1]))
            column = writer.add("Unsqueeze", value, writer.constant([1]))  # OpenCV refuses vectors
            product = writer.add("MatMul", summed, column)  # (B, 1, 1)
            return writer.add("Squeeze", product, writer.constant([2]), shape=(BATCH_AXIS, 1))
        product = writer.add("Mul", gradient, value, shape=shape)
        others = list(range(1, len(shape)))
        summed = writer.sum(product, others[:-1]) if others[1:] else product
        return writer.sum(summed, [1], keepdims=True)
