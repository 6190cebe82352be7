"""Embeddings in fp16, for GPUs: conversion of the graph, comparison with PyTorch, and the result.

The choice of operations that run in fp16 follows `torch.autocast`
(https://docs.pytorch.org/docs/stable/amp.html):

- MatMul and Conv take and return fp16. Their weights and the table of token embeddings are stored in fp16.
- An operation with one computed input keeps the type of that input. Examples are a bias, a product with a
  parameter, an activation, and operations that only move numbers (Reshape, Transpose, Slice, Unsqueeze,
  Squeeze, Expand, Concat, Gather).
- All other operations are fp32: LayerNormalization, Softmax, the sums and roots of RMSNorm; sums of two
  computed values, i.e. residual connections and the masks and biases of attention scores; squares; and
  operations with an fp32 input, i.e. the product after the softmax, and rotations.
- In a graph with Tanh, products of two computed values are fp32, too. The tanh form of GELU computes a third
  power, which exceeds the range of fp16 for large inputs.

onnxruntime.transformers.float16 is not used. It decides by operator and can't distinguish a bias from a
residual sum, it clips weights to the range of fp16, and it needs the fp32 model in one message of up to 2
GiB.

ONNX Runtime has few fp16 kernels for CPUs. It casts to fp32, computes, and removes pairs of casts, so its
results say little about a GPU. The comparison therefore runs each input twice: in the graph as it is, and in
a copy that rounds the result of every fp16 operation to fp16. (Sums inside an operation are assumed to be
fp32, the default of cuBLAS.) The copy also returns the rounded values to compare them with the range of fp16.

The limits for each input: the cosine of every token vector with PyTorch's is at least `MIN_COSINE`, all
outputs are finite, and no value exceeds 65504. Padding is not compared.

Shapes: B texts in a batch, T tokens, D hidden size.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper
from tokenizers import Tokenizer

from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import GateKind, Graph
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import (
    EMBEDDINGS_PATH,
    HIDDEN_OUTPUT,
    INPUT_IDS,
    input_names,
    role_number,
)
from attnlens_export.graph.read import read_structure, read_weight
from attnlens_export.graph.simplify import MAX_FP16
from attnlens_export.graph.trace import TracedGraph
from attnlens_export.parity import sessions
from attnlens_export.parity.grid import LONG_LENGTH, Case, Inputs, make_inputs
from attnlens_export.parity.measure import NOT_FINITE, Subject, compare_output
from attnlens_export.parity.reference import (
    FloatArray,
    difference,
)
from attnlens_export.parity.stored import References
from attnlens_export.precision import Fp32Graph, Precision, Stated
from attnlens_export.progress import Progress, StageProgress, report_each
from attnlens_export.results import Comparison, Errors, Result
from attnlens_model import EncoderConfig

FP16_PATH = "onnx/model_fp16.onnx"
MIN_COSINE = 0.9999
MAX_BATCH_SIZE = 3
SMALLEST_NORMAL_FP16 = float(np.finfo(np.float16).tiny)
FP16_SUFFIX, EXACT_SUFFIX = "_fp16", "_fp32"
SENTENCES = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be ...",
    "Call me Ishmael.",
    "It was the best of times, it was the worst of times, it was the age of wisdom ...",
    "En un lugar de la Mancha, de cuyo nombre no quiero acordarme, no ha mucho tiempo que vivía un hidalgo.",
    "Habe nun, ach! Philosophie, Juristerei und Medizin durchaus studiert, mit heißem Bemühn.",
    "Four score and seven years ago, in 1776.",
)
"""The first sentences of Pride and Prejudice, Moby-Dick, A Tale of Two Cities, Don Quixote and Faust, and a
sentence with a date."""

_PRODUCTS = frozenset({"MatMul", "Conv"})
_MOVES = frozenset({"Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze", "Expand", "Gather"})
_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Erf", "Relu", "Sigmoid", "Tanh", "Concat"})

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Fp16Weights:
    """Effects of rounding the weights to fp16.

    Attributes:
        num_values: Number of values stored in fp16.
        num_zeroed: Number of values that were rounded to 0.
        num_subnormal: Number of values below 6.1e-5, which fp16 stores with fewer than 11 significant bits.
    """

    num_values: int
    num_zeroed: int
    num_subnormal: int


@dataclass(frozen=True)
class Fp16(Precision):
    """Matrix products in fp16, for GPUs."""

    name: ClassVar[str] = "fp16"
    path: ClassVar[str] = FP16_PATH
    number: ClassVar[manifest_pb2.Precision.ValueType] = manifest_pb2.Precision.PRECISION_FP16
    element_types: ClassVar[frozenset[int]] = frozenset({TensorProto.FLOAT16})

    def write(self, source: Fp32Graph, progress: Progress) -> Stated:
        """Convert and write the graph."""
        progress("Converting to fp16", "", 0, 1)
        self.save(source, to_fp16(source.embeddings))
        return Stated(Graph())

    def store_references(self, subject: Subject) -> None:
        """Run the inputs in PyTorch."""
        for _, inputs in _inputs(subject.directory, subject.config, subject.cases):
            subject.references.fp32(inputs)
            subject.references.float64(inputs)

    def measure(self, subject: Subject, _stated: Stated, progress: Progress) -> Result:
        """Compare the graph with PyTorch on short inputs and on sentences."""
        return measure_fp16(subject, partial(progress, "Parity in fp16"))


def measure_fp16(subject: Subject, progress: StageProgress) -> Result:
    """Compare `model_fp16.onnx` with PyTorch, and its weights with those of `model.onnx`.

    Args:
        subject: Bundle and reference. Only short cases with small batches are measured.
        progress: Called before each input.

    Raises:
        GraphError: A weight differs from the rounded weight of `model.onnx`.
    """
    directory = subject.directory
    weights = compare_weights(directory)
    inputs = dict(_inputs(directory, subject.config, subject.cases))
    graph, rounded = sessions.Graph(directory, FP16_PATH), RoundedGraph(directory / FP16_PATH)
    comparisons: list[Comparison] = []
    all_errors = []
    for name in report_each(inputs, progress):
        errors, found = _measure(subject.references, name, inputs[name], graph, rounded)
        all_errors.append(errors)
        comparisons += found
    progress("", len(inputs), len(inputs))
    remark = (
        f"fp16: of {weights.num_values:,} weights, {weights.num_subnormal:,} are subnormal and "
        f"{weights.num_zeroed:,} were rounded to 0"
    )
    return Result(
        title="In fp16",
        reference="PyTorch in fp32",
        inputs=f"{len(inputs)} inputs, on the CPU and with every fp16 result rounded like on a GPU",
        comparisons=tuple(comparisons),
        errors=tuple(all_errors),
        remarks=(remark,),
    )


def _measure(
    references: References,
    name: str,
    inputs: Inputs,
    graph: sessions.Graph,
    rounded: "RoundedGraph",
) -> tuple[Errors, list[Comparison]]:
    """Return the errors of the rounded copy. The minimum cosine includes the graph as it is."""
    live = inputs.attention_mask == 1
    expected = references.fp32(inputs)[HIDDEN_OUTPUT]
    exact = references.float64(inputs)[HIDDEN_OUTPUT]
    on_cpu = graph.run(inputs)[HIDDEN_OUTPUT]
    hidden, place, largest = rounded.run(inputs)
    errors = compare_output(FP16_PATH, HIDDEN_OUTPUT, HIDDEN_OUTPUT, hidden, expected, exact, live)
    # np.minimum returns NaN if either is NaN.
    min_cosine = float(np.minimum(errors.min_cosine, difference(on_cpu, expected, live).min_cosine))
    errors = replace(errors, min_cosine=min_cosine)
    kind, role = GateKind.GATE_KIND_MAX_FP16_VALUE, role_number(HIDDEN_OUTPUT)
    # An overflow is the cause of NaN and infinity, and is reported by its own figure.
    is_cause_unknown = largest <= MAX_FP16 and not (np.isfinite(on_cpu).all() and np.isfinite(hidden).all())
    return errors, [
        errors.compare_cosine(name, MIN_COSINE),
        Comparison(FP16_PATH, name, largest, MAX_FP16, kind, role, place),
        Comparison(FP16_PATH, name, float(is_cause_unknown), 0.0, what=NOT_FINITE),
    ]


def _inputs(directory: Path, config: EncoderConfig, cases: Sequence[Case]) -> Iterator[tuple[str, Inputs]]:
    for case in cases:
        if case.length <= LONG_LENGTH and case.batch_size <= MAX_BATCH_SIZE:
            yield str(case), make_inputs(case, config)
    path = directory / "tokenizer.json"
    if path.is_file():
        yield f"{len(SENTENCES)} sentences", sentence_inputs(path, config)


def sentence_inputs(tokenizer_path: Path, config: EncoderConfig) -> Inputs:
    """Return `SENTENCES` as one batch, padded on the right."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.enable_padding(pad_id=config.embeddings.pad_token_id)
    encodings = tokenizer.encode_batch(list(SENTENCES))
    types = np.array([encoding.type_ids for encoding in encodings], np.int64)
    return Inputs(
        np.array([encoding.ids for encoding in encodings], np.int64),
        np.array([encoding.attention_mask for encoding in encodings], np.int64),
        types if "token_type_ids" in input_names(config) else None,
    )


