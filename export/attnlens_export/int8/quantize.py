"""From the embeddings graph in fp32 to one in int8 behind a gate of accuracy, and the check of it.

texts -> search -> onnx/model_int8.onnx and the texts to verify with -> measured as it was written
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from attnlens.v1.manifest_pb2 import Quantization, QuantizationMethod, QuantizedProduct, QuantizedSpeed
from attnlens_export.errors import AccuracyError
from attnlens_export.graph import TracedGraph, input_names
from attnlens_export.int8.agreement import Embedder, alone_error, compare
from attnlens_export.int8.products import find_groups
from attnlens_export.int8.recipes import Method, Recipe
from attnlens_export.int8.result import Gate, Int8Result
from attnlens_export.int8.search import Candidate, Search, Source
from attnlens_export.int8.sessions import median_seconds, open_session
from attnlens_export.int8.texts import make_batches, read_texts, split_texts
from attnlens_export.manifest import EMBEDDINGS_PATH, INT8_PATH
from attnlens_export.pooling import read_pooling
from attnlens_export.side_files import read_max_tokens
from attnlens_export.weights import MAX_EMBEDDED_BYTES, Place, write_reduced
from attnlens_model import EncoderConfig

TEXTS_PATH = "parity/int8_texts.txt"
TIMED_SHAPES = ((1, 128), (8, 64), (32, 32))
TIMED_REPETITIONS = 7

Progress = Callable[[str, int, int], None]

_METHODS = {
    Method.FP32: QuantizationMethod.QUANTIZATION_METHOD_FP32,
    Method.PLAIN: QuantizationMethod.QUANTIZATION_METHOD_PLAIN,
    Method.SMOOTHED: QuantizationMethod.QUANTIZATION_METHOD_SMOOTHED,
    Method.EXACT_COLUMNS: QuantizationMethod.QUANTIZATION_METHOD_EXACT_COLUMNS,
}


@dataclass(frozen=True)
class Int8Options:
    """What may be chosen about a graph in int8.

    Attributes:
        gate: what its embeddings must keep.
        texts: a file with one text per line, of which every other one calibrates and the others verify; None:
            the texts of this package.
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
    calibration, verification = split_texts(read_texts(options.texts))
    path = directory / TEXTS_PATH
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{text}\n" for text in verification), encoding="utf-8")
    embedders = [_embedder(directory, config, texts) for texts in (calibration, verification)]
    source = Source(embeddings, directory / EMBEDDINGS_PATH, places)
    search = Search(source, embedders[0], embedders[1], progress)
    chosen = _fastest(search.run(options.gate), options.gate)
    write_reduced(
        directory / INT8_PATH,
        chosen.graph.proto,
        chosen.graph.weights,
        precision="int8",
        max_bytes=options.max_bytes,
    )
    progress("Int8 against fp32", 0, 1)
    return Quantization(
        num_calibration_texts=len(calibration),
        products=[
            _describe(weight, chosen.recipes.get(group.source))
            for group in find_groups(embeddings)
            for weight in group.weights
        ],
        speeds=_speeds(directory, config),
    )


def measure_int8(directory: Path, config: EncoderConfig, gate: Gate) -> Int8Result:
    """Compare the graph in int8 of a bundle with the one in fp32, on the texts beside them."""
    texts = read_texts(directory / TEXTS_PATH)
    embedder = _embedder(directory, config, texts)
    session = open_session(directory / INT8_PATH)
    expected = embedder.run(open_session(directory / EMBEDDINGS_PATH))
    return Int8Result(
        gate,
        compare(embedder.run(session), expected),
        len(texts),
        len(expected.tokens),
        alone_error(session, embedder.batches),
    )


def _embedder(directory: Path, config: EncoderConfig, texts: list[str]) -> Embedder:
    max_tokens = read_max_tokens(directory, config)
    batches = make_batches(texts, directory / "tokenizer.json", config, max_tokens)
    return Embedder(directory, read_pooling(directory, config.hidden_size), batches)


def _fastest(candidates: list[Candidate], gate: Gate) -> Candidate:
    """Return the fastest that passes.

    Raises:
        AccuracyError: none does.
    """
    passed = [each for each in candidates if each.use <= 1]
    if passed:
        return min(passed, key=lambda each: each.seconds)
    allowed = f"a mean cosine of {gate.min_mean_cosine:g} and a smallest of {gate.min_cosine:g}"
    advice = (
        "lower --min-mean-cosine or --min-cosine, give texts like those that will be embedded with "
        "--calibration, or export without --precision int8"
    )
    if not candidates:
        raise AccuracyError(f"no product of matrices can be in int8 with {allowed}: {advice}")
    best = min(candidates, key=lambda each: each.use)
    raise AccuracyError(
        f"no graph in int8 keeps {allowed} on the texts: the best of {len(candidates)} measured, with "
        f"{len(best.recipes)} of its groups of products in int8, has {best.agreement.mean_cosine:.6f} and "
        f"{best.agreement.min_cosine:.6f}; {advice}"
    )


def _describe(weight: str, recipe: Recipe | None) -> QuantizedProduct:
    if recipe is None:
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
        seconds = median_seconds(sessions, feed, TIMED_REPETITIONS)
        speeds.append(
            QuantizedSpeed(
                batch_size=batch_size,
                length=length,
                milliseconds=1000 * seconds[INT8_PATH],
                milliseconds_fp32=1000 * seconds[EMBEDDINGS_PATH],
            )
        )
    return speeds
