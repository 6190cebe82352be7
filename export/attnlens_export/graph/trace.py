"""Tracing an encoder: one graph with every attention map, one with the hidden states alone.

B batch, T tokens, D width, H heads, L layers.

The second graph is the first without its attention outputs and what only they need, so both hold the same
weights and one trace serves both. They are two files because a runtime computes, and many return, every
output of a graph.
"""

import copy
import gc
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import torch
from onnx import numpy_helper
from onnxscript import FLOAT, INT64
from onnxscript import opset17 as op17
from torch import nn

from attnlens_export.errors import GraphError
from attnlens_export.graph.names import (
    ATTENTION_PREFIX,
    BATCH_AXIS,
    EMBEDDED,
    LENGTH_AXIS,
    inner_name,
    input_names,
    layer_outputs,
    output_axes,
    output_names,
)
from attnlens_export.graph.simplify import Shape, simplify
from attnlens_model import Encoder, EncoderConfig

OPSET = 17
# Any example other than 1 x 1 will do that fits the table of positions; a length of 1 would be taken for a
# constant, so a table of one position is traced with two tokens, over which it broadcasts.
EXAMPLE_BATCH_SIZE = 2
EXAMPLE_LENGTHS = (2, 9)


@dataclass(frozen=True)
class TracedGraph:
    """A graph apart from its weights.

    Attributes:
        proto: the model without initializers.
        weights: the initializers by name, in the graph's order; views of the encoder's own parameters,
            or of their transposes under `<parameter>.T`.
        shapes: of the values that torch knew it of: a number for each axis, or how it depends on the inputs'.
    """

    proto: onnx.ModelProto
    weights: dict[str, npt.NDArray[np.generic]]
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    def proto_with_weights(self) -> onnx.ModelProto:
        """Return the whole model as one message, for small encoders and tests."""
        model = onnx.ModelProto()
        model.CopyFrom(self.proto)
        model.graph.initializer.extend(
            numpy_helper.from_array(array, name) for name, array in self.weights.items()
        )
        return model


class _AllOutputs(nn.Module):
    """The encoder as a function of tensors that returns a flat tuple of tensors."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        output = self.encoder(input_ids, attention_mask, token_type_ids, output_attentions=True)
        described = [self.encoder.config.layer_outputs(layer) for layer in range(len(output.layers))]
        layers = zip(output.layers, described, strict=True)
        of_layers = (layer[out.role] for layer, outs in layers for out in outs)
        return (output.last_hidden_state, *of_layers, output.embedded)


def trace(encoder: Encoder, config: EncoderConfig) -> TracedGraph:
    """Trace the encoder with dynamic batch size and length.

    Args:
        encoder: on the CPU, fp32. Its training flags are switched off during the trace and then restored: a
            dropout that is traced in training mode would stay in the graph. Likewise gradients.
        config: the encoder's configuration.

    Returns:
        The attention graph: `last_hidden_state` (B, T, D), then what each layer returns: see `output_names`.

    Raises:
        GraphError: torch can't trace the encoder, or the graph has no portable form.
    """
    names = input_names(config)
    shortest, longest = EXAMPLE_LENGTHS
    shape = (EXAMPLE_BATCH_SIZE, max(shortest, min(longest, config.positions.max_position_embeddings)))
    example = tuple(torch.ones(shape, dtype=torch.int64) for _ in names)
    axes = tuple({0: BATCH_AXIS, 1: LENGTH_AXIS} for _ in names)
    module = _AllOutputs(encoder)
    with _training_off(module), _gradients_off(module), _fewer_collections(), _quiet_exporter(), _uncached():
        try:
            program = torch.onnx.export(
                module,
                example,
                dynamo=True,
                opset_version=OPSET,
                input_names=names,
                output_names=[*output_names(config), EMBEDDED],
                dynamic_shapes=axes,
                optimize=False,
                verbose=False,
                custom_translation_table={torch.ops.aten.index.Tensor: _index_one_axis},
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise GraphError(
                f"torch.onnx can't trace the {config.family} encoder: {_root_cause(error)}"
            ) from error
    if program is None:
        raise GraphError(f"torch.onnx returned no graph for the {config.family} encoder")
    model = program.model
    _name_axes(model.graph, config)
    parameters = _restore_parameter_names(model.graph)
    shapes = simplify(model, parameters)
    # No output: it has only got its name as one.
    embedded = model.graph.outputs.pop()
    embedded.shape = embedded.type = None
    return _split_weights(model, shapes)


def _name_axes(graph: ir.Graph, config: EncoderConfig) -> None:
    """Give the length that varies its name in the outputs of layers.

    Where a mechanism pads and cuts, torch derives an expression of the length. That it always is the length,
    parity shows: another shape does not compare.
    """
    described = layer_outputs(config)
    for value in graph.outputs:
        if value.name in described and value.shape is not None:
            axes = output_axes(described[value.name][1])
            found = zip(value.shape, axes, strict=True)
            value.shape = ir.Shape([size if isinstance(size, int) else axis for size, axis in found])


def _index_one_axis(tensor: FLOAT, indices: Sequence[INT64 | None]) -> FLOAT:
    """Translate `tensor[:, :, index]`, of any type, into the lookup that it is.

    torch.onnx makes a GatherND with transposes of all indexing, which fewer runtimes have.
    """
    ((axis, index),) = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    return op17.Gather(tensor, index, axis=axis)


def _root_cause(error: BaseException) -> str:
    """Return one line of what went wrong at the bottom; the exporter wraps it in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def embeddings_graph(attentions: TracedGraph) -> TracedGraph:
    """Return the graph that computes `last_hidden_state` alone, with the same weights.

    Nodes and constants that only the other outputs need are left out: ONNX Runtime would compute them.

    Weights of attention that are not an output are not zeroed: a softmax is exactly 0 at masked keys already,
    except in rows in which every key is masked, and these are padding. It takes 1 % less time, in int8 4 %.
    """
    proto = copy.deepcopy(attentions.proto)
    dropped = {output.name for output in proto.graph.output[1:]}
    del proto.graph.output[1:]
    proto.graph.name = "embeddings"
    _drop_zeroing(proto.graph)
    # An output of a layer is now an inner value; a name without a dot says so.
    for node in proto.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name in dropped:
                    names[index] = inner_name(name)
    read = drop_unread(proto.graph)
    weights = {name: array for name, array in attentions.weights.items() if name in read}
    shapes = {
        inner_name(name) if name in dropped else name: shape for name, shape in attentions.shapes.items()
    }
    return TracedGraph(proto, weights, shapes)


