"""Embeddings or logits in int8, for CPUs: creation of the graph, and the comparison with fp32.

Texts are split into three sets. The first two calibrate and select methods (see `search`). The graph must
then pass the gate on the third set, which is stored in the bundle, so that `attnlens check` can repeat the
measurement.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from onnx import TensorProto

from attnlens.short_repr import short_repr
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
from attnlens_export.graph.names import MODEL_PATH, input_names
from attnlens_export.int8.logits import make_runners
from attnlens_export.int8.recipes import Method, Recipe, find_groups
from attnlens_export.int8.result import INT8_PATH, AccuracyGate, Gate, Int8Result, LogitsGate, to_result
from attnlens_export.int8.search import Candidate, Search
from attnlens_export.int8.texts import (
    TextRunner,
    compare_all,
    max_batch_difference,
    read_kinds,
    read_written,
    run_all,
    split_texts,
    write_texts,
)
from attnlens_export.parity.measure import Subject
from attnlens_export.parity.sessions import measure_seconds, open_session
from attnlens_export.precision import Fp32Graph, Precision, Stated
from attnlens_export.progress import Progress
from attnlens_export.published.classifier import has_head
from attnlens_model import EncoderConfig

TEXTS_PATH = "parity/int8_texts.txt"
TIMED_SHAPES = ((1, 128), (8, 64), (32, 32))
TIMED_REPETITIONS = 3
# int8 instructions compute 4 times as many products as those for fp32, with AMX 8 times. A larger ratio is a
# measurement error.
MAX_PLAUSIBLE_SPEED = 10.0
# Shares of the gate that the search may use. The rest is a reserve for other texts. If the graph fails on the
# texts for judgement, the search is repeated with the next share.
SEARCH_SHARES = (0.9, 0.75, 0.6, 0.45)

_METHODS = {
    Method.FP32: QuantizationMethod.QUANTIZATION_METHOD_FP32,
    Method.PLAIN: QuantizationMethod.QUANTIZATION_METHOD_PLAIN,
    Method.SMOOTHED: QuantizationMethod.QUANTIZATION_METHOD_SMOOTHED,
    Method.EVENED: QuantizationMethod.QUANTIZATION_METHOD_SMOOTHED,
    Method.EXACT_VALUES: QuantizationMethod.QUANTIZATION_METHOD_SMOOTHED,
    Method.EXACT_COLUMNS: QuantizationMethod.QUANTIZATION_METHOD_EXACT_COLUMNS,
}


@short_repr
@dataclass(frozen=True)
class Int8(Precision):
    """As many matrix products in int8 as the gate allows.

    Attributes:
        gate: Limits for the embeddings or logits. If None, `Gate()`, or for a classifier `LogitsGate()`.
        texts: File with one text per line, used in addition to the texts of this package. If None, only
            those.
    """

    name: ClassVar[str] = "int8"
    path: ClassVar[str] = INT8_PATH
    number: ClassVar[manifest_pb2.Precision.ValueType] = manifest_pb2.Precision.PRECISION_INT8
    operators: ClassVar[frozenset[str]] = frozenset({"QuantizeLinear", "DequantizeLinear"})
    element_types: ClassVar[frozenset[int]] = frozenset({TensorProto.INT8, TensorProto.UINT8})

    gate: AccuracyGate | None = None
    texts: Path | None = None

    def write(self, source: Fp32Graph, progress: Progress) -> Stated:
        """Search for the fastest graph that passes the gate, and write it with the texts for judgement."""
        directory, config, embeddings = source.directory, source.config, source.embeddings
        sets = {kind: split_texts(lines) for kind, lines in read_kinds(self.texts).items()}
        calibration, selection, judgement = (
            make_runners(directory, config, {kind: split[index] for kind, split in sets.items()})
            for index in range(3)
        )
        # Without special tokens, the empty text has no tokens and is omitted.
        written = {kind: runner.select_lines(sets[kind].judgement) for kind, runner in judgement.items()}
        path = directory / TEXTS_PATH
        path.parent.mkdir(exist_ok=True)
        write_texts(path, written)
        search = Search(source, calibration, selection, progress)
        gate = self.gate or (LogitsGate() if has_head(directory) else Gate())
        chosen, num_judged = self._choose(source, search, judgement, gate)
        progress("Int8 times next to fp32", "", 0, 1)
        speeds, are_reliable = _measure_speeds(directory, config)
        quantization = Quantization(
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
        return Stated(Graph(quantization=quantization), gate.to_messages())

    def _choose(
        self,
        source: Fp32Graph,
        search: Search,
        judgement: Mapping[str, TextRunner[Any]],
        gate: AccuracyGate,
    ) -> tuple[Candidate, int]:
        """Write the fastest graph that passes on the texts for judgement.

        Returns:
            The graph, and the number of graphs that were judged.

        Raises:
            AccuracyError: No graph passes on the texts for selection, or all fail on those for judgement.
        """
        directory = source.directory
        expected = run_all(judgement, open_session(directory / MODEL_PATH))
        for num_judged, share in enumerate(SEARCH_SHARES, 1):
            chosen = _fastest(search.run(gate.tightened(share)), gate)
            self.save(source, chosen.graph)
            agreement = compare_all(judgement, open_session(directory / self.path), expected)
            if gate.used_share(agreement) <= 1:
                return chosen, num_judged
        raise AccuracyError(
            f"{num_judged} graphs in int8 pass on the texts for selection, but fail on other texts. The "
            f"last graph has {agreement.describe_kinds()}; {gate.advice(agreement)}"
        )

    def measure(self, subject: Subject, stated: Stated, progress: Progress) -> Int8Result:
        """Compare the graph with fp32 on the texts in the bundle."""
        progress("Int8 against fp32", "", 0, 1)
        directory, quantization = subject.directory, stated.graph.quantization
        sizes = {kind.name: kind.num_texts for kind in quantization.text_kinds}
        runners = make_runners(directory, subject.config, read_written(directory / TEXTS_PATH, sizes))
        session = open_session(directory / self.path)
        expected = run_all(runners, open_session(directory / MODEL_PATH))
        differences = [max_batch_difference(session, runner.batches) for runner in runners.values()]
        batches = [batch for runner in runners.values() for batch in runner.batches]
        return to_result(
            (LogitsGate if has_head(directory) else Gate).from_messages(stated.gates),
            compare_all(runners, session, expected),
            quantization,
            sum(int(batch.inputs.attention_mask.sum()) for batch in batches),
            float(np.max(differences)),
        )


def _fastest(candidates: list[Candidate], gate: AccuracyGate) -> Candidate:
    """Return the fastest candidate that passes the search.

    Raises:
        AccuracyError: No candidate passes.
    """
    passed = [candidate for candidate in candidates if candidate.used_share <= 1]
    if passed:
        return min(passed, key=lambda candidate: candidate.seconds)
    limits = gate.describe()
    if not candidates:
        raise AccuracyError(f"no matrix product in int8 meets {limits}: {gate.remedy}")
    best = min(candidates, key=lambda candidate: candidate.used_share)
    raise AccuracyError(
        f"no graph in int8 meets {limits} for every kind of text with a reserve of 10 %: of "
        f"{len(candidates)} graphs, the best has {len(best.recipes)} groups of matrix products in int8 and "
        f"{best.agreement.describe_kinds()}; {gate.advice(best.agreement)}"
    )


def _count(runners: Mapping[str, TextRunner[Any]]) -> int:
    return sum(len(runner.text_indices) for runner in runners.values())


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


def _measure_speeds(directory: Path, config: EncoderConfig) -> tuple[list[QuantizedSpeed], bool]:
    """Return the latency of batches of several shapes, and whether the measurements are reliable."""
    sessions = {path: open_session(directory / path, threads=1) for path in (MODEL_PATH, INT8_PATH)}
    speeds, are_reliable = [], True
    for batch_size, length in TIMED_SHAPES:
        if length > config.max_tokens:
            continue
        ids = np.random.default_rng(0).integers(0, config.embeddings.vocab_size, (batch_size, length))
        feed = {name: np.zeros_like(ids) for name in input_names(config)}
        feed |= {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        timings = measure_seconds(sessions, feed, TIMED_REPETITIONS)
        ratio = timings.seconds[MODEL_PATH] / timings.seconds[INT8_PATH]
        are_reliable &= timings.is_reliable and ratio <= MAX_PLAUSIBLE_SPEED
        speeds.append(
            QuantizedSpeed(
                batch_size=batch_size,
                num_tokens=length,
                latency_ms=1000 * timings.seconds[INT8_PATH],
                latency_ms_fp32=1000 * timings.seconds[MODEL_PATH],
            )
        )
    return speeds, are_reliable