def compare_weights(directory: Path) -> Fp16Weights:
    """Compare the weights of the graph in fp16 with those in fp32.

    Raises:
        GraphError: A weight differs from the rounded weight of the graph in fp32.
    """
    path = directory / FP16_PATH
    exact = {tensor.name: tensor for tensor in read_structure(directory / EMBEDDINGS_PATH).graph.initializer}

    def pairs() -> Iterator[tuple[Array, Array]]:
        for tensor in read_structure(path).graph.initializer:
            name = tensor.name if tensor.name in exact else tensor.name.removesuffix(FP16_SUFFIX)
            if name not in exact:
                raise GraphError(f"{path}: {tensor.name} is not a weight of {EMBEDDINGS_PATH}")
            is_fp16 = tensor.data_type == TensorProto.FLOAT16
            values = read_weight(path.parent, tensor)
            original = read_weight(path.parent, exact[name])
            if not np.array_equal(values, round_weight(name, original) if is_fp16 else original):
                raise GraphError(f"{path}: {tensor.name} differs from the weight in {EMBEDDINGS_PATH}")
            if is_fp16:
                yield original, values

    return count_rounded(pairs())


def count_rounded(pairs: Iterable[tuple[Array, Array]]) -> Fp16Weights:
    """Count the effects of rounding in pairs of weights (fp32, fp16)."""
    num_values = num_zeroed = num_subnormal = 0
    for exact, rounded in pairs:
        num_values += rounded.size
        num_zeroed += int(np.count_nonzero((rounded == 0) & (exact != 0)))
        num_subnormal += int(np.count_nonzero((rounded != 0) & (np.abs(rounded) < SMALLEST_NORMAL_FP16)))
    return Fp16Weights(num_values, num_zeroed, num_subnormal)


