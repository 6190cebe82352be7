"""Texts in an engine: agreement of embeddings or logits with fp32, and the difference that a batch makes.

Shapes: B texts in a batch, T tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from attnlens.openvino import LENGTH_MULTIPLE
from attnlens.v1.manifest_pb2 import GateKind, Manifest
from attnlens_export.graph.names import MODEL_PATH
from attnlens_export.int8.logits import Scorer, make_runners
from attnlens_export.int8.precision import TEXTS_PATH
from attnlens_export.int8.result import INT8_PATH, AccuracyGate, Gate, LogitsGate
from attnlens_export.int8.texts import (
    Batch,
    Embedder,
    FloatArray,
    Results,
    TextRunner,
    read_kinds,
    read_written,
    run_all,
)
from attnlens_export.parity.grid import Case, Inputs, Padding, make_inputs
from attnlens_export.parity.sessions import Feed, ProcessGraph, open_session
from attnlens_export.published.classifier import has_head
from attnlens_export.published.pooling import read_pooling
from attnlens_export.results import Comparison
from attnlens_model import EncoderConfig

# Maximum number of texts of a batch that also run alone.
NUM_ALONE = 8
# Batches of random ids for bundles without a tokenizer. Their texts have 8 different lengths.
_RANDOM_LENGTHS = (15, 31, 127)
_RANDOM_BATCH_SIZE = 8


@dataclass(frozen=True)
class Limits:
    """Limits for the embeddings or logits of texts.

    Attributes:
        gate: Limits for the agreement with fp32.
        max_batch_difference: Maximum difference between the batch and the text alone: of a component, for
            embeddings of length 1, or of a logit, relative to the spread of all logits.
    """

    gate: AccuracyGate
    max_batch_difference: float

    @classmethod
    def of_int8(cls, manifest: Manifest) -> Self:
        """Return the limits that a bundle states for its int8 graph."""
        [graph] = [graph.id for graph in manifest.graphs if graph.path == INT8_PATH]
        stated = [gate for gate in manifest.parity.gates if gate.graph == graph]
        if manifest.HasField("classifier"):
            return cls(LogitsGate.from_messages(stated), max_batch_difference=3e-2)
        return cls(Gate.from_messages(stated), max_batch_difference=1e-2)


FP32_LIMITS = Limits(Gate(0.999999, 0.999999), 1e-5)
BF16_LIMITS = Limits(Gate(0.9999, 0.9998), 1e-3)
FP32_LOGITS_LIMITS = Limits(LogitsGate(0.999, 1e-4), 1e-4)
BF16_LOGITS_LIMITS = Limits(LogitsGate(0.97, 0.1), 1e-2)


@dataclass(frozen=True)
class Texts:
    """Texts by kind, in batches like those of a server.

    Attributes:
        runners: Texts by kind.
        expected: Results of the fp32 graph in ONNX Runtime. None for random ids, which are only used to
            measure the difference that a batch makes.
    """

    runners: Mapping[str, TextRunner[Any]]
    expected: Mapping[str, Results] | None

    @classmethod
    def of_package(cls, directory: Path, config: EncoderConfig) -> Self:
        """Return all texts of this package, or random ids if the bundle has no tokenizer."""
        if not (directory / "tokenizer.json").is_file():
            lengths = sorted({min(length, config.max_tokens) for length in _RANDOM_LENGTHS})
            cases = [Case(_RANDOM_BATCH_SIZE, length, Padding.STEPS) for length in lengths]
            batches = [_random_batch(case, index, config) for index, case in enumerate(cases)]
            pooling = read_pooling(directory, config.vector_size)
            runner: TextRunner[Any] = (
                Scorer(batches, [])
                if has_head(directory)
                else Embedder(directory, pooling, config.vector_size, batches)
            )
            return cls({"random_ids": _split_batches(runner, config)}, None)
        kinds = {kind: list(dict.fromkeys(texts)) for kind, texts in read_kinds(None).items()}
        return cls._tokenized(directory, config, kinds)

    @classmethod
    def of_int8(cls, directory: Path, config: EncoderConfig, manifest: Manifest) -> Self:
        """Return the texts on which the bundle's int8 graph is measured."""
        [graph] = [graph for graph in manifest.graphs if graph.path == INT8_PATH]
        sizes = {kind.name: kind.num_texts for kind in graph.quantization.text_kinds}
        return cls._tokenized(directory, config, read_written(directory / TEXTS_PATH, sizes))

    @classmethod
    def _tokenized(cls, directory: Path, config: EncoderConfig, kinds: Mapping[str, Sequence[str]]) -> Self:
        runners = {
            kind: _split_batches(runner, config)
            for kind, runner in make_runners(directory, config, kinds).items()
        }
        return cls(runners, run_all(runners, open_session(directory / MODEL_PATH)))

    @property
    def num_texts(self) -> int:
        """Number of texts. Random ids are not counted."""
        return sum(len(results.per_text) for results in (self.expected or {}).values())


