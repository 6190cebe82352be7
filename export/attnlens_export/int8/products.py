"""The products of matrices that can be computed in int8: MatMuls with a weight as second input.

Those that read the same value, such as a layer's queries, keys and values, form a group: they share one
quantized input. K width of the input, N width of a result.
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from attnlens_export.graph.trace import TracedGraph

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Group:
    """MatMuls that read one value.

    Attributes:
        source: the value, (B, T, K).
        results: the values that they compute, each (B, T, N).
        weights: the names of their weights, each (K, N).
        kind: the names of the weights without the number of the layer, so that layers can be compared.
    """

    source: str
    results: tuple[str, ...]
    weights: tuple[str, ...]
    kind: str


def find_groups(graph: TracedGraph) -> list[Group]:
    """Return the groups of a graph in the order in which they are computed."""
    members: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.proto.graph.node:
        if is_candidate(node, graph):
            members.setdefault(node.input[0], []).append(node)
    return [_group(source, nodes) for source, nodes in members.items()]


def is_candidate(node: onnx.NodeProto, graph: TracedGraph) -> bool:
    """Tell whether a node multiplies something computed with a weight (K, N) in fp32."""
    if node.op_type != "MatMul" or node.input[0] in graph.weights or node.input[1] not in graph.weights:
        return False
    weight = graph.weights[node.input[1]]
    return weight.ndim == 2 and weight.dtype == np.float32  # noqa: PLR2004 - a matrix


def _group(source: str, nodes: list[onnx.NodeProto]) -> Group:
    weights = tuple(node.input[1] for node in nodes)
    kind = " ".join(re.sub(r"\d+", "*", weight.removesuffix(".T")) for weight in weights)
    return Group(source, tuple(node.output[0] for node in nodes), weights, kind)
