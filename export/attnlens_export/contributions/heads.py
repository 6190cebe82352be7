"""Head gates: inputs of 0 or 1 that multiply the output of each head.

The gradient of a gate at 1 is the contribution of its head to the target.

B batch, T tokens, L layers, H heads, G groups of heads, O output size of a head.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from attnlens_export.contributions.writer import GraphWriter
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import (
    BATCH_AXIS,
    HEAD_CONTRIBUTIONS,
    HEAD_GATES,
    inner_name,
    output_name,
)
from attnlens_model import ATTENTION_WEIGHTS, AttentionConfig, EncoderConfig, SoftmaxAttentionConfig

# The output projection, which has this name in every mechanism of attnlens.
_PROJECTION = ".attention.output.weight.T"
_VALUES = "layers.{layer}.attention.value.weight.T"
# Operators that only change the shape of attention weights.
_RESHAPING = ("Identity", "Reshape", "Squeeze", "Unsqueeze")
# Operators that concatenate the heads.
_CONCATENATION = ("Transpose", "Reshape")
_GATED = "gated_"
_CONCATENATED_AXES = 3


@dataclass(frozen=True)
class GatedHeads:
    """Names of values of the gated heads of one layer.

    Attributes:
        before: Head outputs: (B, T, H * O). Those of a user's module are (B, H, T, O), or (B, G, H / G, T, O)
            if groups of heads share keys and values.
        after: Head outputs multiplied by the gates.
        members: Constant, (max H, H * O) or (max H, H): 1 if a component belongs to a head, else 0.
        axes: Axes over which contributions are summed.
    """

    before: str
    after: str
    members: str
    axes: tuple[int, ...]


def add_gates(writer: GraphWriter, config: EncoderConfig) -> tuple[GatedHeads, ...]:
    """Multiply the outputs of all heads by gates. The order of nodes does not change.

    Args:
        writer: Writer of a graph that ends with the last layer.
        config: Configuration of the encoder.

    Raises:
        GraphError: The heads cannot be located. A mechanism must name its output projection `output`.
    """
    graph = writer.graph
    heads_of_layers = [attention.num_heads for attention in config.layer_attentions]
    layers = {value: layer for layer, value in enumerate(_concatenated_heads(graph, config))}
    nodes = list(graph.node)
    del graph.node[:]
    gated: dict[str, GatedHeads] = {}
    for node in nodes:
        for index, name in enumerate(node.input):
            if name in layers and name not in gated:
                layer = layers[name]
                gated[name] = _gate(writer, name, layer, heads_of_layers[layer], max(heads_of_layers))
            if name in gated:
                node.input[index] = gated[name].after
        graph.node.append(node)
    return tuple(gated[value] for value in layers)


def _concatenated_heads(graph: onnx.GraphProto, config: EncoderConfig) -> list[str]:
    """Return the names of the head outputs of each layer, see `GatedHeads.before`."""
    if config.has_own_module:
        return [_products_with_weights(graph, layer) for layer in range(config.num_layers)]
    projections = [
        node for node in graph.node if node.op_type == "MatMul" and node.input[1].endswith(_PROJECTION)
    ]
    num_projected = sum(map(_is_projected, config.layer_attentions))
    if len(projections) != num_projected:
        raise GraphError(
            f"no contributions: {len(projections)} of {num_projected} layers multiply the "
            f"outputs of their heads by a parameter *{_PROJECTION.removesuffix('.T')}"
        )
    projected = iter(projections)
    return [
        next(projected).input[0] if _is_projected(attention) else _heads_from_values(graph, config, layer)
        for layer, attention in enumerate(config.layer_attentions)
    ]


def _is_projected(attention: AttentionConfig) -> bool:
    return not isinstance(attention, SoftmaxAttentionConfig) or attention.output_projection


def _heads_from_values(graph: onnx.GraphProto, config: EncoderConfig, layer: int) -> str:
    """Return the name of the concatenated heads of a layer without an output projection.

    They are the product of the attention weights and the projected values, transposed and reshaped.
    """
    index, repetition = divmod(layer, config.times_in_a_row)
    weight = _VALUES.format(layer=index)
    projections = (node for node in graph.node if node.op_type == "MatMul" and node.input[1] == weight)
    values = next(itertools.islice(projections, repetition, None), None)
    found, product = set(values.output if values else ()), ""
    for node in graph.node:
        if product:
            if product in node.input and node.op_type in _CONCATENATION:
                product = node.output[0]
        elif node.op_type == "MatMul" and node.input[1] in found:
            product = node.output[0]
        elif not found.isdisjoint(node.input):
            found.update(node.output)
    if not product:
        raise GraphError(f"no contributions: layer {layer} does not multiply its values by attention weights")
    return product


def _products_with_weights(graph: onnx.GraphProto, layer: int) -> str:
    """Return the name of the product of the attention weights of a layer and the values."""
    producers = {name: node for node in graph.node for name in node.output}
    value = inner_name(output_name(ATTENTION_WEIGHTS, layer))
    found = {value}
    while value in producers and producers[value].op_type in _RESHAPING:
        value = producers[value].input[0]
        found.add(value)
    products = []
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[0] in found:
            products.append(str(node.output[0]))
        if node.op_type in _RESHAPING and node.input[0] in found:
            found.update(node.output)
    if len(products) > 1:
        raise GraphError(
            f"no contributions: layer {layer} multiplies its attention weights by {len(products)} values, so "
            "a head has no single output"
        )
    if not products:
        raise GraphError(
            f"no contributions: layer {layer} does not multiply the attention weights that it returns by "
            "values"
        )
    return products[0]


def _gate(writer: GraphWriter, value: str, layer: int, num_heads: int, max_heads: int) -> GatedHeads:
    shape = writer.shape(value)
    is_concatenated = len(shape) == _CONCATENATED_AXES
    of_heads = shape[1:-2]  # several axes for heads in groups, which share keys and values
    if not is_concatenated and (
        shape[0] != BATCH_AXIS
        or not all(isinstance(size, int) for size in of_heads)
        or math.prod(map(int, of_heads)) != num_heads
    ):
        raise GraphError(
            f"no contributions: the product of attention weights and values of layer {layer} has the shape "
            f"{shape} instead of (batch, heads, tokens, size)"
        )
    width = int(shape[-1]) if is_concatenated else num_heads
    head_indices = np.arange(width) // (width // num_heads)
    members = writer.constant(
        (np.arange(max_heads)[:, None] == head_indices).astype(np.float32)
    )  # (max_heads, H * O) or (max_heads, H)
    axes = (1,) if is_concatenated else (len(shape) - 2, len(shape) - 1)
    of_layer = writer.add("Gather", HEAD_GATES, writer.constant(np.array(layer, dtype=np.int64)), axis=1)
    gates = writer.add("MatMul", of_layer, members)
    if len(of_heads) > 1:
        gates = writer.reshape(gates, [0, *map(int, of_heads)], (BATCH_AXIS, *of_heads))
    gates = writer.add("Unsqueeze", gates, writer.constant(axes))
    after = writer.add("Mul", value, gates, name=f"{_GATED}{layer}", shape=shape)
    return GatedHeads(value, after, members, axes)


def limit_to_sweep(model: onnx.ModelProto) -> None:
    """Apply the gates only in the backward sweep. In the forward pass, every gate is 1.

    The sum of scores and baseline is then linear in the gates of a layer, and the slopes are the
    contributions of its heads.
    """
    for node in model.graph.node:
        if node.output[0].startswith(_GATED):
            node.op_type = "Identity"
            del node.input[1:]


def add_contributions(writer: GraphWriter, gated: Sequence[GatedHeads], gradients: Sequence[str]) -> None:
    """Add the output with the contributions of heads, (B, L, H), from the gradients of the gated outputs."""
    rows = []
    for heads, gradient in zip(gated, gradients, strict=True):
        product = writer.add("Mul", gradient, heads.before, shape=writer.shape(heads.before))
        summed = writer.sum(product, heads.axes)  # (B, H * O), (B, H) or (B, G, H / G)
        if len(writer.shape(summed)) > 2:  # noqa: PLR2004 - (B, H)
            summed = writer.reshape(summed, [0, -1], (BATCH_AXIS, "heads"))
        row = writer.add("MatMul", summed, writer.add("Transpose", heads.members, perm=[1, 0]))
        rows.append(writer.add("Unsqueeze", row, writer.constant([1])))
    if len(rows) == 1:
        writer.add("Identity", rows[0], name=HEAD_CONTRIBUTIONS)
    else:
        writer.add("Concat", *rows, axis=1, name=HEAD_CONTRIBUTIONS)
