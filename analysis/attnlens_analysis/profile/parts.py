"""Which part of the encoder a node of a graph belongs to: by the parameter it reads, else by its neighbours.

It makes no difference whether ONNX Runtime has fused nodes: a fused node still reads the parameters, and
stands between the same neighbours.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from attnlens_analysis.structure import Node, Structure

Part = Literal["projections", "scores", "softmax", "values", "feed-forward", "norms", "rest"]
PARTS: Mapping[Part, str] = {
    "projections": "to queries, keys and values, and back from all heads",
    "scores": "q·k and everything up to the softmax: rotation, biases, masks",
    "softmax": "the softmax alone",
    "values": "weights times values, up to the projection back",
    "feed-forward": "both layers and the activation between them",
    "norms": "LayerNorm or RMSNorm",
    "rest": "embeddings, residual sums, and what is made of the inputs alone",
}
ATTENTION: tuple[Part, ...] = ("scores", "softmax", "values")
"""What grows with the square of the length where every token attends to every other one."""

# The first that is found in the name of a parameter. "query_norm" is a norm, and an embedding's norm is too.
_BY_PARAMETER: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"norm"), "norms"),
    (re.compile(r"(^|\.)embeddings\."), "embeddings"),
    (re.compile(r"\.feed_forward\."), "feed-forward"),
    (re.compile(r"\.attention\.(\w+\.)*(\w+_)?(query|key|value)(_\w+)?\."), "inward"),
    (re.compile(r"\.attention\.(\w+\.)*output\."), "outward"),
)
_AS_PARTS: Mapping[str, Part] = {
    "norms": "norms",
    "embeddings": "rest",
    "feed-forward": "feed-forward",
    "inward": "projections",
    "outward": "projections",
    "softmax": "softmax",
}


def parts_of(graph: Structure) -> list[Part]:
    """Return the part of each node, in the order of the nodes."""
    anchors = {id(node): kind for node in graph.nodes if (kind := _anchor(graph, node))}
    above = _nearest(graph.nodes, anchors, lambda node: [graph.producer(name) for name in node.inputs])
    below = _nearest(
        graph.nodes[::-1],
        anchors,
        lambda node: [consumer for name in node.outputs for consumer in graph.consumers(name)],
    )
    parts: list[Part] = []
    for node in graph.nodes:
        kind = anchors.get(id(node))
        parts.append(_AS_PARTS[kind] if kind else _between(graph, node, above[id(node)], below[id(node)]))
    return parts


def _anchor(graph: Structure, node: Node) -> str | None:
    """Return what a node is for by itself; None: its neighbours must say."""
    if node.operator == "Softmax":
        return "softmax"
    for name in graph.parameters_of(node):
        for pattern, kind in _BY_PARAMETER:
            if pattern.search(name):
                return kind
    return "norms" if node.operator.endswith("LayerNormalization") else None


def _nearest(
    nodes: Sequence[Node], anchors: Mapping[int, str], neighbours: object
) -> dict[int, frozenset[str]]:
    """Return for each node the kinds of the nearest anchors, in the direction that `nodes` comes from."""
    found: dict[int, frozenset[str]] = {}
    for node in nodes:
        kinds: set[str] = set()
        for other in neighbours(node):  # type: ignore[operator]
            if other is not None:
                kind = anchors.get(id(other))
                kinds |= {kind} if kind else found.get(id(other), frozenset())
        found[id(node)] = frozenset(kinds)
    return found


def _between(graph: Structure, node: Node, above: frozenset[str], below: frozenset[str]) -> Part:
    """Return the part of a node that stands between anchors."""
    is_residual_sum = node.operator == "Add" and len(graph.values_of(node)) == len(node.inputs)
    if "softmax" in below:
        return "scores"
    if "outward" in below:
        return "values"
    if "feed-forward" in above and "feed-forward" in below:
        return "feed-forward"
    if below == {"inward"} and not is_residual_sum:
        return "projections"  # picks the tokens that are projected
    if below == {"norms"} and not is_residual_sum:
        return "norms"
    return "rest"
