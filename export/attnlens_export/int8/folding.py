"""Where a graph takes up what int8 does to the input of a product, so that it costs no node or a cheap one.

B batch, T tokens, K width of the input, N width of a result.

The input x (B, T, K) of a group of products may be replaced by (x - c) / d, the centres c and the divisors d
being a number for each column: the scale and bias of the norm that computes x are changed, or the weight and
bias of the attention's values that x is a weighted mean of. What the products then lack, c times their
weights, goes into the biases behind them. So centres need biases, and divisors alone do not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx

from attnlens_export.graph.trace import TracedGraph
from attnlens_export.int8.products import Group

# Nodes that an activation consists of.
_ACTIVATION_OPERATORS = frozenset({"Mul", "Div", "Erf", "Add", "Tanh", "Sigmoid", "Relu", "Pow", "Gelu"})


@dataclass(frozen=True)
class NormFolding:
    """Into a norm.

    Attributes:
        parameters: which inputs of the norm to divide: the scale and, if it has one, the bias.
        residuals: the results of the additions that read the norm, too.
        addends: the results of the additions of a bias to what those add.
    """

    parameters: tuple[int, ...]
    residuals: tuple[str, ...] = ()
    addends: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProductFolding:
    """Into the product whose columns are those of the input.

    Attributes:
        product: its result, (B, T, K).
    """

    product: str


Folding = NormFolding | ProductFolding


@dataclass(frozen=True)
class ActivationNodes:
    """A function of each number of a product.

    Attributes:
        source: the product with its bias.
        nodes: what computes the function, in order.
    """

    source: str
    nodes: tuple[onnx.NodeProto, ...]


class Structure:
    """Who computes each value of a graph, and who reads it."""

    def __init__(self, graph: TracedGraph) -> None:
        self._weights = graph.weights
        self.producers = {name: node for node in graph.proto.graph.node for name in node.output}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.proto.graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._outputs = {output.name for output in graph.proto.graph.output}

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """Return the nodes that read a value or a weight, one that reads it twice being there twice."""
        return self._readers.get(name, [])

    def biased(self, product: str) -> str | None:
        """Return the result of the addition of a bias to a product, nothing else reading that; or None."""
        readers = self.readers(product)
        if product in self._outputs or len(readers) != 1 or readers[0].op_type != "Add":
            return None
        return readers[0].output[0] if self.bias(readers[0].output[0]) is not None else None

    def bias(self, result: str) -> int | None:
        """Return which input of an addition is a vector among the weights; None: none is."""
        for index, name in enumerate(self.producers[result].input):
            if name in self._weights and self._weights[name].ndim == 1:
                return index
        return None

    def folding(self, group: Group) -> Folding | None:
        """Return where the input of a group can be divided."""
        if group.source in self._outputs:
            return None
        return self._norm_folding(group) or self._product_folding(group)

    def can_centre(self, group: Group) -> bool:
        """Tell whether centres can be taken off the input, too, if there are biases behind the products."""
        match self.folding(group):
            case NormFolding(parameters):
                return len(parameters) > 1
            case ProductFolding(product):
                # The weights of a mean have the sum 1, those of a gate have not.
                return self.producers[group.source].op_type == "Reshape" and self.biased(product) is not None
        return False

    def activation(self, group: Group) -> ActivationNodes | None:
        """Return the activation that makes the input of a group of a product with a bias; None: none does."""
        found: set[str] = set()
        inside: dict[str, onnx.NodeProto] = {}
        waiting = [group.source]
        while waiting:
            name = waiting.pop()
            node = self.producers.get(name)
            if node is None or name in inside or name in found:
                continue
            if self._is_biased_product(node):
                found.add(name)
            elif node.op_type in _ACTIVATION_OPERATORS and self._has_scalars_only(node):
                inside[name] = node
                waiting += node.input
            else:
                return None
        read = {node.output[0] for name in found | inside.keys() for node in self.readers(name)}
        if len(found) != 1 or not inside or not read - inside.keys() <= set(group.results):
            return None
        nodes = tuple(node for name, node in self.producers.items() if name in inside)
        return ActivationNodes(found.pop(), nodes)

    def _is_biased_product(self, node: onnx.NodeProto) -> bool:
        return node.op_type == "Add" and any(
            name in self.producers
            and self.producers[name].op_type == "MatMul"
            and self.biased(name) == node.output[0]
            for name in node.input
        )

    def _has_scalars_only(self, node: onnx.NodeProto) -> bool:
        return all(self._weights[name].size == 1 for name in node.input if name in self._weights)

    def _norm_folding(self, group: Group) -> NormFolding | None:
        norm = self.producers.get(group.source)
        if norm is None:
            return None
        parameters = tuple(self._parameters(norm, group))
        others = [node for node in self.readers(group.source) if node.output[0] not in group.results]
        if not parameters or (others and len(parameters) == 1):
            return None
        addends = [self._addend(node, group.source) for node in others]
        if None in addends:
            return None
        residuals = tuple(node.output[0] for node in others)
        return NormFolding(parameters, residuals, tuple(each for each in addends if each is not None))

    def _parameters(self, norm: onnx.NodeProto, group: Group) -> Iterator[int]:
        """Yield the inputs of a norm that its result grows with: the scale and bias, or RMSNorm's scale."""
        width = self._weights[group.weights[0]].shape[0]
        for index, name in enumerate(norm.input):
            is_vector = name in self._weights and self._weights[name].shape == (width,)
            if is_vector and norm.op_type in {"LayerNormalization", "Mul"}:
                yield index

    def _addend(self, node: onnx.NodeProto, source: str) -> str | None:
        """Return the addition of a bias to a product that a node adds to `source`, if it does that."""
        other = next((name for name in node.input if name != source), "")
        producer = self.producers.get(other)
        if node.op_type != "Add" or producer is None or len(self.readers(other)) != 1:
            return None
        return other if self._is_biased_product(producer) else None

    def _product_folding(self, group: Group) -> ProductFolding | None:
        product = self._values(group) or self._factor(group)
        return None if product is None else ProductFolding(product)

    def _only_read_by(self, name: str, node: onnx.NodeProto) -> bool:
        return self.readers(name) == [node] and name not in self._outputs

    def _values(self, group: Group) -> str | None:
        """Return the product of the values that an attention layer's context is a mean of, head by head.

        values -> Reshape -> Transpose -> MatMul with the softmax -> Transpose -> Reshape: the context.
        """
        if {each.output[0] for each in self.readers(group.source)} != set(group.results):
            return None
        path = [self.producers.get(group.source)]
        for operator, index in (
            ("Reshape", 0),
            ("Transpose", 0),
            ("MatMul", 1),
            ("Transpose", 0),
            ("Reshape", 0),
        ):
            node = path[-1]
            if node is None or node.op_type != operator:
                return None
            path.append(self.producers.get(node.input[index]))
        nodes = [node for node in path if node is not None]
        if len(nodes) < len(path) or not all(self._only_read_by(b.output[0], a) for a, b in pairwise(nodes)):
            return None
        _, joining, mixing, dividing, _, values = nodes
        if joining.attribute != dividing.attribute or self._operator(mixing.input[0]) != "Softmax":
            return None
        return self._product_of_width(self._without_bias(values), group)

    def _without_bias(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """Return the product before the addition of a bias, or the node itself."""
        if not self._is_biased_product(node):
            return node
        return self.producers[next(name for name in node.input if name not in self._weights)]

    def _factor(self, group: Group) -> str | None:
        """Return the product that a gate is multiplied with."""
        gated = self.producers.get(group.source)
        if gated is None or gated.op_type != "Mul" or len(gated.input) != 2:  # noqa: PLR2004 - both factors
            return None
        if {each.output[0] for each in self.readers(group.source)} != set(group.results):
            return None
        for name in gated.input:
            node = self.producers.get(name)
            if node is None or not self._only_read_by(name, gated):
                continue
            if (product := self._product_of_width(self._without_bias(node), group)) is not None:
                return product
        return None

    def _operator(self, name: str) -> str:
        return self.producers[name].op_type if name in self.producers else ""

    def _product_of_width(self, node: onnx.NodeProto, group: Group) -> str | None:
        """Return the result of a node that is a product with a weight (., K)."""
        weight = self._weights.get(node.input[1]) if node.op_type == "MatMul" else None
        width = self._weights[group.weights[0]].shape[0]
        is_matrix = weight is not None and weight.dtype == np.float32 and weight.ndim == 2  # noqa: PLR2004
        return node.output[0] if weight is not None and is_matrix and weight.shape[1] == width else None
