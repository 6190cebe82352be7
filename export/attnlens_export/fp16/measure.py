"""Is the graph in fp16 still the model? Its token vectors against PyTorch in fp32, and its range.

ONNX Runtime on a CPU has few kernels for fp16: it casts, computes in fp32, and drops casts in pairs, so that
what it returns says little of a GPU. So each input runs twice: through the file as it is, and through a copy
in which the result of every fp16 node is rounded to fp16, as a GPU stores it (sums inside a node are taken to
be fp32, as cuBLAS accumulates by default). That copy returns all those values, and the largest tells how far
the model is from fp16's end.

The gate, for each input: the cosine of every live token's vector with PyTorch's is at least `MIN_COSINE`,
nothing is NaN or infinite, no value is beyond 65504. B batch, T tokens, D width.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from tokenizers import Tokenizer

from attnlens_export.errors import GraphError
from attnlens_export.fp16.convert import (
    FP16_PATH,
    FP16_SUFFIX,
    Array,
    Fp16Weights,
    count_rounded,
    fp16_values,
    round_weight,
)
from attnlens_export.fp16.result import Fp16Measurement, Fp16Result
from attnlens_export.graph.names import EMBEDDINGS_PATH, HIDDEN_OUTPUT, input_names
from attnlens_export.graph.read import read_structure, read_weight
from attnlens_export.parity.compare import FloatArray, difference, max_abs_difference
from attnlens_export.parity.grid import LONG_LENGTH, Case, Inputs, make_inputs
from attnlens_export.parity.measure import Graph, Subject
from attnlens_export.parity.reference import run_float64, run_fp32
from attnlens_export.progress import StageProgress
from attnlens_model import Encoder, EncoderConfig

MAX_BATCH_SIZE = 3
SENTENCES = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be ...",
    "Call me Ishmael.",
    "It was the best of times, it was the worst of times, it was the age of wisdom ...",
    "En un lugar de la Mancha, de cuyo nombre no quiero acordarme, no ha mucho tiempo que vivía un hidalgo.",
    "Habe nun, ach! Philosophie, Juristerei und Medizin durchaus studiert, mit heißem Bemühn.",
    "Four score and seven years ago, in 1776.",
)
"""The beginnings of Pride and Prejudice, Moby-Dick, A Tale of Two Cities, Don Quixote and Faust; a date."""


def measure_fp16(subject: Subject, progress: StageProgress) -> Fp16Result:
    """Compare `model_fp16.onnx` with PyTorch, and its weights with those of `model.onnx`.

    Args:
        subject: the bundle and its reference; the short and small cases of its grid are taken.
        progress: called before each input.

    Raises:
        GraphError: a weight in fp16 is not the one in fp32, rounded.
    """
    directory = subject.directory
    weights = compare_weights(directory)
    inputs = dict(_inputs(directory, subject.config, subject.cases))
    graph, rounded = Graph(directory, FP16_PATH), RoundedGraph(directory / FP16_PATH)
    measurements = []
    for number, (name, tensors) in enumerate(inputs.items()):
        progress(name, number, len(inputs))
        measurements.append(_measure(subject.encoder, name, tensors, graph, rounded))
    progress("", len(inputs), len(inputs))
    return Fp16Result(tuple(measurements), weights)


def compare_weights(directory: Path) -> Fp16Weights:
    """Compare the weights of the graph in fp16 with those in fp32.

    Raises:
        GraphError: one is not the same, or not the same rounded.
    """
    path = directory / FP16_PATH
    exact = {each.name: each for each in read_structure(directory / EMBEDDINGS_PATH).graph.initializer}

    def pairs() -> Iterator[tuple[Array, Array]]:
        for tensor in read_structure(path).graph.initializer:
            name = tensor.name if tensor.name in exact else tensor.name.removesuffix(FP16_SUFFIX)
            if name not in exact:
                raise GraphError(f"{path}: {tensor.name} is no weight of {EMBEDDINGS_PATH}")
            is_fp16 = tensor.data_type == TensorProto.FLOAT16
            found = read_weight(path.parent, tensor)
            original = read_weight(path.parent, exact[name])
            if not np.array_equal(found, round_weight(name, original) if is_fp16 else original):
                raise GraphError(f"{path}: {tensor.name} is not that of {EMBEDDINGS_PATH}")
            if is_fp16:
                yield original, found

    return count_rounded(pairs())


class RoundedGraph:
    """A graph in fp16, computed in fp32 with every fp16 result rounded to fp16."""

    def __init__(self, path: Path) -> None:
        model = onnx.load(path)
        self._places = _places(model)
        rounded_everywhere(model)
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def run(self, inputs: Inputs) -> tuple[FloatArray, str, float]:
        """Return hidden states (B, T, D), and the place and magnitude of the largest value in fp16.

        The magnitude is infinite or NaN where the range was left; the place is the first such value's.
        """
        hidden, *values = self._session.run(None, inputs.feed())
        largest = {
            place: float(np.abs(value).max(initial=0))
            for place, value in zip(self._places, values, strict=True)
        }
        place = max(largest, key=lambda each: np.nan_to_num(largest[each], nan=np.inf, posinf=np.inf))
        return hidden, place, largest[place]


def _places(model: onnx.ModelProto) -> list[str]:
    """Return the names of a model's values in fp16, with the parameter that each is made with."""
    parameters = {each.name for each in model.graph.initializer if "." in each.name}
    of = {node.output[0]: parameters.intersection(node.input) for node in model.graph.node}
    return [" with ".join([name, *of[name]]) for name in fp16_values(model)]


