"""Graph lint: allowed operators, data types, constants, inputs and outputs of the graphs in a bundle."""

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto

from attnlens.v1.manifest_pb2 import GraphPurpose
from attnlens_export.errors import LintError
from attnlens_export.graph.names import (
    BATCH_AXIS,
    HIDDEN_OUTPUT,
    LENGTH_AXIS,
    LOGITS_OUTPUT,
    NUM_DIMENSIONS,
    contribution_inputs,
    contribution_outputs,
    input_names,
    output_axes,
    output_name,
)
from attnlens_export.graph.read import read_weight
from attnlens_export.graph.simplify import IR_VERSION, MAX_FP16
from attnlens_export.graph.trace import OPSET
from attnlens_model import MODULE_PREFIX, Encoder, EncoderConfig

# Operators of BERT-like encoders. At opset 17, every runtime in docs/runtimes.md supports all of them.
ENCODER_OPERATORS = frozenset(
    {
        *("Add", "Div", "Erf", "LayerNormalization", "MatMul", "Mul", "Relu", "Softmax", "Sub", "Tanh"),
        *("Cast", "Gather", "Reshape", "Shape", "Slice", "Transpose", "Unsqueeze"),
    }
)
# Additional operators of a causal mask.
CAUSAL_OPERATORS = frozenset({"Clip"})
# Additional operators of positions that count only tokens that are not padding.
PADDING_OFFSET_OPERATORS = frozenset({"CumSum"})

# RMSNorm in basic operators, because RMSNormalization requires opset 23.
RMS_OPERATORS = frozenset({"ReduceSum", "Sqrt"})
SILU_OPERATORS = frozenset({"Sigmoid"})
# Convolution of DeBERTa version 2, parallel to the first layer.
CONVOLUTION_OPERATORS = frozenset({"Conv"})

# Selection of the experts with the largest router scores.
EXPERTS_OPERATORS = frozenset({"Abs", "ArgMax", "Clip"})
# Pooling, the backward sweep, and the transposes of lookups and of the convolution.
CONTRIBUTIONS_OPERATORS = frozenset(
    {
        *("Clip", "Concat", "Identity", "Range", "ReduceMax", "ReduceSum", "Sigmoid", "Sign", "Sqrt"),
        *("ConvTranspose", "Squeeze"),
    }
)
# Pooling of a head: the first or last token, or the mean.
LOGITS_OPERATORS = frozenset({"CumSum", "Identity", "ReduceSum", "Sigmoid"})
# Weights of the dense layers after pooling, which only the logits and contributions graphs contain.
DENSE_PREFIX = "dense."

_TYPES = frozenset({TensorProto.FLOAT, TensorProto.INT64})
_FLOAT_TYPES = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}

# Probable cause of operators that are not allowed.
_REASONS = {
    "Dropout": "the encoder was traced in training mode",
    "If": "control flow",
    "Loop": "control flow",
    "Scan": "control flow",
    "SequenceMap": "control flow",
}

# ONNX Runtime's ScatterND on the CPU updates elements from several threads without protection: with duplicate
# indices, updates are lost, and results vary from run to run (seen in 1.31).
_RACING = frozenset({"ScatterND"})

Interface = dict[str, tuple[int, tuple[int | str, ...]]]


def check_graph(
    model: onnx.ModelProto,
    path: str,
    config: EncoderConfig,
    purpose: GraphPurpose.ValueType,
    *,
    more_operators: frozenset[str] = frozenset(),
    more_types: frozenset[int] = frozenset(),
    directory: Path = Path(),
    embedding_size: int = 0,
) -> None:
    """Check operators, versions, constants and the shapes of inputs and outputs.

    Args:
        model: Graph. External weights do not have to be loaded.
        path: Name of the graph in errors.
        config: Configuration of the exported encoder.
        purpose: Purpose of the graph, which determines its inputs and outputs.
        more_operators: Additional operators of a graph in a lower precision.
        more_types: Additional data types of weights. Inputs and outputs never have these types.
        directory: Directory of external weight files.
        embedding_size: Number of components of an embedding, or of logits. Only needed for graphs of
            contributions or logits.

    Raises:
        LintError: The graph violates a rule. The error lists all violations.
    """
    findings = [
        *_version_findings(model),
        *_operator_findings(model, allowed_operators(config, purpose) | more_operators),
        *_initializer_findings(model, _allowed_types(config) | more_types),
        *_constant_findings(model, config, directory),
        *_reshape_findings(model),
        *_interface_findings("input", model.graph.input, _expected_inputs(config, purpose, embedding_size)),
        *_interface_findings(
            "output", model.graph.output, _expected_outputs(config, purpose, embedding_size)
        ),
    ]
    if findings:
        raise LintError(path, findings)


