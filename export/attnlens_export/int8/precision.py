"""int8 as a precision of a bundle, for CPUs: from the graph in fp32 to one behind a gate of accuracy.

texts -> search -> onnx/model_int8.onnx and the texts to verify with -> measured as it was written
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from onnx import TensorProto

from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import Graph
from attnlens.v1.quantization_pb2 import (
    Quantization,
    QuantizationMethod,
    QuantizedProduct,
    QuantizedSpeed,
    QuantizedTextKind,
)
from attnlens_export.errors import AccuracyError
from attnlens_export.graph.names import EMBEDDINGS_PATH, input_names
from attnlens_export.int8.agreement import Embedder, alone_error, compare, run_all
from attnlens_export.int8.products import find_groups
from attnlens_export.int8.recipes import Method, Recipe
from attnlens_export.int8.result import INT8_PATH, Gate, Int8Result
from attnlens_export.int8.search import Candidate, Search
from attnlens_export.int8.sessions import measure_seconds, open_session
from attnlens_export.int8.texts import make_batches, read_kinds, read_written, split_texts, write_texts
from attnlens_export.parity.measure import Subject
from attnlens_export.precision import Fp32Graph, Precision, Stated
from attnlens_export.progress import Progress
from attnlens_export.published.pooling import read_pooling
from attnlens_export.published.side_files import read_max_tokens
from attnlens_model import EncoderConfig

TEXTS_PATH = "parity/int8_texts.txt"
TIMED_SHAPES = ((1, 128), (8, 64), (32, 32))
TIMED_REPETITIONS = 7
# The share of the gate that the search may use up: the rest is for texts of the same kinds that it never saw.
SEARCH_SHARE = 0.9

_METHODS = {
    Method.FP32: QuantizationMethod.QUANTIZATION_METHOD_FP32,
    Method.PLAIN: QuantizationMethod.QUANTIZATION_METHOD_PLAIN,
    Method.SMOOTHED: QuantizationMethod.QUANTIZATION_METHOD_SMOOTHED,
    Method.EVENED: QuantizationMethod.QUANTIZATION_METHOD_SMOOTHED,
    Method.EXACT_VALUES: QuantizationMethod.QUANTIZATION_METHOD_SMOOTHED,
    Method.EXACT_COLUMNS: QuantizationMethod.QUANTIZATION_METHOD_EXACT_COLUMNS,
}


@dataclass(frozen=True)
class Int8(Precision):
    """As many products of matrices in int8 as the gate lets through.

    Attributes:
        gate: what the embeddings must keep.
        texts: a file with one text per line, a kind besides those of this package; None: only those.
    """

    name: ClassVar[str] = "int8"
    path: ClassVar[str] = INT8_PATH
    number: ClassVar[manifest_pb2.Precision.ValueType] = manifest_pb2.Precision.PRECISION_INT8
    operators: ClassVar[frozenset[str]] = frozenset({"QuantizeLinear", "DequantizeLinear"})
    element_types: ClassVar[frozenset[int]] = frozenset({TensorProto.INT8, TensorProto.UINT8})

    gate: Gate = field(default_factory=Gate)
    texts: Path | None = None

    def write(self, source: Fp32Graph, progress: Progress) -> Stated:
        """Search for the fastest graph that passes; state how it was made, the gate and the texts."""
        directory, config, embeddings = source.directory, source.config, source.embeddings
        halves = {kind: split_texts(lines) for kind, lines in read_kinds(self.texts).items()}
        calibration, verification = (
            _embedders(directory, config, {kind: half[number] for kind, half in halves.items()})
            for number in (0, 1)
        )
        # A tokenizer without special tokens makes nothing of an empty text.
        written = {
            kind: [halves[kind][1][place] for place in embedder.places]
            for kind, embedder in verification.items()
        }
        path = directory / TEXTS_PATH
        path.parent.mkdir(exist_ok=True)
        write_texts(path, written)
        search = Search(source, calibration, verification, progress)
        chosen = _fastest(search.run(self.gate.tightened(SEARCH_SHARE)), self.gate)
        self.save(source, chosen.graph)
        progress("Int8 times beside fp32", "", 0, 1)
        made = Quantization(
            num_calibration_texts=sum(len(embedder.places) for embedder in calibration.values()),
            products=[
                _describe(index, weight, chosen.recipes.get(group.source))
                for group in find_groups(embeddings)
                for index, weight in enumerate(group.weights)
            ],
            speeds=_speeds(directory, config),
            kinds=[QuantizedTextKind(name=kind, num_texts=len(lines)) for kind, lines in written.items()],
        )
        return Stated(Graph(quantization=made), self.gate.limits())

    def measure(self, subject: Subject, stated: Stated, progress: Progress) -> Int8Result:
        """Compare the graph with the one in fp32 on the texts beside them, by the gate that is stated."""
        progress("Int8 against fp32", "", 0, 1)
        directory, made = subject.directory, stated.graph.quantization
        texts = read_written(directory / TEXTS_PATH, {kind.name: kind.num_texts for kind in made.kinds})
        embedders = _embedders(directory, subject.config, texts)
        session = open_session(directory / self.path)
        expected = run_all(embedders, open_session(directory / EMBEDDINGS_PATH))
        return Int8Result(
            Gate.from_messages(stated.gates),
            compare(run_all(embedders, session), expected),
            sum(len(each.embeddings) for each in expected.values()),
            sum(len(each.tokens) for each in expected.values()),
            float(np.max([alone_error(session, embedder.batches) for embedder in embedders.values()])),
            made,
        )


def _embedders(
    directory: Path, config: EncoderConfig, kinds: Mapping[str, Sequence[str]]
) -> dict[str, Embedder]:
    max_tokens = read_max_tokens(directory, config)
    pooling = read_pooling(directory, config.hidden_size)
    tokenizer = directory / "tokenizer.json"
    return {
        kind: Embedder(
            directory, pooling, config.hidden_size, make_batches(texts, tokenizer, config, max_tokens)
        )
        for kind, texts in kinds.items()
    }


def _fastest(candidates: list[Candidate], gate: Gate) -> Candidate:
    """Return the fastest that passes.

    Raises:
        AccuracyError: none does.
    """
    passed = [each for each in candidates if each.use <= 1]
    if passed:
        return min(passed, key=lambda each: each.seconds)
    allowed = f"a mean cosine of {gate.min_mean_cosine:g} and a smallest of {gate.min_cosine:g}"
    advice = "lower --min-mean-cosine or --min-cosine, or export without --precision int8"
    if not candidates:
        raise AccuracyError(f"no product of matrices can be in int8 with {allowed}: {advice}")
    best = min(candidates, key=lambda each: each.use)
    figures = ", ".join(
        f"{name} {kind.mean_cosine:.6f} and {kind.min_cosine:.6f}"
        for name, kind in best.agreement.kinds.items()
    )
    raise AccuracyError(
        f"no graph in int8 keeps {allowed} of every kind of text, with a tenth of that in reserve: the best "
        f"of {len(candidates)} measured, with {len(best.recipes)} of its groups of products in int8, has for "
        f"{figures}; {advice}"
    )


def _describe(index: int, weight: str, recipe: Recipe | None) -> QuantizedProduct:
    if recipe is None or recipe.weights[index] is None:
        return QuantizedProduct(weight=weight, method=_METHODS[Method.FP32])
    num_columns = 0 if recipe.columns is None else len(recipe.columns)
    return QuantizedProduct(
        weight=weight,
        method=_METHODS[recipe.method],
        alpha=recipe.alpha,
        num_exact_columns=num_columns,
    )


def _speeds(directory: Path, config: EncoderConfig) -> list[QuantizedSpeed]:
    sessions = {path: open_session(directory / path, threads=1) for path in (EMBEDDINGS_PATH, INT8_PATH)}
    speeds = []
    for batch_size, length in TIMED_SHAPES:
        if length > config.max_tokens:
            continue
        ids = np.random.default_rng(0).integers(0, config.embeddings.vocab_size, (batch_size, length))
        feed = {name: np.zeros_like(ids) for name in input_names(config)}
        feed |= {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        seconds = {
            path: statistics.median(each)
            for path, each in measure_seconds(sessions, feed, TIMED_REPETITIONS).items()
        }
        speeds.append(
            QuantizedSpeed(
                batch_size=batch_size,
                length=length,
                milliseconds=1000 * seconds[INT8_PATH],
                milliseconds_fp32=1000 * seconds[EMBEDDINGS_PATH],
            )
        )
    return speeds
