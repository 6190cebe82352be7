"""A gate for each head of each layer: an input of 1 or 0 by which a head's result is multiplied.

The gradient of a gate at 1 is what the head contributes to the target.

B batch, T tokens, L layers, H heads, O width of a head's result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from attnlens_export.contributions.writer import GraphWriter
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import HEAD_CONTRIBUTIONS, HEAD_GATES

# The projection of all heads' results to the width of the encoder, as every mechanism of attnlens calls it.
_PROJECTION = ".attention.output.weight.T"
_GATED = "gated_"


@dataclass(frozen=True)
class GatedHeads:
    """The heads of one layer, with their gates.

    Attributes:
        before: the name of what all heads give, side by side: (B, T, H * O).
        after: the same, multiplied by the gates.
        members: the name of a constant (M, H * O): 1 where a component belongs to a head. M is the largest H.
    """

    before: str
    after: str
    members: str


def add_gates(writer: GraphWriter, heads_of_layers: Sequence[int]) -> tuple[GatedHeads, ...]:
    """Multiply the results of all heads by gates, nodes kept in order.

    Args:
        writer: of a graph that ends with the last layer.
        heads_of_layers: H of each layer.

    Raises:
        GraphError: the graph does not tell where heads are: a mechanism's module must call the projection of
            its heads' results, side by side, `output`.
    """
    graph = writer.graph
    nodes = list(graph.node)
    projections = [node for node in nodes if node.op_type == "MatMul" and node.input[1].endswith(_PROJECTION)]
    if len(projections) != len(heads_of_layers):
        raise GraphError(
            f"no contributions: {len(projections)} of {len(heads_of_layers)} layers multiply the results of "
            f"their heads by a parameter *{_PROJECTION.removesuffix('.T')}"
        )
    del graph.node[:]
    gated: list[GatedHeads] = []
    for node in nodes:
        if node in projections:
            layer = len(gated)
            gated.append(_gate(writer, node.input[0], layer, heads_of_layers[layer], max(heads_of_layers)))
            node.input[0] = gated[-1].after
        graph.node.append(node)
    return tuple(gated)


def _gate(writer: GraphWriter, value: str, layer: int, num_heads: int, most: int) -> GatedHeads:
    shape = writer.shape(value)
    width = int(shape[-1])
    places = np.arange(width) // (width // num_heads)
    members = writer.constant((np.arange(most)[:, None] == places).astype(np.float32))  # (most, H * O)
    of_layer = writer.add("Gather", HEAD_GATES, writer.constant(np.array(layer, dtype=np.int64)), axis=1)
    row = writer.add("Unsqueeze", writer.add("MatMul", of_layer, members), writer.constant([1]))
    after = writer.add("Mul", value, row, name=f"{_GATED}{layer}", shape=shape)
    return GatedHeads(value, after, members)


def limit_to_sweep(model: onnx.ModelProto) -> None:
    """Let the gates act on the sweep alone: every head attends as if its gate were 1.

    With all else held constant, scores and baseline then add up to a function that is linear in the gates of
    a layer, and its slope is what the layer's heads contribute.
    """
    for node in model.graph.node:
        if node.output[0].startswith(_GATED):
            node.op_type = "Identity"
            del node.input[1:]


def add_contributions(writer: GraphWriter, gated: Sequence[GatedHeads], gradients: Sequence[str]) -> None:
    """Write the output (B, L, H) of what heads contribute, given the gradients behind the gates."""
    rows = []
    for heads, gradient in zip(gated, gradients, strict=True):
        product = writer.add("Mul", gradient, heads.before, shape=writer.shape(heads.before))
        summed = writer.sum(product, [1])  # (B, H * O)
        row = writer.add("MatMul", summed, writer.add("Transpose", heads.members, perm=[1, 0]))
        rows.append(writer.add("Unsqueeze", row, writer.constant([1])))
    if len(rows) == 1:
        writer.add("Identity", rows[0], name=HEAD_CONTRIBUTIONS)
    else:
        writer.add("Concat", *rows, axis=1, name=HEAD_CONTRIBUTIONS)
