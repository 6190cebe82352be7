"""Locates queries, keys, values and intermediate results in an attention graph.

    weights = softmax(scale * q k^T + terms) * keep        context = weights v

See Vaswani et al. 2017, section 3.2. The search starts at the attention weights and relies only on the graph
structure, since the names of intermediate values have no meaning.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from attnlens.patterns import Band, BlockTable
from attnlens_analysis.errors import NotTeachableError
from attnlens_analysis.structure import Node, Structure
from attnlens_server.bundle import Output

DIFFERENCES = {
    "big_bird": "each token attends to some blocks of keys only, and a block listed twice counts twice",
    "composed": "scores are mixed across heads before the softmax, or weights after it",
    "disentangled": "products of content and relative positions are added to q·k",
    "longformer": "each token attends to a window only, and global tokens have projections of their own",
    "mixture": "the context of each head is multiplied by a gate that depends on the token",
    "overlapping": "q, k and v of a head include features of the adjacent heads",
}
"""How mechanisms differ from a softmax of q.k."""

PLAIN = frozenset({"softmax", "own_module"})
"""Mechanisms that are a softmax of q.k. Of a module, the graph around its softmax decides."""

# Why a mechanism cannot be decomposed into softmax(q.k) with known terms, and alternatives.
_REASONS = {
    "big_bird": "its key blocks are gathered before the product, so there are no (T, T) scores",
    "composed": "its heads are mixed after (and perhaps before) the softmax",
    "disentangled": "its scores are sums of content and position products",
    "longformer": "it computes scores only in a band, so there are no (T, T) scores",
    "mixture": "its heads are multiplied by token-dependent gates",
    "overlapping": "its heads share parts of their queries, keys and values with adjacent heads",
}
_LAYER_OF_MODULE = re.compile(r"module\..*?\.\d+\.")
_INSTEAD = "use `attnlens attend` to view its weights, or `attnlens profile` to measure its cost"


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Value names of one layer in the graph. B texts, T tokens, D hidden size, H heads, K head size.

    Attributes:
        entering: (B, T, D) input of the projections.
        query: (B, H, T, K) unscaled queries, after rotary embeddings and norms if any.
        key_transposed: (B, H, K, T) keys, likewise. Shared keys are repeated for each head.
        scale: Scale of q.k.
        scores: (B, H, T, T) input of the softmax.
        products: (B, H, T, T) scale * q.k.
        weights: (B, H, T, T) attention weights.
        value: (B, H, T, K) values.
        context: (B, H, T, K) weights times values.
        output: (B, T, D) result of the output projection.
        residual: (B, T, D) residual that the output is added to.
        is_rotated: Whether rotary embeddings are applied to q and k.
        feed_forward: (B, T, D) result of the feed-forward layer, or empty if it was not found.
        gates: (B, T, H) gates of the heads, or empty if they have none.
        composed: (B, H, T, T) weights after the composition of heads, or empty if they are not composed.
    """

    entering: str
    query: str
    key_transposed: str
    scale: float
    scores: str
    products: str
    weights: str
    value: str
    context: str
    output: str
    residual: str
    is_rotated: bool
    feed_forward: str = ""
    gates: str = ""
    composed: str = ""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values to compute."""
        return (
            self.entering,
            self.query,
            self.key_transposed,
            self.scores,
            self.products,
            self.weights,
            self.value,
            self.context,
            self.output,
            self.residual,
            *filter(None, [self.feed_forward, self.gates, self.composed]),
        )


@dataclass(frozen=True, slots=True)
class ProjectionNames:
    """Value names of a layer whose attention is not a softmax of q.k alone. See `LayerNames`.

    Attributes:
        query: (B, T, H K) queries.
        key: (B, T, G K) keys of G key heads.
        value: (B, T, G K) values.
        weights: Attention weights, in the layout of `pattern`.
        pattern: Layout of the weights. None if dense.
    """

    entering: str
    query: str
    key: str
    value: str
    scale: float
    weights: str
    pattern: Band | BlockTable | None
    num_heads: int
    num_key_value_heads: int
    output: str
    residual: str
    feed_forward: str
    gates: str = ""
    composed: str = ""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values to compute."""
        names = (self.entering, self.query, self.key, self.value, self.weights, self.output, self.residual)
        return (*names, *filter(None, [self.feed_forward, self.gates, self.composed]))

    def dense(self, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the weights as (H, T, T)."""
        rows = weights.astype(np.float32)
        match self.pattern:
            case None:
                return weights
            case Band() as band:
                return band.dense(rows).astype(np.float64)
            case table:
                return table.at(rows.shape[1]).dense(rows).astype(np.float64)


def check_mechanism(layer: int, mechanism: str) -> None:
    """Check the attention mechanism of a layer according to the manifest.

    Raises:
        NotTeachableError: The mechanism is no softmax of q.k.
    """
    if mechanism not in PLAIN:
        reason = _REASONS.get(mechanism, "only softmax attention can be decomposed")
        raise NotTeachableError(f"attention of layer {layer} is {mechanism}: {reason}; {_INSTEAD}")


def find_layer(graph: Structure, layer: int, weights: str) -> LayerNames:
    """Locate the values of a layer, given the name of its attention weights.

    Raises:
        NotTeachableError: The graph around the softmax does not match the formula of this module.
    """
    try:
        found = _find(graph, weights)
        forward = _feed_forward(graph, layer) or _feed_forward_of_module(graph, found.output)
        return replace(found, feed_forward=forward)
    except _MismatchError as error:
        raise NotTeachableError(
            f"attention of layer {layer} cannot be decomposed into softmax(q.k): {error}; {_INSTEAD}"
        ) from error


def find_projections(
    graph: Structure, layer: int, weights: Output, num_heads: tuple[int, int]
) -> ProjectionNames:
    """Locate the projections of a layer by the names of their parameters.

    Args:
        graph: The attention graph.
        layer: Layer index.
        weights: Attention weights of the layer.
        num_heads: Number of query heads, and of key and value heads.

    Raises:
        NotTeachableError: The graph has no such projections.
    """
    try:
        nodes = {
            role: _projection_node(graph, f"layers.{layer}.attention.{role}.weight")
            for role in ("query", "key", "value", "output")
        }
        output = _with_bias(graph, nodes["output"])
        query = _with_bias(graph, nodes["query"])
        return ProjectionNames(
            entering=nodes["query"].inputs[0],
            query=query,
            key=_with_bias(graph, nodes["key"]),
            value=_with_bias(graph, nodes["value"]),
            scale=_first_scale(graph, query),
            weights=weights.name,
            pattern=weights.pattern,
            num_heads=num_heads[0],
            num_key_value_heads=num_heads[1],
            output=output,
            residual=_residual(graph, output),
            feed_forward=_feed_forward(graph, layer),
        )
    except _MismatchError as error:
        raise NotTeachableError(f"layer {layer} has no projections to q, k and v: {error}") from error


def _projection_node(graph: Structure, parameter: str) -> Node:
    """Return the product with a parameter."""
    return _single(
        (
            node
            for node in graph.nodes
            if node.operator == "MatMul" and any(name.startswith(parameter) for name in node.inputs)
        ),
        f"product with {parameter}",
    )


def _first_scale(graph: Structure, query: str) -> float:
    """Return the first scalar that queries are multiplied with, or 1."""
    for node in graph.below(query):
        factors = [graph.scalars[name] for name in node.inputs if name in graph.scalars]
        if node.operator == "Mul" and factors:
            return factors[0]
    return 1.0


def _feed_forward(graph: Structure, layer: int) -> str:
    """Return the result of the last feed-forward product of a layer, or an empty name."""
    prefix = f"layers.{layer}.feed_forward."
    nodes = [
        node
        for node in graph.nodes
        if node.operator == "MatMul" and any(name.startswith(prefix) for name in node.inputs)
    ]
    return _with_bias(graph, nodes[-1]) if nodes else ""


def _feed_forward_of_module(graph: Structure, output: str) -> str:
    """Return the result of the last product of the layer with this attention output, or an empty name.

    Names of parameters of a module start with that of their layer, which may be applied several times.
    """
    node = graph.producer(output)
    found = _LAYER_OF_MODULE.match(next(iter(graph.parameters_of(node)), "") if node else "")
    before: set[str] = set()
    result, is_after = "", False
    for node in graph.nodes:
        of_layer = [name for name in graph.parameters_of(node) if found and name.startswith(found[0])]
        if node.operator == "MatMul" and of_layer:
            repeats = not before.isdisjoint(of_layer)
            if is_after and repeats:
                break
            if is_after:
                result = _with_bias(graph, node)
            else:
                before = {*of_layer} if repeats else before.union(of_layer)
        is_after |= output in node.outputs
    return result


def _with_bias(graph: Structure, node: Node) -> str:
    """Return the result of a product, including its bias if any."""
    following = graph.consumers(node.outputs[0])
    if len(following) == 1 and following[0].operator == "Add" and graph.parameters_of(following[0]):
        return following[0].outputs[0]
    return node.outputs[0]


class _MismatchError(Exception):
    """The graph structure is not as expected."""


def _find(graph: Structure, weights: str) -> LayerNames:
    softmax = _single(_ascend(graph, weights, {"Mul"}, "Softmax"), "Softmax before the weights")
    scores = softmax.inputs[0]
    found = _single(_products(graph, scores), "product q.k before the Softmax")
    product, factor = _without_scale(graph, found.outputs[0])
    scaled, key_transposed = _single(filter(None, [graph.producer(product)]), "product q.k").inputs
    query, scale = _without_scale(graph, scaled)
    values = _single(
        (
            node
            # A module multiplies its values by the weights of padding, too.
            for name in dict.fromkeys([weights, softmax.outputs[0]])
            for node in graph.consumers(name)
            if node.operator == "MatMul" and node.inputs[0] == name
        ),
        "product of weights and values",
    )
    entering, is_rotated = _projection(graph, query)
    for term in _terms(graph, scores, found):
        if any(entering in node.inputs for node in graph.above(term)):
            raise _MismatchError("a token-dependent term is added to q.k")
    output = _output(graph, values.outputs[0])
    return LayerNames(
        entering=entering,
        query=query,
        key_transposed=key_transposed,
        scale=scale * factor,
        scores=scores,
        products=found.outputs[0],
        weights=weights,
        value=values.inputs[1],
        context=values.outputs[0],
        output=output,
        residual=_residual(graph, output),
        is_rotated=is_rotated,
    )


def _single(candidates: Iterable[Node], description: str) -> Node:
    nodes = list(candidates)
    if len(nodes) != 1:
        raise _MismatchError(f"expected one {description}, found {len(nodes)}")
    return nodes[0]


def _ascend(graph: Structure, name: str, through: set[str], operator: str) -> list[Node]:
    """Return the `operator` nodes that produce a value, possibly through nodes of the types `through`."""
    node = graph.producer(name)
    if node is None:
        return []
    if node.operator == operator and not graph.parameters_of(node):
        return [node]
    if node.operator not in through:
        return []
    return [ancestor for name in node.inputs for ancestor in _ascend(graph, name, through, operator)]


def _products(graph: Structure, scores: str) -> list[Node]:
    """Return the products without parameters, and with a scale if any, that are summands of the scores."""
    product, _scale = _without_scale(graph, scores)
    found, node = graph.producer(product), graph.producer(scores)
    if node is None:
        return []
    if found is not None and found.operator == "MatMul" and not graph.parameters_of(found):
        return [node]
    if node.operator not in {"Add", "Sub"}:
        return []
    return [ancestor for name in node.inputs for ancestor in _products(graph, name)]


def _terms(graph: Structure, name: str, product: Node) -> list[str]:
    """Return the terms that are added to a product to obtain the value `name`."""
    node = graph.producer(name)
    if node is None or node is product:
        return []
    leading = [each for each in node.inputs if product in _products(graph, each)]
    others = [each for each in node.inputs if each not in leading]
    return others + [term for each in leading for term in _terms(graph, each, product)]


def _without_scale(graph: Structure, scaled: str) -> tuple[str, float]:
    """Return the value before multiplication by a scalar, and the scalar."""
    node = graph.producer(scaled)
    if node is not None and node.operator == "Mul":
        factors = [name for name in node.inputs if name in graph.scalars]
        if len(factors) == 1:
            return next(name for name in node.inputs if name not in factors), graph.scalars[factors[0]]
    return scaled, 1.0


def _projection(graph: Structure, query: str) -> tuple[str, bool]:
    """Return the input of the query projection, and whether rotary embeddings follow it."""
    is_rotated = False
    for node in graph.above(query):
        if node.operator == "MatMul" and graph.parameters_of(node):
            return node.inputs[0], is_rotated
        is_rotated |= node.operator == "Concat"
    raise _MismatchError("the queries have no projection")


def _output(graph: Structure, context: str) -> str:
    """Return the result of the output projection, including its bias."""
    for node in graph.below(context):
        if node.operator == "MatMul" and graph.parameters_of(node):
            return _with_bias(graph, node)
    raise _MismatchError("the heads have no output projection")


def _residual(graph: Structure, output: str) -> str:
    """Return the residual that the attention output is added to, possibly after a norm."""
    derived = {output}
    for node in graph.below(output):
        others = [name for name in graph.values_of(node) if name not in derived]
        if node.operator == "Add" and len(others) == 1 and not graph.parameters_of(node):
            return others[0]
        derived.update(node.outputs)
    raise _MismatchError("the output is not added to a residual")