def _version_findings(model: onnx.ModelProto) -> list[str]:
    findings = []
    if model.ir_version != IR_VERSION:
        findings.append(f"IR version {model.ir_version} instead of {IR_VERSION}")
    imports = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    if imports != {"ai.onnx": OPSET}:
        findings.append(f"operator sets {imports} instead of ai.onnx {OPSET} alone")
    if model.functions:
        names = ", ".join(function.name for function in model.functions)
        findings.append(f"local functions: {names}")
    return findings


def allowed_operators(
    config: EncoderConfig, purpose: GraphPurpose.ValueType = GraphPurpose.GRAPH_PURPOSE_EMBEDDINGS
) -> frozenset[str]:
    """Return the operators that are allowed in a graph of this encoder."""
    activations = {layer.activation for layer in config.layer_feed_forwards}
    needed = {
        CAUSAL_OPERATORS: config.is_causal,
        PADDING_OFFSET_OPERATORS: config.positions.scheme == "padding_offset",
        RMS_OPERATORS: config.norm.kind == "rms",
        SILU_OPERATORS: "silu" in activations,
        EXPERTS_OPERATORS: any(layer.experts is not None for layer in config.layer_feed_forwards),
        CONVOLUTION_OPERATORS: config.convolution is not None,
        CONTRIBUTIONS_OPERATORS: purpose == GraphPurpose.GRAPH_PURPOSE_CONTRIBUTIONS,
        LOGITS_OPERATORS: purpose == GraphPurpose.GRAPH_PURPOSE_LOGITS,
    }
    attention = (layer.operators for layer in config.layer_attentions)
    chosen = (operators for operators, is_needed in needed.items() if is_needed)
    return ENCODER_OPERATORS.union(*chosen, *attention)


def _operator_findings(model: onnx.ModelProto, allowed: frozenset[str]) -> list[str]:
    findings = []
    for node in model.graph.node:
        reduction = next((each.s.decode() for each in node.attribute if each.name == "reduction"), "none")
        if node.op_type in _RACING and reduction != "none":
            findings.append(
                f"node {node.name!r}: {node.op_type} with the reduction {reduction!r} loses updates when it "
                "runs with several threads: use a matrix product"
            )
        elif node.domain not in ("", "ai.onnx"):
            findings.append(f"node {node.name!r}: {node.op_type} of the foreign domain {node.domain!r}")
        elif node.op_type not in allowed:
            reason = "random numbers" if node.op_type.startswith("Random") else _REASONS.get(node.op_type)
            detail = f" ({reason})" if reason else ""
            findings.append(f"node {node.name!r}: operator {node.op_type} is not allowed{detail}")
    return findings


def _allowed_types(config: EncoderConfig) -> frozenset[int]:
    """Return data types of initializers. Modules of users may contain constant masks."""
    return _TYPES | {TensorProto.BOOL} if config.has_own_module else _TYPES


def _initializer_findings(model: onnx.ModelProto, allowed: frozenset[int]) -> list[str]:
    return [
        f"initializer {tensor.name!r} is {TensorProto.DataType.Name(tensor.data_type)}"
        for tensor in model.graph.initializer
        if tensor.data_type not in allowed
    ]


