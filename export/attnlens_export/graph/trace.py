"""Tracing of an encoder into two graphs: one with all attention maps, one with only the hidden states.

B batch, T tokens, D hidden size.

The second graph is the first without the attention outputs and the nodes that only they need. One trace is
sufficient for both, and they share all weights. Separate files are needed because runtimes compute all
outputs of a graph.
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
from attnlens_export.graph.simplify import CONSTANT_PREFIX, MAX_FP16, Shape, simplify
from attnlens_model import Encoder, EncoderConfig, ModuleEncoder

OPSET = 17
# Any batch and length above 1 that fits the position embeddings. torch.export treats a length of 1 as
# constant, so an encoder with one position is traced with two tokens, to which its position embedding is
# broadcast.
EXAMPLE_BATCH_SIZE = 2
EXAMPLE_LENGTHS = (2, 9)


@dataclass(frozen=True)
class TracedGraph:
    """Graph and its weights.

    Attributes:
        proto: Model without initializers.
        weights: Initializers by name, in the order of the graph: views of the parameters of the encoder, or
            of their transposes, named `<parameter>.T`.
        shapes: Known shapes of values by name.
    """

    proto: onnx.ModelProto
    weights: dict[str, npt.NDArray[np.generic]]
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    def proto_with_weights(self) -> onnx.ModelProto:
        """Return the model with its weights as one message. Only for small encoders."""
        model = onnx.ModelProto()
        model.CopyFrom(self.proto)
        model.graph.initializer.extend(
            numpy_helper.from_array(array, name) for name, array in self.weights.items()
        )
        return model


class _AllOutputs(nn.Module):
    """Wrapper that returns all outputs of the encoder as a flat tuple of tensors."""

    def __init__(self, encoder: Encoder | ModuleEncoder) -> None:
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


def trace(encoder: Encoder | ModuleEncoder, config: EncoderConfig) -> TracedGraph:
    """Trace the encoder with dynamic batch size and length.

    Args:
        encoder: Encoder in fp32 on the CPU. Training mode and gradients are disabled during the trace, then
            restored. In training mode, the graph would contain dropout.
        config: Configuration of the encoder.

    Returns:
        Attention graph with the outputs `last_hidden_state` (B, T, D) and those of each layer (see
        `output_names`).

    Raises:
        GraphError: torch cannot trace the encoder, or the graph has no portable form.
    """
    names = input_names(config)
    subject = "module" if config.has_own_module else f"{config.family} encoder"
    shortest, longest = EXAMPLE_LENGTHS
    shape = (EXAMPLE_BATCH_SIZE, max(shortest, min(longest, config.positions.max_position_embeddings)))
    example = tuple(torch.ones(shape, dtype=torch.int64) for _ in names)
    # Modules that cut a table to the length compute the minimum of both, unless the length has a limit.
    length = (
        torch.export.Dim(LENGTH_AXIS, max=config.max_tokens) if config.is_published_module else LENGTH_AXIS
    )
    axes = tuple({0: BATCH_AXIS, 1: length} for _ in names)
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
            raise GraphError(f"torch.onnx cannot trace the {subject}: {_root_cause(error)}") from error
    if program is None:
        raise GraphError(f"torch.onnx returned no graph for the {subject}")
    model = program.model
    _name_axes(model.graph, config)
    parameters = _restore_parameter_names(model.graph)
    stored = list(model.graph.initializers.values())
    shapes = simplify(model, parameters)
    # It was an output only to get its name.
    embedded = model.graph.outputs.pop()
    embedded.shape = embedded.type = None
    traced = _split_weights(model, shapes)
    for value in stored:
        value.const_value = None  # simplify replaces some of them
    if config.has_own_module:
        _limit_constants(traced.weights)
    return traced


def _name_axes(graph: ir.Graph, config: EncoderConfig) -> None:
    """Replace expressions in the shapes of layer outputs by the names of axes.

    If a mechanism pads and cuts, torch derives an expression of the length. Parity would fail if its value
    were not the length.
    """
    described = layer_outputs(config)
    for value in graph.outputs:
        if value.name in described and value.shape is not None:
            axes = output_axes(described[value.name][1])
            found = zip(value.shape, axes, strict=True)
            value.shape = ir.Shape([size if isinstance(size, int) else axis for size, axis in found])


def _index_one_axis(tensor: FLOAT, indices: Sequence[INT64 | None]) -> FLOAT:
    """Translate `tensor[:, :, index]` into Gather.

    torch.onnx translates it into GatherND and transposes, and fewer runtimes support GatherND.
    """
    found = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(found) != 1:
        raise GraphError(f"it looks up elements by {len(found)} indices at once")
    ((axis, index),) = found
    return op17.Gather(tensor, index, axis=axis)


def _root_cause(error: BaseException) -> str:
    """Return the innermost cause in one line. The exporter adds pages of advice to it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def embeddings_graph(attentions: TracedGraph) -> TracedGraph:
    """Return a graph that computes only `last_hidden_state`, with the same weights.

    Nodes and constants that only the other outputs need are removed, because ONNX Runtime would compute them.

    Attention weights that are not an output are not multiplied by the mask: a softmax is exactly 0 at masked
    keys, except in rows where all keys are masked, and these are padding. This saves 1 % of the time, and 4 %
    in int8.
    """
    proto = copy.deepcopy(attentions.proto)
    dropped = {output.name for output in proto.graph.output[1:]}
    del proto.graph.output[1:]
    proto.graph.name = "embeddings"
    _drop_zeroing(proto.graph)
    # Outputs of layers are inner values now.
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
    """Remove nodes with unused results. Return the names of all values that are read."""
    read = {output.name for output in graph.output}
    for node in reversed(list(graph.node)):
        if read.isdisjoint(node.output):
            graph.node.remove(node)
        else:
            read.update(node.input)
    return read


