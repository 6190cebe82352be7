"""Assigns graph nodes to parts of the encoder, by the parameters they read or else by their neighbors.

In graphs that were traced from a module, names of parameters say little. Their projections are the products
with a parameter before the softmax and after the product of weights and values.

This also works for graphs in which ONNX Runtime fused nodes, since fused nodes keep their parameters and
neighbors.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from attnlens_analysis.structure import Node, Structure

Part = Literal["projections", "scores", "softmax", "values", "feed-forward", "norms", "rest"]
PARTS: Mapping[Part, str] = {
    "projections": "query, key, value and output projections",
    "scores": "q·k and everything up to the softmax: rotary embeddings, biases, masks",
    "softmax": "the softmax",
    "values": "weights times values, up to the output projection",
    "feed-forward": "both linear layers and the activation",
    "norms": "LayerNorm or RMSNorm",
    "rest": "embeddings, residual additions and operations on the inputs alone",
}
ATTENTION: tuple[Part, ...] = ("scores", "softmax", "values")
"""Parts whose cost grows quadratically with the length in full attention."""

# Matched against parameter names in this order: "query_norm" and the norm of the embeddings are norms.
_BY_PARAMETER: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"norm"), "norms"),
    (re.compile(r"(^|\.)embeddings\.|^module\..*embed"), "embeddings"),
    (re.compile(r"\.feed_forward\."), "feed-forward"),
    (re.compile(r"\.attention\.(\w+\.)*(\w+_)?(query|key|value)(_\w+)?\."), "inward"),
    (re.compile(r"\.attention\.(\w+\.)*output\."), "outward"),
)
_PRODUCTS = frozenset({"MatMul", "FusedMatMul", "Gemm"})
_AS_PARTS: Mapping[str, Part] = {
    "norms": "norms",
    "embeddings": "rest",
    "feed-forward": "feed-forward",
    "inward": "projections",
    "outward": "projections",
    "softmax": "softmax",
}


def parts_of(graph: Structure) -> list[Part]:
    """Return the part of each node."""
    anchors = {id(node): kind for node in graph.nodes if (kind := _anchor(graph, node))}
    anchors |= _anchors_by_position(graph, anchors)
    above, below = _nearest_above(graph, anchors), _nearest_below(graph, anchors)
    parts: list[Part] = []
    for node in graph.nodes:
        kind = anchors.get(id(node))
        parts.append(_AS_PARTS[kind] if kind else _between(graph, node, above[id(node)], below[id(node)]))
    return parts


def _anchor(graph: Structure, node: Node) -> str | None:
    """Return the kind of a node that can be identified on its own, or None."""
    if node.operator == "Softmax":
        return "softmax"
    for name in graph.parameters_of(node):
        for pattern, kind in _BY_PARAMETER:
            if pattern.search(name):
                return kind
    return "norms" if node.operator.endswith("LayerNormalization") else None


def _anchors_by_position(graph: Structure, anchors: Mapping[int, str]) -> dict[int, str]:
    """Return the kinds of products with a parameter of a module."""
    products = [node for node in graph.nodes if node.operator in _PRODUCTS and id(node) not in anchors]
    of_module = [node for node in products if any(map(_of_module, graph.parameters_of(node)))]
    known = {**anchors, **{id(node): "product" for node in of_module}}
    above = _nearest_above(graph, known)
    weighted = {id(node): "weighted" for node in products if "softmax" in above[id(node)]} | known
    above, below = _nearest_above(graph, weighted), _nearest_below(graph, weighted)
    kinds = {}
    for number in (number for number, kind in known.items() if kind == "product"):
        if below[number] & {"softmax", "weighted"}:
            kinds[number] = "inward"
        else:
            kinds[number] = "outward" if "weighted" in above[number] else "feed-forward"
    return kinds


def _of_module(parameter: str) -> bool:
    return parameter.startswith("module.")


def _nearest_above(graph: Structure, anchors: Mapping[int, str]) -> dict[int, frozenset[str]]:
    return _nearest(graph.nodes, anchors, lambda node: [graph.producer(name) for name in node.inputs])


def _nearest_below(graph: Structure, anchors: Mapping[int, str]) -> dict[int, frozenset[str]]:
    return _nearest(
        graph.nodes[::-1],
        anchors,
        lambda node: [consumer for name in node.outputs for consumer in graph.consumers(name)],
    )


def _nearest(
    nodes: Sequence[Node], anchors: Mapping[int, str], neighbors: object
) -> dict[int, frozenset[str]]:
    """Return the kinds of the nearest anchors of each node, in the direction of `neighbors`."""
    nearest: dict[int, frozenset[str]] = {}
    for node in nodes:
        kinds: set[str] = set()
        for other in neighbors(node):  # type: ignore[operator]
            if other is not None:
                kind = anchors.get(id(other))
                kinds |= {kind} if kind else nearest.get(id(other), frozenset())
        nearest[id(node)] = frozenset(kinds)
    return nearest


def _between(graph: Structure, node: Node, above: frozenset[str], below: frozenset[str]) -> Part:
    """Return the part of a node that is located between anchors."""
    is_residual_sum = node.operator == "Add" and len(graph.values_of(node)) == len(node.inputs)
    if "softmax" in below:
        return "scores"
    if "outward" in below:
        return "values"
    if "feed-forward" in above and "feed-forward" in below:
        return "feed-forward"
    if below == {"inward"} and not is_residual_sum:
        return "projections"  # selects the tokens to project
    if below == {"norms"} and not is_residual_sum:
        return "norms"
    return "rest"
