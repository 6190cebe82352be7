"""From the fp32 graph of the hidden states to one in fp16 with the same inputs and outputs.

What runs in fp16 and what in fp32 follows `torch.autocast` (https://docs.pytorch.org/docs/stable/amp.html):

- MatMul and Conv take and return fp16, whatever comes in, and their weights are stored in fp16, as is the
  table of token embeddings.
- What adds or multiplies a parameter or a constant, applies an activation, or moves numbers about (Reshape,
  Transpose, Slice, Unsqueeze, Concat, Gather) stays in the type of what comes in.
- All else is fp32: LayerNormalization, Softmax, the sums and roots of RMSNorm; every sum of two computed
  values, so the residual stream and the mask and biases added to scores; every square; and what meets an
  fp32 value, so the product behind the softmax, and rotations.
- In a graph with Tanh all products of computed values are fp32: in the tanh form of GELU the third power
  leaves fp16 at 113.

onnxruntime.transformers.float16 decides by operator, so that it can't tell a bias from a residual sum, clips
weights to the range, and needs the fp32 model in one message of 2 GiB.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from attnlens_export.errors import GraphError
from attnlens_export.graph.lint import MAX_FP16
from attnlens_export.graph.trace import TracedGraph

FP16_PATH = "onnx/model_fp16.onnx"
SMALLEST_NORMAL_FP16 = float(np.finfo(np.float16).tiny)
FP16_SUFFIX, EXACT_SUFFIX = "_fp16", "_fp32"
TOKEN_TABLE = "embeddings.token.weight"  # noqa: S105 - the name of a parameter

_PRODUCTS = frozenset({"MatMul", "Conv"})
_MOVES = frozenset({"Reshape", "Transpose", "Slice", "Unsqueeze", "Gather"})
_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Erf", "Relu", "Sigmoid", "Tanh", "Concat"})

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Fp16Weights:
    """What rounding to fp16 did to the weights.

    Attributes:
        num_values: the numbers that are stored in fp16.
        num_zeroed: those that were not 0 and are now.
        num_subnormal: those that are stored with fewer than 11 significant bits, below 6.1e-5.
    """

    num_values: int
    num_zeroed: int
    num_subnormal: int


def to_fp16(graph: TracedGraph) -> TracedGraph:
    """Return the graph in fp16.

    Raises:
        GraphError: a weight is beyond the range of fp16.
    """
    return _Conversion(graph).convert()


def round_weight(name: str, array: Array) -> npt.NDArray[np.float16]:
    """Round a weight to fp16.

    Raises:
        GraphError: a value is beyond the range.
    """
    largest = float(np.abs(array).max(initial=0.0))
    if not largest <= MAX_FP16:
        raise GraphError(
            f"{name} holds {largest:.8g} in magnitude, fp16 at most {MAX_FP16:g}: "
            "export without --precision fp16"
        )
    return array.astype(np.float16)


def count_rounded(pairs: Iterable[tuple[Array, Array]]) -> Fp16Weights:
    """Compare weights in fp16 with what they were rounded from: pairs of (fp32, fp16)."""
    num_values = num_zeroed = num_subnormal = 0
    for exact, rounded in pairs:
        num_values += rounded.size
        num_zeroed += int(np.count_nonzero((rounded == 0) & (exact != 0)))
        num_subnormal += int(np.count_nonzero((rounded != 0) & (np.abs(rounded) < SMALLEST_NORMAL_FP16)))
    return Fp16Weights(num_values, num_zeroed, num_subnormal)


def fp16_values(model: onnx.ModelProto) -> list[str]:
    """Return the names of all inner values in fp16, in the order in which they are computed."""
    in_fp16 = {each.name for each in model.graph.initializer if each.data_type == TensorProto.FLOAT16}
    found: list[str] = []
    for node in model.graph.node:
        is_fp16 = node.op_type != "Shape" and node.input[0] in in_fp16
        if node.op_type == "Cast":
            is_fp16 = helper.get_node_attr_value(node, "to") == TensorProto.FLOAT16
        if is_fp16:
            in_fp16.update(node.output)
            found.extend(node.output)
    return found


class _Conversion:
    """Walks the nodes in order and knows the type of every value before it is used."""

    def __init__(self, graph: TracedGraph) -> None:
        self._source = graph
        self._fp16: set[str] = set()
        self._casts: dict[str, str] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._exact_weights: set[str] = set()
        self._fp16_weights: set[str] = set()
        self._has_tanh = any(node.op_type == "Tanh" for node in graph.proto.graph.node)

    def convert(self) -> TracedGraph:
        source = self._source
        for node in source.proto.graph.node:
            self._add(node)
        for output in source.proto.graph.output:
            self._return_exact(output.name)
        proto = onnx.ModelProto()
        proto.CopyFrom(source.proto)
        del proto.graph.node[:]
        proto.graph.node.extend(self._nodes)
        weights: dict[str, Array] = {}
        for name, array in source.weights.items():
            if name in self._fp16_weights:
                weights[self._fp16_name(name)] = round_weight(name, array)
            if name in self._exact_weights:
                weights[name] = array
        self._rename_shared(proto)
        return TracedGraph(proto, weights)

    def _add(self, node: onnx.NodeProto) -> None:
        is_fp16 = self._runs_in_fp16(node)
        converted = onnx.NodeProto()
        converted.CopyFrom(node)
        for index, name in enumerate(node.input):
            converted.input[index] = self._as_input(name, is_fp16 and self._is_number(node, index))
        self._nodes.append(converted)
        if is_fp16:
            self._fp16.update(node.output)

    def _runs_in_fp16(self, node: onnx.NodeProto) -> bool:
        if node.op_type in _PRODUCTS:
            return True
        if node.op_type in _MOVES:
            return node.input[0] in self._fp16 or (node.op_type == "Gather" and node.input[0] == TOKEN_TABLE)
        computed = [name for name in node.input if name not in self._source.weights]
        if node.op_type not in _ELEMENTWISE or not computed or not self._fp16.issuperset(computed):
            return False
        if len(computed) == 1 or node.op_type == "Concat":
            return True
        return node.op_type == "Mul" and len(set(computed)) > 1 and not self._has_tanh

    @staticmethod
    def _is_number(node: onnx.NodeProto, index: int) -> bool:
        """Whether an input of a node holds numbers, and not an index or a shape."""
        return index == 0 or node.op_type not in _MOVES

    def _as_input(self, name: str, is_fp16: bool) -> str:
        if name in self._source.weights:
            (self._fp16_weights if is_fp16 else self._exact_weights).add(name)
            # Which name it gets is known when all its readers are.
            return f"{name}{FP16_SUFFIX}" if is_fp16 else name
        if not name or is_fp16 == (name in self._fp16):
            return name
        if name not in self._casts:
            self._casts[name] = f"{name}{FP16_SUFFIX if is_fp16 else EXACT_SUFFIX}"
            data_type = TensorProto.FLOAT16 if is_fp16 else TensorProto.FLOAT
            self._nodes.append(_cast_node(name, self._casts[name], data_type))
        return self._casts[name]

    def _return_exact(self, name: str) -> None:
        if name not in self._fp16:
            return
        inner = f"{name}{FP16_SUFFIX}"
        for node in self._nodes:
            for names in (node.input, node.output):
                for index, each in enumerate(names):
                    if each == name:
                        names[index] = inner
        self._nodes.append(_cast_node(inner, name, TensorProto.FLOAT))

    def _fp16_name(self, name: str) -> str:
        """Return what a weight in fp16 is called: its own name, unless that is read in fp32 too."""
        return f"{name}{FP16_SUFFIX}" if name in self._exact_weights else name

    def _rename_shared(self, proto: onnx.ModelProto) -> None:
        names = {f"{name}{FP16_SUFFIX}": self._fp16_name(name) for name in self._fp16_weights}
        for node in proto.graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = names.get(name, name)


def _cast_node(source: str, result: str, data_type: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [result], name=f"cast_{result}", to=data_type)