def drop_unread(graph: onnx.GraphProto) -> set[str]:
    """Drop the nodes whose results nothing reads; return the names of all values that are read."""
    read = {output.name for output in graph.output}
    for node in reversed(list(graph.node)):
        if read.isdisjoint(node.output):
            graph.node.remove(node)
        else:
            read.update(node.input)
    return read


def _drop_zeroing(graph: onnx.GraphProto) -> None:
    """Drop each product of a softmax with the mask that made the weights of a layer.

    A mechanism whose weights are a softmax times something else must not end in that product: without it the
    hidden states would be others, and parity would refuse the graph.
    """
    softmaxes = {node.output[0] for node in graph.node if node.op_type == "Softmax"}
    products = [
        node
        for node in graph.node
        if node.op_type == "Mul"
        and node.output[0].startswith(ATTENTION_PREFIX)
        and node.input[0] in softmaxes
    ]
    softmax_of = {node.output[0]: node.input[0] for node in products}
    for node in products:
        graph.node.remove(node)
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = softmax_of.get(name, name)


def _restore_parameter_names(graph: ir.Graph) -> set[str]:
    """Drop the wrapper's prefix, so that an initializer has the name of the encoder's parameter."""
    names = set()
    for value in list(graph.initializers.values()):
        if value.name is not None and value.name.startswith("encoder."):
            value.name = value.name.removeprefix("encoder.")
            names.add(value.name)
    return names


def _split_weights(model: ir.Model, shapes: Mapping[str, Shape]) -> TracedGraph:
    weights = {
        name: value.const_value.numpy()
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }
    for name in weights:
        # Written by attnlens_export.graph.write, which decides where each one's bytes lie.
        del model.graph.initializers[name]
    model.graph.name = "attentions"
    model.producer_name, model.producer_version = "attnlens", None
    return TracedGraph(ir.to_proto(model), weights, shapes)


@contextmanager
def _training_off(module: nn.Module) -> Iterator[None]:
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, was_training in modes:
            child.training = was_training


@contextmanager
def _gradients_off(module: nn.Module) -> Iterator[None]:
    """Ask no parameter for gradients: torch.export follows them too, a tenth of the time of a trace."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad = True


@contextmanager
def _fewer_collections() -> Iterator[None]:
    """Collect garbage less often: going through the objects of torch is a fifth of the time of a trace."""
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def _uncached() -> Iterator[None]:
    """Disable torch's cache of fake tensors.

    Each entry rebuilds symbolic shapes, a third of the time of a trace with padded blocks.
    """
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):  # noqa: SLF001 - no public switch
        yield


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Keep torch.onnx's remarks about itself from the user's terminal."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        # "Opset 17 is older than what the exporter is written for": intended, and linted afterwards.
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # torch's own use of its own deprecated function.
            warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
            # All inputs share two axes, so each name is given more than once; the lint checks the result.
            warnings.filterwarnings("ignore", message=r"# The axis name: .* will not be used")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
