"""The sweep: from a gradient at the end of a graph back to the embeddings of tokens.

Each node that makes a linear value hands its gradient to its linear inputs, as `transposes` says for its
operator. What is added on the way and does not depend on the embeddings, the biases, goes to the baseline,
which is therefore computed by itself, and not as the rest: that scores and baseline add up is a test of every
step.

    base := sum of g . bias            at each sum
    g    := W g, A' g, g * ratio ...   at each product
    at the end: score of token j = g[j] . embedded[j]

B batch, T tokens, D width.
"""

from collections.abc import Collection

import onnx

from attnlens_export.contributions.flow import Flow, find_flows
from attnlens_export.contributions.transposes import TRANSPOSES, constant_part
from attnlens_export.contributions.writer import GraphWriter
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import BATCH_AXIS, EMBEDDED


class Sweep:
    """The state of a sweep.

    Attributes:
        writer: what the nodes are added to.
        flows: how each value depends on the embeddings.
        baseline: names of terms (B, 1) whose sum is the baseline.
    """

    def __init__(self, writer: GraphWriter, frozen: Collection[str]) -> None:
        self.writer = writer
        self.flows = find_flows(writer.graph, writer.weights, frozen)
        self.baseline: list[str] = []
        self._gradients: dict[str, list[str]] = {}

    def run(self, value: str, gradient: str) -> tuple[str, str]:
        """Sweep back from a linear value with its gradient, of the same shape.

        Returns:
            The names of the scores (B, T) and of the baseline (B,).

        Raises:
            GraphError: something on the way is not linear, and no rule says what to take as it is.
        """
        writer = self.writer
        if not self.flow(value).is_linear:
            raise GraphError(f"no contributions: {value} is not linear in the embeddings of tokens")
        self._gradients[value] = [gradient]
        for node in reversed(list(writer.graph.node)):
            (result,) = node.output[:1]
            if result in self._gradients and result != EMBEDDED:
                self._step(node, self._summed(result))
        if EMBEDDED not in self._gradients:
            raise GraphError("no contributions: the graph does not lead from the embeddings of tokens")
        product = writer.add("Mul", self._summed(EMBEDDED), EMBEDDED, shape=writer.shape(EMBEDDED))
        return writer.sum(product, [2]), self._total()

    def flow(self, value: str) -> Flow:
        """Return how a value depends on the embeddings."""
        return self.flows.get(value, Flow.CONSTANT)

    def gradient(self, value: str) -> str:
        """Return the gradient of a value that the sweep went through."""
        return self._summed(value)

    def give(self, value: str, gradient: str) -> None:
        """Hand a gradient to a value that is linear."""
        self._gradients.setdefault(value, []).append(gradient)

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
        self.baseline.append(constant_part(self.writer, value, gradient))

    def _step(self, node: onnx.NodeProto, gradient: str) -> None:
        transpose = TRANSPOSES.get(node.op_type)
        if transpose is None:
            raise GraphError(
                f"no contributions: the operator {node.op_type} of {node.name!r} lies between the embeddings "
                "of tokens and the embedding of the text, and there is no rule to go back through it"
            )
        transpose(self, node, gradient)

    def _summed(self, value: str) -> str:
        first, *others = self._gradients[value]
        for other in others:
            first = self.writer.add("Add", first, other, shape=self.writer.shape(value))
        return first

    def _total(self) -> str:
        """Return the sum of all terms: (B,)."""
        writer = self.writer
        if not self.baseline:
            zeros = writer.add("Mul", EMBEDDED, writer.constant(0.0), shape=writer.shape(EMBEDDED))
            return writer.sum(zeros, [1, 2])
        total, *others = self.baseline
        for other in others:
            total = writer.add("Add", total, other, shape=(BATCH_AXIS, 1))
        return writer.add("Squeeze", total, writer.constant([1]), shape=(BATCH_AXIS,))