def _random_batch(case: Case, index: int, config: EncoderConfig) -> Batch:
    first = index * case.batch_size
    return Batch(make_inputs(case, config), tuple(range(first, first + case.batch_size)))


def _split_batches(runner: TextRunner[Any], config: EncoderConfig) -> TextRunner[Any]:
    return runner.with_batches([part for batch in runner.batches for part in split_by_length(batch, config)])


def split_by_length(batch: Batch, config: EncoderConfig) -> Iterator[Batch]:
    """Group the texts of a batch by their padded length, like a server, and pad them to it."""
    lengths = batch.inputs.attention_mask.sum(axis=1)  # (B,)
    rounded = -(-lengths // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    padded = np.maximum(lengths, np.minimum(rounded, config.max_tokens))
    for length in np.unique(padded):
        [rows] = np.nonzero(padded == length)
        inputs = _with_length(batch.inputs, int(length), config.embeddings.pad_token_id)
        yield Batch(_select_rows(inputs, rows), tuple(batch.text_indices[row] for row in rows))


def _with_length(inputs: Inputs, length: int, pad_token_id: int) -> Inputs:
    """Return inputs (B, length) with padding removed or added on the right."""

    def resize(array: npt.NDArray[np.int64], padding: int) -> npt.NDArray[np.int64]:
        kept = array[:, :length]
        return np.pad(kept, ((0, 0), (0, length - kept.shape[1])), constant_values=padding)

    types = inputs.token_type_ids
    return Inputs(
        resize(inputs.input_ids, pad_token_id),
        resize(inputs.attention_mask, 0),
        None if types is None else resize(types, 0),
    )


def _select_rows(inputs: Inputs, rows: npt.NDArray[np.intp]) -> Inputs:
    types = inputs.token_type_ids
    return Inputs(inputs.input_ids[rows], inputs.attention_mask[rows], None if types is None else types[rows])


class _Session:
    """Adapts a graph of an engine to `int8.texts.Session`."""

    def __init__(self, graph: ProcessGraph) -> None:
        self._graph = graph

    def run(self, names: Sequence[str], feed: Feed) -> list[FloatArray]:
        outputs = self._graph.run_feed(feed)
        return [outputs[name] for name in names]


def measure_texts(
    concurrent: ProcessGraph, single: ProcessGraph, texts: Texts, limits: Limits
) -> list[Comparison]:
    """Run a graph on all texts in batches, and on some of them alone.

    Args:
        concurrent: Graph as a server opens it for concurrent batches. Runs the batches.
        single: The same graph as a server opens it for a single batch. Runs the texts alone.
        texts: Texts and their results in fp32.
        limits: Limits of the figures.

    Raises:
        RuntimeFailureError: The engine does not respond.
    """
    path = concurrent.path
    results = run_all(texts.runners, _Session(concurrent))
    runner = next(iter(texts.runners.values()))
    comparisons: list[Comparison] = []
    if texts.expected is not None:
        comparisons += limits.gate.compare(runner.compare(results, texts.expected), path)
    session = _Session(single)
    difference = float(
        np.max([_max_batch_difference(session, texts.runners[kind], results[kind]) for kind in results])
    ) / runner.unit((texts.expected or results).values())
    kind, limit = GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE, limits.max_batch_difference
    inputs = f"up to {NUM_ALONE} texts of each batch"
    return [*comparisons, Comparison(path, inputs, difference, limit, kind, limits.gate.role)]


def _max_batch_difference(session: _Session, runner: TextRunner[Any], in_batches: Results) -> float:
    """Return the maximum difference of an embedding component or logit between the batch and the text alone.

    Only some texts of each batch run alone.
    """
    alone = [
        Batch(_select_rows(batch.inputs, np.array([row])), (batch.text_indices[row],))
        for batch in runner.batches
        for row in _spread(len(batch.text_indices))
    ]
    if not alone:
        return 0.0
    text_indices = runner.text_indices
    rows = [text_indices.index(index) for index in sorted(batch.text_indices[0] for batch in alone)]
    results = runner.with_batches(alone).run(session)
    return float(np.abs(results.per_text - in_batches.per_text[rows]).max())


def _spread(size: int) -> list[int]:
    """Return up to `NUM_ALONE` evenly spaced rows of a batch. Empty for a batch of one text."""
    rows = np.linspace(0, size - 1, min(size, NUM_ALONE)).round().astype(int)
    return [int(row) for row in rows] if size > 1 else []
