"""Where q, k, v and the rest stand in an attention graph: found by structure, from the weights backwards.

    weights = softmax(scale * q k^T + terms) * keep        context = weights v

Vaswani et al. 2017, section 3.2. The graph's names for inner values carry no meaning: nothing goes by them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from attnlens_analysis.errors import NotTeachableError
from attnlens_analysis.structure import Node, Structure

# What makes a mechanism no softmax of q.k with known terms, and what can be done instead.
_REASONS = {
    "big_bird": "its blocks of keys are gathered before the product, and no (T, T) scores exist",
    "composed": "its heads are mixed after (and perhaps before) the softmax",
    "disentangled": "its scores are the sum of several products, of content and of position",
    "longformer": "it computes a band of scores, and no (T, T) scores exist",
    "mixture": "its heads are multiplied by gates that each token chooses",
    "overlapping": "its heads share parts of their queries, keys and values with their neighbours",
}
_INSTEAD = "`attnlens attend` shows its weights, `attnlens profile` its cost"


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The graph's names for what is computed in a layer. B texts, T tokens, D width, H heads, K head width.

    Attributes:
        entering: (B, T, D), what the projections read.
        query: (B, H, T, K), as it meets the keys: rotated and normed where the model does so, not scaled.
        key_transposed: (B, H, K, T), likewise, heads that share keys having each their copy.
        scale: what q.k is multiplied by.
        scores: (B, H, T, T), before the softmax.
        products: (B, H, T, T), scale * q.k alone.
        weights: (B, H, T, T).
        value: (B, H, T, K).
        context: (B, H, T, K), weights times values.
        output: (B, T, D), after the projection of all heads.
        residual: (B, T, D), what the output is added to.
        is_rotated: whether q and k go through a rotation on their way from the projections.
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

    @property
    def wanted(self) -> tuple[str, ...]:
        """The values to be computed."""
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
        )


def refuse_mechanism(layer: int, mechanism: str) -> None:
    """Refuse a layer by the name of its mechanism, as the manifest has it.

    Raises:
        NotTeachableError: it is not `softmax`.
    """
    if mechanism != "softmax":
        reason = _REASONS.get(mechanism, "only attention of the kind softmax can be taken apart")
        raise NotTeachableError(f"the attention of layer {layer} is {mechanism}: {reason}; {_INSTEAD}")


def find_layer(graph: Structure, layer: int, weights: str) -> LayerNames:
    """Find the values of a layer, whose attention weights the graph calls `weights`.

    Raises:
        NotTeachableError: the nodes around the softmax are not those of this module's formula.
    """
    try:
        return _find(graph, weights)
    except _OtherShapeError as error:
        raise NotTeachableError(
            f"the attention of layer {layer} can't be taken apart into softmax(q.k): {error}; {_INSTEAD}"
        ) from error


class _OtherShapeError(Exception):
    """The graph is not as expected; the message says where."""


def _find(graph: Structure, weights: str) -> LayerNames:
    softmax = _single(_ascend(graph, weights, {"Mul"}, "Softmax"), "a Softmax behind the weights")
    scores = softmax.inputs[0]
    product = _single(_ascend(graph, scores, {"Add", "Sub"}, "MatMul"), "a product q.k behind the Softmax")
    scaled, key_transposed = product.inputs
    query, scale = _without_scale(graph, scaled)
    values = _single(
        (
            node
            for node in graph.consumers(weights)
            if node.operator == "MatMul" and node.inputs[0] == weights
        ),
        "a product of the weights and the values",
    )
    entering, is_rotated = _projection(graph, query)
    for term in _terms(graph, scores, product):
        if any(entering in node.inputs for node in graph.above(term)):
            raise _OtherShapeError("something that depends on the tokens is added to q.k")
    output = _output(graph, values.outputs[0])
    return LayerNames(
        entering=entering,
        query=query,
        key_transposed=key_transposed,
        scale=scale,
        scores=scores,
        products=product.outputs[0],
        weights=weights,
        value=values.inputs[1],
        context=values.outputs[0],
        output=output,
        residual=_residual(graph, output),
        is_rotated=is_rotated,
    )


def _single(found: Iterable[Node], what: str) -> Node:
    nodes = list(found)
    if len(nodes) != 1:
        raise _OtherShapeError(f"there is not {what}, but {len(nodes)}")
    return nodes[0]


def _ascend(graph: Structure, name: str, through: set[str], wanted: str) -> list[Node]:
    """Return the `wanted` nodes behind a value with only nodes of `through` between."""
    node = graph.producer(name)
    if node is None:
        return []
    if node.operator == wanted and not graph.parameters_of(node):
        return [node]
    if node.operator not in through:
        return []
    return [found for each in node.inputs for found in _ascend(graph, each, through, wanted)]


def _terms(graph: Structure, name: str, product: Node) -> list[str]:
    """Return what is added to a product on its way to the value `name`."""
    node = graph.producer(name)
    if node is None or node is product:
        return []
    leading = [each for each in node.inputs if product in _ascend(graph, each, {"Add", "Sub"}, "MatMul")]
    others = [each for each in node.inputs if each not in leading]
    return others + [term for each in leading for term in _terms(graph, each, product)]


def _without_scale(graph: Structure, scaled: str) -> tuple[str, float]:
    """Return the value before it was multiplied by one number, and that number."""
    node = graph.producer(scaled)
    if node is not None and node.operator == "Mul":
        factors = [name for name in node.inputs if name in graph.scalars]
        if len(factors) == 1:
            return next(name for name in node.inputs if name not in factors), graph.scalars[factors[0]]
    return scaled, 1.0


def _projection(graph: Structure, query: str) -> tuple[str, bool]:
    """Return what the projection to queries reads, and whether there is a rotation behind it."""
    is_rotated = False
    for node in graph.above(query):
        if node.operator == "MatMul" and graph.parameters_of(node):
            return node.inputs[0], is_rotated
        is_rotated |= node.operator == "Concat"
    raise _OtherShapeError("no projection leads to the queries")


def _output(graph: Structure, context: str) -> str:
    """Return the result of the projection that reads all heads, its bias added."""
    for node in graph.below(context):
        if node.operator == "MatMul" and graph.parameters_of(node):
            following = graph.consumers(node.outputs[0])
            if len(following) == 1 and following[0].operator == "Add" and graph.parameters_of(following[0]):
                return following[0].outputs[0]
            return node.outputs[0]
    raise _OtherShapeError("no projection reads the heads")


def _residual(graph: Structure, output: str) -> str:
    """Return what a layer adds its attention's output to, perhaps after a norm of that output."""
    made_of_it = {output}
    for node in graph.below(output):
        others = [name for name in graph.values_of(node) if name not in made_of_it]
        if node.operator == "Add" and len(others) == 1 and not graph.parameters_of(node):
            return others[0]
        made_of_it.update(node.outputs)
    raise _OtherShapeError("nothing is added to the output")