def rounded_everywhere(model: onnx.ModelProto) -> list[str]:
    """Rewrite a model so that fp16 nodes compute in fp32, and return what they compute, rounded.

    Returns:
        The names of those values, which are the model's outputs after its own.
    """
    values = fp16_values(model)
    in_fp16 = {each.name for each in model.graph.initializer if each.data_type == TensorProto.FLOAT16}
    nodes = [_cast(name, f"{name}.exact", TensorProto.FLOAT) for name in sorted(in_fp16)]
    in_fp16.update(values)
    for node in model.graph.node:
        is_cast = node.op_type == "Cast"
        for index, name in enumerate(node.input):
            # A Cast of an fp16 value back to fp32 may read the exact copy, which was rounded already.
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


def _inputs(directory: Path, config: EncoderConfig, cases: Sequence[Case]) -> Iterator[tuple[str, Inputs]]:
    for case in cases:
        if case.length <= LONG_LENGTH and case.batch_size <= MAX_BATCH_SIZE:
            yield str(case), make_inputs(case, config)
    path = directory / "tokenizer.json"
    if path.is_file():
        yield f"{len(SENTENCES)} sentences", sentence_inputs(path, config)


def sentence_inputs(tokenizer_path: Path, config: EncoderConfig) -> Inputs:
    """Return `SENTENCES` as one batch, padded right."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.enable_padding(pad_id=config.embeddings.pad_token_id)
    encodings = tokenizer.encode_batch(list(SENTENCES))
    types = np.array([each.type_ids for each in encodings], np.int64)
    return Inputs(
        np.array([each.ids for each in encodings], np.int64),
        np.array([each.attention_mask for each in encodings], np.int64),
        types if "token_type_ids" in input_names(config) else None,
    )


def _measure(
    encoder: Encoder, name: str, inputs: Inputs, graph: Graph, rounded: RoundedGraph
) -> Fp16Measurement:
    live = inputs.attention_mask == 1
    expected = run_fp32(encoder, inputs, with_attentions=False)[HIDDEN_OUTPUT]
    exact = run_float64(encoder, inputs, lambda *_: None)
    on_cpu = graph.run(inputs)[HIDDEN_OUTPUT]
    hidden, place, largest = rounded.run(inputs)
    found = difference(hidden, expected, live)
    return Fp16Measurement(
        graph=FP16_PATH,
        inputs=name,
        length=live.shape[1],
        max_abs_error=found.max_abs,
        max_abs_error_float64=max_abs_difference(hidden[live], exact[live]),
        torch_max_abs_error_float64=max_abs_difference(expected[live], exact[live]),
        mean_abs_error=found.mean_abs,
        p99_abs_error=found.p99_abs,
        # The smaller of the two, NaN if one is.
        min_cosine=float(np.minimum(found.min_cosine, difference(on_cpu, expected, live).min_cosine)),
        num_elements=found.count,
        largest_value=largest,
        largest_place=place,
        worst_index=found.index,
        worst_values=found.values,
        finite=bool(np.isfinite(on_cpu).all() and np.isfinite(hidden).all()),
        role=HIDDEN_OUTPUT,
    )
