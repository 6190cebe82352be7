"""From the embeddings graph in fp32 to one in int8 behind a gate of accuracy, and the check of it.

texts -> search -> onnx/model_int8.onnx and the texts to verify with -> measured as it was written
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from attnlens.v1.quantization_pb2 import (
    Quantization,
    QuantizationMethod,
    QuantizedProduct,
    QuantizedSpeed,
    QuantizedTextKind,
)
from attnlens_export.errors import AccuracyError
from attnlens_export.graph.names import EMBEDDINGS_PATH, input_names
from attnlens_export.graph.trace import TracedGraph
from attnlens_export.graph.write import MAX_EMBEDDED_BYTES, Place, write_reduced
from attnlens_export.int8.agreement import Embedder, alone_error, compare, run_all
from attnlens_export.int8.products import find_groups
from attnlens_export.int8.recipes import Method, Recipe
from attnlens_export.int8.result import Gate, Int8Result
from attnlens_export.int8.search import Candidate, Search, Source
from attnlens_export.int8.sessions import measure_seconds, open_session
from attnlens_export.int8.texts import make_batches, read_kinds, read_written, split_texts, write_texts
from attnlens_export.manifest import INT8_PATH
from attnlens_export.published.pooling import read_pooling
from attnlens_export.published.side_files import read_max_tokens
from attnlens_model import EncoderConfig

TEXTS_PATH = "parity/int8_texts.txt"
TIMED_SHAPES = ((1, 128), (8, 64), (32, 32))
TIMED_REPETITIONS = 7
# The share of the gate that the search may use up: the rest is for texts of the same kinds that it never saw.
SEARCH_SHARE = 0.9

Progress = Callable[[str, int, int], None]

_METHODS = {
    Method.FP32: QuantizationMethod.QUANTIZATION_METHOD_FP32,
    Method.PLAIN: QuantizationMethod.QUANTIZATION_METHOD_PLAIN,
    Method.SMOOTHED: QuantizationMethod.QUANTIZATION_METHOD_SMOOTHED,
    Method.EVENED: QuantizationMethod.QUANTIZATION_METHOD_SMOOTHED,
    Method.EXACT_VALUES: QuantizationMethod.QUANTIZATION_METHOD_SMOOTHED,
    Method.EXACT_COLUMNS: QuantizationMethod.QUANTIZATION_METHOD_EXACT_COLUMNS,
}


@dataclass(frozen=True)
class Int8Options:
    """What may be chosen about a graph in int8.

    Attributes:
        gate: what its embeddings must keep.
        texts: a file with one text per line, a kind besides those of this package; None: only those.
        max_bytes: the largest sum of its weights.
    """

    gate: Gate = field(default_factory=Gate)
    texts: Path | None = None
    max_bytes: int = MAX_EMBEDDED_BYTES


def write_int8(
    directory: Path,
    config: EncoderConfig,
    embeddings: TracedGraph,
    places: dict[str, Place],
    options: Int8Options,
    progress: Progress,
) -> Quantization:
    """Search for the fastest graph in int8 that passes the gate, and write it.

    Args:
        directory: the bundle's directory, with `model.onnx`, tokenizer and pooling.
        config: the encoder's.
        embeddings: the graph in `model.onnx`.
        places: of its weights.
        options: the gate and the texts.
        progress: called before each step.

    Returns:
        How it was made. What it keeps is still to be measured, by `measure_int8`.

    Raises:
        SourceError: there is no tokenizer, or there are too few texts.
        AccuracyError: nothing passes the gate.
        GraphError: it would be too large for one file.
    """
    halves = {kind: split_texts(texts) for kind, texts in read_kinds(options.texts).items()}
    calibration, verification = (
        _embedders(directory, config, {kind: half[number] for kind, half in halves.items()})
        for number in (0, 1)
    )
    # A tokenizer without special tokens makes nothing of an empty text.
    written = {
        kind: [halves[kind][1][place] for place in embedder.places] for kind, embedder in verification.items()
    }
    path = directory / TEXTS_PATH
    path.parent.mkdir(exist_ok=True)
    write_texts(path, written)
    source = Source(embeddings, directory / EMBEDDINGS_PATH, places)
    search = Search(source, calibration, verification, progress)
    chosen = _fastest(search.run(options.gate.tightened(SEARCH_SHARE)), options.gate)
    write_reduced(
        directory / INT8_PATH,
        chosen.graph.proto,
        chosen.graph.weights,
        precision="int8",
        max_bytes=options.max_bytes,
    )
    progress("Int8 against fp32", 0, 1)
    return Quantization(
        num_calibration_texts=sum(len(embedder.places) for embedder in calibration.values()),
        products=[
            _describe(index, weight, chosen.recipes.get(group.source))
            for group in find_groups(embeddings)
            for index, weight in enumerate(group.weights)
        ],
        speeds=_speeds(directory, config),
        kinds=[QuantizedTextKind(name=kind, num_texts=len(texts)) for kind, texts in written.items()],
    )


def measure_int8(
    directory: Path, config: EncoderConfig, gate: Gate, kinds: Iterable[QuantizedTextKind]
) -> Int8Result:
    """Compare the graph in int8 of a bundle with the one in fp32, on the texts beside them.

    Args:
        directory: the bundle.
        config: the encoder's.
        gate: what must hold.
        kinds: of the texts, as the manifest has them.

    Raises:
        BundleError: the texts are not of these kinds.
    """
    texts = read_written(directory / TEXTS_PATH, {kind.name: kind.num_texts for kind in kinds})
    embedders = _embedders(directory, config, texts)
    session = open_session(directory / INT8_PATH)
    expected = run_all(embedders, open_session(directory / EMBEDDINGS_PATH))
    return Int8Result(
        gate,
        compare(run_all(embedders, session), expected),
        sum(len(each.embeddings) for each in expected.values()),
        sum(len(each.tokens) for each in expected.values()),
        float(np.max([alone_error(session, embedder.batches) for embedder in embedders.values()])),
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
        ids = np.random.default_rng(0).integers(0, config.vocab_size, (batch_size, length))
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
