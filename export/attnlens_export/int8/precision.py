"""int8 as a precision of a bundle, for CPUs: from the graph in fp32 to one behind a gate of accuracy.

texts -> search -> onnx/model_int8.onnx and the texts to verify with -> measured as it was written
"""

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
from attnlens_export.int8.agreement import Agreement, Embedder, compare, max_batch_difference, run_all
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
TIMED_REPETITIONS = 5
# int8 instructions do 4 times as many products as fp32 ones, with AMX 8 times. A larger ratio is an artefact.
MAX_PLAUSIBLE_SPEED = 10.0
# Shares of the gate that the search may use up; the rest is for texts that it has not seen. The next share is
# tried if the graph fails on the texts for judgement.
SEARCH_SHARES = (0.9, 0.75, 0.6, 0.45)

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
        sets = {kind: split_texts(lines) for kind, lines in read_kinds(self.texts).items()}
        calibration, selection, judgement = (
            _embedders(directory, config, {kind: split[number] for kind, split in sets.items()})
            for number in range(3)
        )
        # A tokenizer without special tokens makes nothing of an empty text.
        written = {
            kind: [sets[kind].judgement[place] for place in embedder.places]
            for kind, embedder in judgement.items()
        }
        path = directory / TEXTS_PATH
        path.parent.mkdir(exist_ok=True)
        write_texts(path, written)
        search = Search(source, calibration, selection, progress)
        chosen, num_judged = self._choose(source, search, judgement)
        progress("Int8 times beside fp32", "", 0, 1)
        speeds, are_reliable = _speeds(directory, config)
        made = Quantization(
            num_calibration_texts=_count(calibration),
            num_selection_texts=_count(selection),
            num_judged_graphs=num_judged,
            matmuls=[
                _describe(index, weight, chosen.recipes.get(group.source))
                for group in find_groups(embeddings)
                for index, weight in enumerate(group.weights)
            ],
            speeds=speeds,
            unreliable_timings=not (are_reliable and search.has_reliable_timings),
            text_kinds=[
                QuantizedTextKind(name=kind, num_texts=len(lines)) for kind, lines in written.items()
            ],
        )
        return Stated(Graph(quantization=made), self.gate.limits())

    def _choose(
        self, source: Fp32Graph, search: Search, judgement: Mapping[str, Embedder]
    ) -> tuple[Candidate, int]:
        """Save the fastest graph that passes on texts that had no part in its making.

        Returns:
            The graph, and how many were judged.

        Raises:
            AccuracyError: None passes on the texts for selection, or each one fails on those for judgement.
        """
        directory = source.directory
        expected = run_all(judgement, open_session(directory / EMBEDDINGS_PATH))
        failures: list[str] = []
        for number, share in enumerate(SEARCH_SHARES, 1):
            chosen = _fastest(search.run(self.gate.tightened(share)), self.gate)
            self.save(source, chosen.graph)
            found = compare(run_all(judgement, open_session(directory / self.path)), expected)
            if self.gate.use(found) <= 1:
                return chosen, number
            failures.append(_describe_kinds(found))
        raise AccuracyError(
            f"{len(failures)} graphs in int8 pass on the texts that selected them and fail on others. "
            f"The last has for {failures[-1]}; lower --min-mean-cosine or --min-cosine, "
            "or leave out --precision int8"
        )

    def measure(self, subject: Subject, stated: Stated, progress: Progress) -> Int8Result:
        """Compare the graph with the one in fp32 on the texts beside them, by the gate that is stated."""
        progress("Int8 against fp32", "", 0, 1)
        directory, made = subject.directory, stated.graph.quantization
        texts = read_written(directory / TEXTS_PATH, {kind.name: kind.num_texts for kind in made.text_kinds})
        embedders = _embedders(directory, subject.config, texts)
        session = open_session(directory / self.path)
        expected = run_all(embedders, open_session(directory / EMBEDDINGS_PATH))
        return Int8Result(
            Gate.from_messages(stated.gates),
            compare(run_all(embedders, session), expected),
            sum(len(each.embeddings) for each in expected.values()),
            sum(len(each.tokens) for each in expected.values()),
            float(
                np.max([max_batch_difference(session, embedder.batches) for embedder in embedders.values()])
            ),
            made,
        )


def _embedders(
    directory: Path, config: EncoderConfig, kinds: Mapping[str, Sequence[str]]
) -> dict[str, Embedder]:
    max_tokens = read_max_tokens(directory, config)
    pooling = read_pooling(directory, config.vector_size)
    tokenizer = directory / "tokenizer.json"
    return {
        kind: Embedder(
            directory, pooling, config.vector_size, make_batches(texts, tokenizer, config, max_tokens)
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
    raise AccuracyError(
        f"no graph in int8 keeps {allowed} of every kind of text, with a tenth of that in reserve: the best "
        f"of {len(candidates)} measured, with {len(best.recipes)} of its groups of products in int8, has for "
        f"{_describe_kinds(best.agreement)}; {advice}"
    )


def _describe_kinds(agreement: Agreement) -> str:
    return ", ".join(
        f"{name} {kind.mean_cosine:.6f} and {kind.min_cosine:.6f}" for name, kind in agreement.kinds.items()
    )


def _count(embedders: Mapping[str, Embedder]) -> int:
    return sum(len(embedder.places) for embedder in embedders.values())


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


def _speeds(directory: Path, config: EncoderConfig) -> tuple[list[QuantizedSpeed], bool]:
    """Return the times of some batches, and whether repetitions agreed."""
    sessions = {path: open_session(directory / path, threads=1) for path in (EMBEDDINGS_PATH, INT8_PATH)}
    speeds, are_reliable = [], True
    for batch_size, length in TIMED_SHAPES:
        if length > config.max_tokens:
            continue
        ids = np.random.default_rng(0).integers(0, config.embeddings.vocab_size, (batch_size, length))
        feed = {name: np.zeros_like(ids) for name in input_names(config)}
        feed |= {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        timings = measure_seconds(sessions, feed, TIMED_REPETITIONS)
        ratio = timings.seconds[EMBEDDINGS_PATH] / timings.seconds[INT8_PATH]
        are_reliable &= timings.is_reliable and ratio <= MAX_PLAUSIBLE_SPEED
        speeds.append(
            QuantizedSpeed(
                batch_size=batch_size,
                num_tokens=length,
                latency_ms=1000 * timings.seconds[INT8_PATH],
                latency_ms_fp32=1000 * timings.seconds[EMBEDDINGS_PATH],
            )
        )
    return speeds, are_reliable
