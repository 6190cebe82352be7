"""A gate for each head of each layer: an input of 1 or 0 by which a head's result is multiplied.

The gradient of a gate at 1 is what the head contributes to the target.

B batch, T tokens, L layers, H heads, O width of a head's result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnlens_export.contributions.writer import GraphWriter
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import BATCH_AXIS, HEAD_CONTRIBUTIONS, HEAD_GATES, LENGTH_AXIS

# The projection of all heads' results to the width of the encoder, as every mechanism of attnlens calls it.
_PROJECTION = ".attention.output.weight.T"


@dataclass(frozen=True)
class GatedHeads:
    """The heads of one layer, with their gates.

    Attributes:
        before: the name of what all heads give, side by side: (B, T, H * O).
        after: the same, multiplied by the gates.
        num_heads: H.
    """

    before: str
    after: str
    num_heads: int


def add_gates(writer: GraphWriter, heads_of_layers: Sequence[int]) -> tuple[GatedHeads, ...]:
    """Multiply the results of all heads by gates, nodes kept in order.

    Args:
        writer: of a graph that ends with the last layer.
        heads_of_layers: H of each layer.

    Raises:
        GraphError: the graph does not tell where heads are: a mechanism's module must call the projection of its
            heads' results, side by side, `output`.
    """
    graph = writer.graph
    nodes = list(graph.node)
    projections = [node for node in nodes if node.op_type == "MatMul" and node.input[1].endswith(_PROJECTION)]
    if len(projections) != len(heads_of_layers):
        raise GraphError(
            f"no contributions: {len(projections)} of {len(heads_of_layers)} layers multiply the results of their heads "
            f"by a parameter *{_PROJECTION.removesuffix('.T')}"
        )
    layers = {node.name: layer for layer, node in enumerate(projections)}
    del graph.node[:]
    gated = []
    for node in nodes:
        if node.name in layers:
            layer = layers[node.name]
            heads = _gate(writer, node.input[0], layer, heads_of_layers[layer])
            node.input[0] = heads.after
            gated.append(heads)
        graph.node.append(node)
    return tuple(gated)


def _gate(writer: GraphWriter, value: str, layer: int, num_heads: int) -> GatedHeads:
    width = int(writer.shape(value)[-1])
    of_layer = writer.add(
        "Gather", HEAD_GATES, writer.constant(np.array(layer, dtype=np.int64)), axis=1, shape=()
    )
    of_layer = writer.add(
        "Slice", of_layer, writer.constant([0]), writer.constant([num_heads]), writer.constant([1]), shape=()
    )
    column = writer.add("Unsqueeze", of_layer, writer.constant([2]), shape=(BATCH_AXIS, num_heads, 1))
    ones = writer.constant(np.ones((1, 1, width // num_heads), dtype=np.float32))
    spread = writer.add("Mul", column, ones, shape=(BATCH_AXIS, num_heads, width // num_heads))
    row = writer.reshape(spread, [0, 1, width], (BATCH_AXIS, 1, width))
    after = writer.add("Mul", value, row, name=f"gated_{layer}", shape=(BATCH_AXIS, LENGTH_AXIS, width))
    return GatedHeads(value, after, num_heads)


def add_contributions(writer: GraphWriter, gated: Sequence[GatedHeads], gradients: Sequence[str]) -> None:
    """Write the output (B, L, H) of what heads contribute, given the gradients of what is behind the gates."""
    most = max(heads.num_heads for heads in gated)
    rows = []
    for heads, gradient in zip(gated, gradients, strict=True):
        shape = writer.shape(heads.before)
        width = int(shape[-1])
        product = writer.add("Mul", gradient, heads.before, shape=shape)
        summed = writer.sum(product, [1])
        split = writer.reshape(
            summed, [0, heads.num_heads, width // heads.num_heads], (BATCH_AXIS, heads.num_heads, 1)
        )
        row = writer.sum(split, [2])
        if heads.num_heads < most:
            none = writer.add("Slice", HEAD_GATES, *(writer.constant([n]) for n in (0, 1, 1)), shape=())
            none = writer.add("Squeeze", none, writer.constant([1]), shape=())
            ends = (writer.constant([heads.num_heads]), writer.constant([most]), writer.constant([1]))
            none = writer.add(
                "Mul", writer.add("Slice", none, *ends, shape=()), writer.constant(0.0), shape=()
            )
            row = writer.add("Concat", row, none, axis=1, shape=(BATCH_AXIS, most))
        rows.append(writer.add("Unsqueeze", row, writer.constant([1]), shape=(BATCH_AXIS, 1, most)))
    if len(rows) == 1:
        writer.add("Identity", rows[0], name=HEAD_CONTRIBUTIONS, shape=())
    else:
        writer.add("Concat", *rows, axis=1, name=HEAD_CONTRIBUTIONS, shape=(BATCH_AXIS, len(rows), most))