class RoundedGraph:
    """An fp16 graph that computes in fp32 and rounds the result of every fp16 operation to fp16."""

    def __init__(self, path: Path) -> None:
        model = onnx.load(path)
        self._value_names = _describe_values(model)
        rounded_everywhere(model)
        self._session = sessions.open_session(
            model.SerializeToString(), use_arena=False, disabled_optimizers=()
        )

    def run(self, inputs: Inputs) -> tuple[FloatArray, str, float]:
        """Return hidden states (B, T, D), and the name and magnitude of the largest value in fp16.

        The magnitude is infinite or NaN if a value exceeds the range. The name is that of the first such
        value.
        """
        hidden, *values = self._session.run(None, inputs.feed())
        largest = {
            name: float(np.abs(value).max(initial=0))
            for name, value in zip(self._value_names, values, strict=True)
        }
        name = max(largest, key=lambda name: np.nan_to_num(largest[name], nan=np.inf, posinf=np.inf))
        return hidden, name, largest[name]


def _describe_values(model: onnx.ModelProto) -> list[str]:
    """Return the names of a model's fp16 values, each with the parameter it is computed with."""
    parameters = {tensor.name for tensor in model.graph.initializer if "." in tensor.name}
    of = {node.output[0]: parameters.intersection(node.input) for node in model.graph.node}
    return [" with ".join([name, *of[name]]) for name in fp16_values(model)]


def rounded_everywhere(model: onnx.ModelProto) -> list[str]:
    """Change a model so that fp16 nodes compute in fp32, and round and return their results.

    Returns:
        The names of the rounded values, which are outputs after those of the model.
    """
    values = fp16_values(model)
    in_fp16 = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT16}
    nodes = [_cast(name, f"{name}.exact", TensorProto.FLOAT) for name in sorted(in_fp16)]
    in_fp16.update(values)
    for node in model.graph.node:
        is_cast = node.op_type == "Cast"
        for index, name in enumerate(node.input):
            # A Cast from fp16 to fp32 may read the fp32 copy, which has the rounded values.
            if name in in_fp16:
                node.input[index] = f"{name}.exact"
        rounded = [name for name in node.output if name in in_fp16]
        if not is_cast:
            for index, name in enumerate(node.output):
                if name in in_fp16:
                    node.output[index] = f"{name}.unrounded"
        nodes.append(node)
        for name in rounded:
            if not is_cast:
                nodes.append(_cast(f"{name}.unrounded", name, TensorProto.FLOAT16))
            nodes.append(_cast(name, f"{name}.exact", TensorProto.FLOAT))
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, None) for name in values
    )
    return values


def _cast(source: str, result: str, data_type: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [result], to=data_type)


def fp16_values(model: onnx.ModelProto) -> list[str]:
    """Return the names of all computed fp16 values, in the order of their computation."""
    in_fp16 = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT16}
    values: list[str] = []
    for node in model.graph.node:
        is_fp16 = node.op_type != "Shape" and node.input[0] in in_fp16
        if node.op_type == "Cast":
            is_fp16 = helper.get_node_attr_value(node, "to") == TensorProto.FLOAT16
        if is_fp16:
            in_fp16.update(node.output)
            values.extend(node.output)
    return values


