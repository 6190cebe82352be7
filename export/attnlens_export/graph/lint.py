"""What a bundle's graph may hold, as explicit lists, and a check that names every deviation.

B batch, T tokens, D width, H heads, L layers.
"""

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
    NUM_DIMENSIONS,
    contribution_inputs,
    contribution_outputs,
    input_names,
    output_axes,
    output_name,
)
from attnlens_export.graph.read import read_weight
from attnlens_export.graph.simplify import IR_VERSION
from attnlens_export.graph.trace import OPSET
from attnlens_model import Encoder, EncoderConfig

# What an encoder of the BERT kind needs. Each runs, at opset 17, in every runtime of docs/runtimes.md.
ENCODER_OPERATORS = frozenset(
    {
        *("Add", "Div", "Erf", "LayerNormalization", "MatMul", "Mul", "Relu", "Softmax", "Sub", "Tanh"),
        *("Cast", "Gather", "Reshape", "Shape", "Slice", "Transpose", "Unsqueeze"),
    }
)
# What a causal mask needs beside them.
CAUSAL_OPERATORS = frozenset({"Clip"})
# What counting the tokens that are not padding needs beside them.
PADDING_OFFSET_OPERATORS = frozenset({"CumSum"})

# RMSNorm written out: its own operator came with opset 23.
RMS_OPERATORS = frozenset({"ReduceSum", "Sqrt"})
SILU_OPERATORS = frozenset({"Sigmoid"})
# The convolution beside the first layer of DeBERTa version 2.
CONVOLUTION_OPERATORS = frozenset({"Conv"})

# The experts of a token are those with the greatest numbers.
EXPERTS_OPERATORS = frozenset({"Abs", "ArgMax", "Clip"})
# What the pooling and the sweep back need, and the transposes of lookups and of the convolution.
CONTRIBUTIONS_OPERATORS = frozenset(
    {
        *("Clip", "Concat", "Identity", "Range", "ReduceMax", "ReduceSum", "Sigmoid", "Sign", "Sqrt"),
        *("ConvTranspose", "Squeeze"),
    }
)
# The weights of layers behind the pooling, which a graph of contributions holds besides.
DENSE_PREFIX = "dense."

MAX_FP16 = float(np.finfo(np.float16).max)
_TYPES = frozenset({TensorProto.FLOAT, TensorProto.INT64})
_FLOAT_TYPES = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}

# Why an operator that is not allowed is a sign of something worse than an unusual graph.
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
        model: the graph; its weights need not be loaded.
        path: what to call it in the error.
        config: the encoder that it was made from.
        purpose: which outputs it must have.
        more_operators: what a graph in a lower precision may hold besides the operators of fp32.
        more_types: what its weights may be in besides fp32; inputs and outputs never are.
        directory: where the files of weights are that are not in `model`.
        embedding_size: the width of embeddings, which a graph of contributions has among its axes.

    Raises:
        LintError: with every finding.
    """
    findings = [
        *_version_findings(model),
        *_operator_findings(model, allowed_operators(config, purpose) | more_operators),
        *_initializer_findings(model, _TYPES | more_types),
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
    """Return the operators that a graph of this encoder may hold."""
    activations = {layer.activation for layer in config.layer_feed_forwards}
    if config.per_layer_input is not None:
        activations.add(config.per_layer_input.activation)
    needed = {
        CAUSAL_OPERATORS: config.is_causal,
        PADDING_OFFSET_OPERATORS: config.positions.scheme == "padding_offset",
        RMS_OPERATORS: config.norm.kind == "rms",
        SILU_OPERATORS: "silu" in activations,
        EXPERTS_OPERATORS: any(layer.experts is not None for layer in config.layer_feed_forwards),
        CONVOLUTION_OPERATORS: config.convolution is not None,
        CONTRIBUTIONS_OPERATORS: purpose == GraphPurpose.GRAPH_PURPOSE_CONTRIBUTIONS,
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
                "runs with several threads: use a product of matrices"
            )
        elif node.domain not in ("", "ai.onnx"):
            findings.append(f"node {node.name!r}: {node.op_type} of the foreign domain {node.domain!r}")
        elif node.op_type not in allowed:
            reason = "random numbers" if node.op_type.startswith("Random") else _REASONS.get(node.op_type)
            detail = f" ({reason})" if reason else ""
            findings.append(f"node {node.name!r}: operator {node.op_type} is not allowed{detail}")
    return findings


def _initializer_findings(model: onnx.ModelProto, allowed: frozenset[int]) -> list[str]:
    return [
        f"initializer {tensor.name!r} is {TensorProto.DataType.Name(tensor.data_type)}"
        for tensor in model.graph.initializer
        if tensor.data_type not in allowed
    ]


def _constant_findings(model: onnx.ModelProto, config: EncoderConfig, directory: Path) -> Iterator[str]:
    """Find constants that are infinite in fp16; some runtimes compute in fp16 or bf16 unless told otherwise.

    The encoder's parameters are its own affair, and so are the numbers that int8 makes of a parameter or of a
    value, which are called after it.
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
                f"constant {tensor.name!r} holds {largest:.8g} in magnitude, fp16 at most {MAX_FP16:g}: "
                "export the checkpoint again"
            )


@cache
def _parameter_names(config: EncoderConfig) -> tuple[str, ...]:
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
    """Return an axis's length where it is fixed, its name where it is not (empty: neither)."""
    return tuple(
        dimension.dim_value if dimension.HasField("dim_value") else dimension.dim_param
        for dimension in value.type.tensor_type.shape.dim
    )
