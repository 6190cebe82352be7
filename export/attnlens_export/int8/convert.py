"""From a graph in fp32 to one whose products are in int8, in standard operators.

    x -> [Mul] -> QuantizeLinear -> DequantizeLinear -> MatMul -> y
    weight in int8 -----------------> DequantizeLinear ---^

ONNX Runtime computes those three nodes as one on integers, `MatMulIntegerToFloat`. Any other runtime may, or
computes them as they stand, with the same result but for rounding. With exact columns, a Gather takes these
out of x, and a second MatMul and an Add put their part to y.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from attnlens_export.graph.trace import TracedGraph
from attnlens_export.int8.folding import NormFolding, ProductFolding, Structure
from attnlens_export.int8.products import FloatArray
from attnlens_export.int8.recipes import Recipe
from attnlens_export.int8.rounding import RoundedWeight
from attnlens_export.int8.splitting import Split

Array = npt.NDArray[np.generic]


def to_int8(graph: TracedGraph, recipes: Mapping[str, Recipe]) -> TracedGraph:
    """Return the graph with the groups of `recipes`, by source, in int8."""
    return _Conversion(graph, recipes).convert()


class _Conversion:
    def __init__(self, graph: TracedGraph, recipes: Mapping[str, Recipe]) -> None:
        self._graph = graph
        self._recipes = recipes
        self._structure = Structure(graph)
        self._weights: dict[str, Array] = dict(graph.weights)
        self._nodes: list[onnx.NodeProto] = []
        self._products = {
            result: (recipe, index)
            for recipe in recipes.values()
            for index, result in enumerate(recipe.group.results)
        }
        self._quantized: set[str] = set()
        self._folded: set[str] = set()  # sources that what computes them divides
        self._replaced: dict[str, dict[int, str]] = {}  # inputs of nodes, by their first output
        self._biases: dict[str, FloatArray] = {}  # that become others, by the result of their addition
        self._divided: dict[str, FloatArray] = {}  # divisors of the columns of products
        self._split: dict[str, Split] = {}  # further columns of products
        # Norms that are divided, and by what, by the first addition that needs them as they were.
        self._restored: dict[str, tuple[str, FloatArray]] = {}

    def convert(self) -> TracedGraph:
        for recipe in self._recipes.values():
            for result, bias in zip(recipe.group.results, recipe.biases, strict=bool(recipe.biases)):
                self._add_to_bias(self._structure.biased(result), bias)
        for recipe in self._recipes.values():
            self._fold(recipe)
            self._widen(recipe)
        for result, bias in self._biases.items():
            name = self._add_weight(f"{result}_bias", bias)
            self._replaced.setdefault(result, {})[self._index_of_bias(result)] = name
        for node in self._graph.proto.graph.node:
            self._convert_node(node)
        return self._result()

    def _convert_node(self, node: onnx.NodeProto) -> None:
        result = node.output[0]
        if result not in self._products:
            if result in self._divided or result in self._split:
                weight = self._changed(result, np.asarray(self._graph.weights[node.input[1]], np.float32))
                self._replaced.setdefault(result, {})[1] = self._add_weight(f"{result}_weight", weight)
            self._nodes.append(self._with_replaced(node))
            return
        recipe, index = self._products[result]
        if recipe.group.source not in self._quantized:
            self._quantize(recipe)
        self._multiply(recipe, index, node)

    def _result(self) -> TracedGraph:
        proto = onnx.ModelProto()
        proto.CopyFrom(self._graph.proto)
        del proto.graph.node[:]
        proto.graph.node.extend(self._nodes)
        read = {name for node in self._nodes for name in node.input}
        return TracedGraph(proto, {name: array for name, array in self._weights.items() if name in read})

    def _index_of_bias(self, result: str) -> int:
        index = self._structure.bias(result)
        if index is None:
            raise AssertionError(f"{result} has no bias")
        return index

    def _bias(self, result: str) -> FloatArray:
        """Return the bias of an addition as it is by now."""
        if result not in self._biases:
            name = self._structure.producers[result].input[self._index_of_bias(result)]
            self._biases[result] = np.asarray(self._graph.weights[name], np.float32)
        return self._biases[result]

    def _add_to_bias(self, result: str | None, more: FloatArray) -> None:
        if result is not None:
            self._biases[result] = self._bias(result) + more

    def _fold(self, recipe: Recipe) -> None:
        """Divide and centre the input of a group where it is computed, if that can be."""
        if recipe.divisors is None:
            return
        source, divisors = recipe.group.source, recipe.divisors
        centres = np.zeros_like(divisors) if recipe.centres is None else recipe.centres
        match self._structure.folding(recipe.group):
            case NormFolding() as folding:
                self._fold_into_norm(source, folding, divisors, centres)
            case ProductFolding(product):
                self._divided[product] = divisors
                if (result := self._structure.biased(product)) is not None:
                    self._biases[result] = (self._bias(result) - centres) / divisors
            case None:
                return
        self._folded.add(source)

    def _fold_into_norm(
        self, source: str, folding: NormFolding, divisors: FloatArray, centres: FloatArray
    ) -> None:
        norm = self._structure.producers[source]
        for number, index in enumerate(folding.parameters):
            parameter = np.asarray(self._graph.weights[norm.input[index]], np.float32)
            # The scale is first, and centres are taken off the bias alone.
            changed = (parameter - centres if number else parameter) / divisors
            name = self._add_weight(f"{norm.input[index]}_{source}_smoothed", changed)
            self._replaced.setdefault(source, {})[index] = name
        for addition, addend in zip(folding.residuals, folding.addends, strict=True):
            index = list(self._structure.producers[addition].input).index(source)
            self._replaced.setdefault(addition, {})[index] = f"{source}_restored"
            self._add_to_bias(addend, centres)
        self._restored |= dict.fromkeys(folding.residuals[:1], (source, divisors))

    def _widen(self, recipe: Recipe) -> None:
        """Give an activation further columns: put them at the product before it."""
        if recipe.split is None:
            return
        activation = self._structure.activation(recipe.group)
        if activation is None:
            raise AssertionError(f"{recipe.group.source} has no activation that can be split")
        result = activation.source
        product = self._structure.producers[result].input[1 - self._index_of_bias(result)]
        self._split[product] = recipe.split
        self._biases[result] = recipe.split.widen_bias(self._bias(result))

    def _changed(self, product: str, weight: FloatArray) -> FloatArray:
        """Return what becomes of a weight in fp32 whose columns are divided or split."""
        if product in self._divided:
            weight = weight / self._divided[product]
        if product in self._split:
            weight = self._split[product].widen_weight(weight)
        return weight

    def _changed_rounded(self, product: str, weight: RoundedWeight) -> RoundedWeight:
        """Return the same of a rounded weight."""
        if product in self._divided:
            weight = RoundedWeight(weight.values, weight.scales / self._divided[product])
        if product in self._split:
            weight = weight.widened(self._split[product])
        return weight

    def _with_replaced(self, node: onnx.NodeProto) -> onnx.NodeProto:
        replaced = self._replaced.get(node.output[0])
        if not replaced:
            return node
        if node.output[0] in self._restored:
            source, divisors = self._restored[node.output[0]]
            self._add("Mul", [source, self._add_weight(f"{source}_divisors", divisors)], f"{source}_restored")
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
        self._add("QuantizeLinear", [value, scale, zero_point], f"{source}_quantized")
        self._add("DequantizeLinear", [f"{source}_quantized", scale, zero_point], f"{source}_rounded")
        if recipe.columns is not None:
            columns = self._add_weight(f"{source}_columns", recipe.columns)
            self._add("Gather", [source, columns], f"{source}_exact", axis=2)
        self._quantized.add(source)

    def _multiply(self, recipe: Recipe, index: int, node: onnx.NodeProto) -> None:
        source, result, weight = recipe.group.source, node.output[0], recipe.weights[index]
        is_folded = recipe.divisors is not None and source in self._folded
        if weight is None:
            exact = np.asarray(self._graph.weights[node.input[1]], np.float32)
            if is_folded:
                exact = exact * recipe.divisors[:, None]
            name = self._add_weight(f"{result}_weight", self._changed(result, exact))
            self._add("MatMul", [source, name], result)
            return
        weight = self._changed_rounded(result, weight)
        # A weight that several layers share is rounded for each.
        is_shared = len(self._structure.readers(node.input[1])) > 1
        name = f"{node.input[1]}_{result}" if is_shared else node.input[1]
        values = self._add_weight(f"{name}_int8", weight.values)
        scales = self._add_weight(f"{name}_scale", weight.scales)
        self._add("DequantizeLinear", [values, scales], f"{name}_rounded", axis=1)
        if recipe.columns is None:
            self._add("MatMul", [f"{source}_rounded", f"{name}_rounded"], result)
            return
        rows = recipe.column_weights[index]
        if is_folded:
            rows = rows * recipe.divisors[recipe.columns][:, None]
        exact = self._add_weight(f"{name}_exact", self._changed(result, rows))
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