def to_fp16(graph: TracedGraph) -> TracedGraph:
    """Return the graph in fp16, with the same inputs and outputs.

    Raises:
        GraphError: A weight exceeds the range of fp16.
    """
    return _Conversion(graph).convert()


def round_weight(name: str, array: Array) -> npt.NDArray[np.float16]:
    """Round a weight to fp16.

    Raises:
        GraphError: A value exceeds the range of fp16.
    """
    largest = float(np.abs(array).max(initial=0.0))
    if not largest <= MAX_FP16:
        raise GraphError(
            f"{name} contains a value of magnitude {largest:.8g}, but the range of fp16 ends at "
            f"{MAX_FP16:g}: export without --precision fp16"
        )
    return array.astype(np.float16)


class _Conversion:
    """Converts the nodes in order, and records which values are fp16."""

    def __init__(self, graph: TracedGraph) -> None:
        self._source = graph
        self._fp16: set[str] = set()
        self._casts: dict[str, str] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._exact_weights: set[str] = set()
        self._fp16_weights: set[str] = set()
        self._has_tanh = any(node.op_type == "Tanh" for node in graph.proto.graph.node)

    def convert(self) -> TracedGraph:
        source = self._source
        for node in source.proto.graph.node:
            self._add(node)
        for output in source.proto.graph.output:
            self._return_exact(output.name)
        proto = onnx.ModelProto()
        proto.CopyFrom(source.proto)
        del proto.graph.node[:]
        proto.graph.node.extend(self._nodes)
        weights: dict[str, Array] = {}
        for name, array in source.weights.items():
            if name in self._fp16_weights:
                weights[self._fp16_name(name)] = round_weight(name, array)
            if name in self._exact_weights:
                weights[name] = array
        self._rename_shared(proto)
        return TracedGraph(proto, weights)

    def _add(self, node: onnx.NodeProto) -> None:
        is_fp16 = self._runs_in_fp16(node)
        converted = onnx.NodeProto()
        converted.CopyFrom(node)
        for index, name in enumerate(node.input):
            converted.input[index] = self._as_input(name, is_fp16 and self._is_number(node, index))
        self._nodes.append(converted)
        if is_fp16:
            self._fp16.update(node.output)

    def _runs_in_fp16(self, node: onnx.NodeProto) -> bool:
        if node.op_type in _PRODUCTS:
            return True
        if node.op_type in _MOVES:
            return node.input[0] in self._fp16 or (node.op_type == "Gather" and node.input[1] == INPUT_IDS)
        computed = [name for name in node.input if name not in self._source.weights]
        if node.op_type not in _ELEMENTWISE or not computed or not self._fp16.issuperset(computed):
            return False
        if len(computed) == 1 or node.op_type == "Concat":
            return True
        return node.op_type == "Mul" and len(set(computed)) > 1 and not self._has_tanh

    @staticmethod
    def _is_number(node: onnx.NodeProto, index: int) -> bool:
        """Return whether an input contains numbers rather than indices or a shape."""
        return index == 0 or node.op_type not in _MOVES

    def _as_input(self, name: str, is_fp16: bool) -> str:
        if name in self._source.weights:
            (self._fp16_weights if is_fp16 else self._exact_weights).add(name)
            # `_rename_shared` replaces the name when all readers of the weight are known.
            return f"{name}{FP16_SUFFIX}" if is_fp16 else name
        if not name or is_fp16 == (name in self._fp16):
            return name
        if name not in self._casts:
            self._casts[name] = f"{name}{FP16_SUFFIX if is_fp16 else EXACT_SUFFIX}"
            data_type = TensorProto.FLOAT16 if is_fp16 else TensorProto.FLOAT
            self._nodes.append(_cast_node(name, self._casts[name], data_type))
        return self._casts[name]

    def _return_exact(self, name: str) -> None:
        if name not in self._fp16:
            return
        inner = f"{name}{FP16_SUFFIX}"
        for node in self._nodes:
            for names in (node.input, node.output):
                for index, current in enumerate(names):
                    if current == name:
                        names[index] = inner
        self._nodes.append(_cast_node(inner, name, TensorProto.FLOAT))

    def _fp16_name(self, name: str) -> str:
        """Return the name of a weight in fp16. It has a suffix if the weight is also used in fp32."""
        return f"{name}{FP16_SUFFIX}" if name in self._exact_weights else name

    def _rename_shared(self, proto: onnx.ModelProto) -> None:
        names = {f"{name}{FP16_SUFFIX}": self._fp16_name(name) for name in self._fp16_weights}
        for node in proto.graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = names.get(name, name)


def _cast_node(source: str, result: str, data_type: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [result], name=f"cast_{result}", to=data_type)