def _constant_findings(model: onnx.ModelProto, config: EncoderConfig, directory: Path) -> Iterator[str]:
    """Find constants beyond the fp16 range, because some runtimes compute in fp16 or bf16 by default.

    Parameters are exempt, and so are int8 scales and zero points, whose names start with the name of a
    parameter or a value.
    """
    known = (
        DENSE_PREFIX,
        *_parameter_names(config),
        *(f"{name}_" for node in model.graph.node for name in node.output),
    )
    for tensor in model.graph.initializer:
        if tensor.data_type not in _FLOAT_TYPES or tensor.name.startswith(known):
            continue
        largest = float(np.abs(read_weight(directory, tensor)).max(initial=0.0))
        if not largest <= MAX_FP16:
            yield (
                f"constant {tensor.name!r} has the magnitude {largest:.8g}, but the fp16 limit is "
                f"{MAX_FP16:g}: export the checkpoint again"
            )


@cache
def _parameter_names(config: EncoderConfig) -> tuple[str, ...]:
    if config.has_own_module:
        return (MODULE_PREFIX,)
    with torch.device("meta"):
        return tuple(Encoder(config).state_dict())


def _reshape_findings(model: onnx.ModelProto) -> list[str]:
    initializers = {tensor.name for tensor in model.graph.initializer}
    findings = []
    for node in model.graph.node:
        if node.op_type != "Reshape":
            continue
        if any(attribute.name == "allowzero" for attribute in node.attribute):
            findings.append(f"node {node.name!r}: Reshape with the attribute allowzero")
        if node.input[1] not in initializers:
            findings.append(f"node {node.name!r}: the target of the Reshape is not a constant")
    return findings


def _expected_inputs(
    config: EncoderConfig, purpose: GraphPurpose.ValueType, embedding_size: int
) -> Interface:
    if purpose == GraphPurpose.GRAPH_PURPOSE_CONTRIBUTIONS:
        whole = {*input_names(config), NUM_DIMENSIONS}
        return {
            name: (TensorProto.INT64 if name in whole else TensorProto.FLOAT, axes)
            for name, axes in contribution_inputs(config, embedding_size).items()
        }
    return dict.fromkeys(input_names(config), (TensorProto.INT64, (BATCH_AXIS, LENGTH_AXIS)))


def _expected_outputs(
    config: EncoderConfig, purpose: GraphPurpose.ValueType, embedding_size: int
) -> Interface:
    if purpose == GraphPurpose.GRAPH_PURPOSE_CONTRIBUTIONS:
        outputs = contribution_outputs(config, embedding_size)
        return {name: (TensorProto.FLOAT, axes) for name, axes in outputs.items()}
    if purpose == GraphPurpose.GRAPH_PURPOSE_LOGITS:
        return {LOGITS_OUTPUT: (TensorProto.FLOAT, (BATCH_AXIS, embedding_size))}
    hidden: Interface = {HIDDEN_OUTPUT: (TensorProto.FLOAT, (BATCH_AXIS, LENGTH_AXIS, config.vector_size))}
    if purpose == GraphPurpose.GRAPH_PURPOSE_EMBEDDINGS:
        return hidden
    layers: Interface = {
        output_name(output.role, layer): (TensorProto.FLOAT, output_axes(output))
        for layer in range(config.num_layers)
        for output in config.layer_outputs(layer)
    }
    return hidden | layers


def _interface_findings(role: str, values: Iterable[onnx.ValueInfoProto], expected: Interface) -> list[str]:
    names = [value.name for value in values]
    if names != list(expected):
        return [f"{role}s {names} instead of {list(expected)}"]
    findings = []
    for value in values:
        data_type, axes = expected[value.name]
        tensor = value.type.tensor_type
        found = axes_of(value)
        if tensor.elem_type != data_type:
            type_names = TensorProto.DataType.Name(tensor.elem_type), TensorProto.DataType.Name(data_type)
            findings.append(f"{role} {value.name!r} is {type_names[0]} instead of {type_names[1]}")
        if found != axes:
            findings.append(f"{role} {value.name!r} has axes {found} instead of {axes}")
    return findings


def axes_of(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    """Return the length of each fixed axis and the name of each dynamic axis ("" if it has neither)."""
    return tuple(
        dimension.dim_value if dimension.HasField("dim_value") else dimension.dim_param
        for dimension in value.type.tensor_type.shape.dim
    )
