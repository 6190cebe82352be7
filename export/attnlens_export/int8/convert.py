"""Conversion of a graph from fp32 to int8 with standard operators.

    x -> [Mul] -> QuantizeLinear -> DequantizeLinear -> MatMul -> y
    weight in int8 -----------------> DequantizeLinear ---^

ONNX Runtime fuses the DequantizeLinear nodes and the MatMul into `MatMulIntegerToFloat`, which computes with
integers. In a runtime without this fusion, the result differs by rounding errors only. For exact columns, a
Gather selects them from x, and a second MatMul and an Add add their product to y.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from attnlens_export.graph.simplify import Shape
from attnlens_export.graph.trace import TracedGraph
from attnlens_export.int8.recipes import FloatArray, Recipe, RoundedWeight

Array = npt.NDArray[np.generic]


def to_int8(graph: TracedGraph, recipes: Mapping[str, Recipe]) -> TracedGraph:
    """Return the graph with some groups in int8, given their recipes by source."""
    return _Conversion(graph, recipes).convert()


class _Conversion:
    def __init__(self, graph: TracedGraph, recipes: Mapping[str, Recipe]) -> None:
        self._graph = graph
        self._recipes = recipes
        self._weights: dict[str, Array] = dict(graph.weights)
        self._nodes: list[onnx.NodeProto] = []
        self._uses = Counter(name for node in graph.proto.graph.node for name in node.input)
        self._uses.update(output.name for output in graph.proto.graph.output)
        self._producers = {name: node for node in graph.proto.graph.node for name in node.output}
        self._products = {
            result: (recipe, index, weight)
            for recipe in recipes.values()
            for index, (result, weight) in enumerate(zip(recipe.group.results, recipe.weights, strict=True))
            if weight is not None
        }
        self._quantized: set[str] = set()
        # Sources that are divided by changing the weights of the norm before them.
        self._folded: set[str] = set()
        # New inputs of a norm by index, by the norm's first output.
        self._replaced: dict[str, dict[int, str]] = {}

    def convert(self) -> TracedGraph:
        self._folded = {recipe.group.source for recipe in self._recipes.values() if self._fold(recipe)}
        for node in self._graph.proto.graph.node:
            result = node.output[0]
            if result in self._products:
                recipe, index, weight = self._products[result]
                if recipe.group.source not in self._quantized:
                    self._quantize(recipe)
                self._multiply(recipe, index, weight, node)
            else:
                self._nodes.append(self._with_replaced(node))
        return self._result()

    def _result(self) -> TracedGraph:
        proto = onnx.ModelProto()
        proto.CopyFrom(self._graph.proto)
        del proto.graph.node[:]
        proto.graph.node.extend(self._nodes)
        read = {name for node in self._nodes for name in node.input}
        weights = {name: array for name, array in self._weights.items() if name in read}
        return TracedGraph(proto, weights, self._shapes())

    def _shapes(self) -> dict[str, Shape]:
        """Return the shapes of the fp32 graph and of the values that were added."""
        shapes = {name: array.shape for name, array in self._weights.items()} | dict(self._graph.shapes)
        for node in self._nodes:
            source, result = node.input[0] if node.input else "", node.output[0]
            if result in shapes or source not in shapes:
                continue
            shapes[result] = shapes[source]
            if node.op_type == "MatMul":
                shapes[result] = (*shapes[source][:-1], shapes[node.input[1]][-1])
            elif node.op_type == "Gather":
                shapes[result] = (*shapes[source][:-1], *shapes[node.input[1]])
        return shapes

    def _fold(self, recipe: Recipe) -> bool:
        """Divide the weights of the norm before a group, unless other nodes read its result."""
        source, divisors = recipe.group.source, recipe.divisors
        norm = self._producers.get(source)
        num_products = sum(weight is not None for weight in recipe.weights)
        if divisors is None or norm is None or self._uses[source] != num_products:
            return False
        inputs = list(self._scales_of(norm, len(divisors)))
        for index in inputs:
            name = f"{norm.input[index]}_{source}_smoothed"
            self._weights[name] = np.asarray(self._graph.weights[norm.input[index]], np.float32) / divisors
            self._replaced.setdefault(source, {})[index] = name
        return bool(inputs)

    def _scales_of(self, norm: onnx.NodeProto, width: int) -> Iterator[int]:
        """Yield the inputs of a norm that scale its result: scale and bias, or the scale of RMSNorm."""
        for index, name in enumerate(norm.input):
            weight = self._graph.weights.get(name)
            is_vector = weight is not None and weight.shape == (width,)
            if is_vector and norm.op_type in {"LayerNormalization", "Mul"}:
                yield index

    def _with_replaced(self, node: onnx.NodeProto) -> onnx.NodeProto:
        replaced = self._replaced.get(node.output[0])
        if not replaced:
            return node
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        for index, name in replaced.items():
            changed.input[index] = name
        return changed

    def _quantize(self, recipe: Recipe) -> None:
        source = recipe.group.source
        value = source
        if recipe.divisors is not None and source not in self._folded:
            value = f"{source}_smoothed"
            factors = self._add_weight(f"{source}_factors", 1 / recipe.divisors)
            self._add("Mul", [source, factors], value)
        scale = self._add_weight(f"{source}_scale", recipe.input_range.scale)
        zero_point = self._add_weight(f"{source}_zero_point", recipe.input_range.zero_point)
        self._add("QuantizeLinear", [value, scale, zero_point], f"{source}_uint8")
        self._add("DequantizeLinear", [f"{source}_uint8", scale, zero_point], f"{source}_rounded")
        if recipe.columns is not None:
            columns = self._add_weight(f"{source}_columns", recipe.columns)
            self._add("Gather", [source, columns], f"{source}_exact", axis=2)
        self._quantized.add(source)

    def _multiply(self, recipe: Recipe, index: int, weight: RoundedWeight, node: onnx.NodeProto) -> None:
        source, result = recipe.group.source, node.output[0]
        # A weight that several layers share is rounded once per layer.
        name = node.input[1] if self._uses[node.input[1]] == 1 else f"{node.input[1]}_{result}"
        values = self._add_weight(f"{name}_int8", weight.values)
        scales = self._add_weight(f"{name}_scale", weight.scales)
        self._add("DequantizeLinear", [values, scales], f"{name}_rounded", axis=1)
        if recipe.columns is None:
            self._add("MatMul", [f"{source}_rounded", f"{name}_rounded"], result)
            return
        rows = recipe.column_weights[index]
        if recipe.divisors is not None and source in self._folded:
            rows = rows * recipe.divisors[recipe.columns][:, None]
        exact = self._add_weight(f"{name}_exact", rows)
        self._add("MatMul", [f"{source}_rounded", f"{name}_rounded"], f"{result}_int8")
        self._add("MatMul", [f"{source}_exact", exact], f"{result}_exact")
        self._add("Add", [f"{result}_int8", f"{result}_exact"], result)

    def _add_weight(self, name: str, array: Array | np.generic | FloatArray) -> str:
        self._weights[name] = np.asarray(array)
        return name

    def _add(self, operator: str, inputs: list[str], result: str, axis: int | None = None) -> None:
        node = helper.make_node(operator, inputs, [result], name=f"{operator.lower()}_{result}")
        if axis is not None:
            node.attribute.append(helper.make_attribute("axis", axis))
        self._nodes.append(node)