def _drop_zeroing(graph: onnx.GraphProto) -> None:
    """Remove the products of a softmax and the mask, whose results are attention weights.

    A mechanism whose attention weights are the product of a softmax and something else must not end in this
    product: removing it would change the hidden states, and parity would fail.
    """
    softmaxes = {node.output[0] for node in graph.node if node.op_type == "Softmax"}
    products = [
        node
        for node in graph.node
        if node.op_type == "Mul"
        and node.output[0].startswith(ATTENTION_PREFIX)
        and node.input[0] in softmaxes
    ]
    read = {name for node in graph.node for name in node.input}
    renamed = {}
    for node in products:
        graph.node.remove(node)
        if node.output[0] in read:
            renamed[node.output[0]] = node.input[0]
        else:  # a layer that multiplies its values by the softmax itself: it gets the name of the weights
            renamed[node.input[0]] = node.output[0]
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = renamed.get(name, name)


def _restore_parameter_names(graph: ir.Graph) -> set[str]:
    """Remove the prefix of the wrapper from the names of parameters, and return the names."""
    names = set()
    for value in list(graph.initializers.values()):
        if value.name is not None and value.name.startswith("encoder."):
            value.name = value.name.removeprefix("encoder.")
            names.add(value.name)
    return names


def _limit_constants(weights: dict[str, npt.NDArray[np.generic]]) -> None:
    """Limit constants to the fp16 range.

    Users mask scores with -inf or the smallest fp32 number. The softmax is also 0 at the smallest fp16
    number.
    """
    for name, array in weights.items():
        if name.startswith(CONSTANT_PREFIX) and array.dtype == np.float32:
            weights[name] = array.clip(-MAX_FP16, MAX_FP16)


def _split_weights(model: ir.Model, shapes: Mapping[str, Shape]) -> TracedGraph:
    weights = {
        name: value.const_value.numpy()
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }
    for name in weights:
        # Written by attnlens_export.graph.write. Without the value, since torch keeps the graph.
        model.graph.initializers.pop(name).const_value = None
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
    """Disable gradients of parameters, which take a tenth of the time of a trace."""
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
    """Collect garbage less often. It would take a fifth of the time of a trace."""
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def _uncached() -> Iterator[None]:
    """Disable the fake tensor cache of torch.

    Each entry rebuilds symbolic shapes, which takes a third of the time of a trace with padded blocks.
    """
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):  # noqa: SLF001 - no public switch
        yield


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Suppress messages of torch.onnx that do not concern the user."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        # "Opset 17 is older than ...": intended, and checked by the lint.
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # torch calls a deprecated function of its own.
            warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
            # All inputs share two axes, so each axis name is set several times. The lint checks the result.
            warnings.filterwarnings("ignore", message=r"# The axis name: .* will not be used")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
