"""Real texts in an engine: how near the embeddings are to those in fp32, and what a batch changes.

N texts of a kind, B of a batch, T tokens, E components of an embedding.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from attnlens.openvino_settings import LENGTH_MULTIPLE
from attnlens.v1.manifest_pb2 import Gate, GateKind, Manifest, OutputRole
from attnlens_export.engines.result import Part, broken
from attnlens_export.graph.names import EMBEDDINGS_PATH, HIDDEN_OUTPUT, graph_id
from attnlens_export.int8 import result as int8
from attnlens_export.int8.agreement import Embedder, Vectors, compare, run_all
from attnlens_export.int8.precision import TEXTS_PATH
from attnlens_export.int8.products import FloatArray
from attnlens_export.int8.sessions import Feed, open_session
from attnlens_export.int8.texts import Batch, make_batches, read_kinds, read_written
from attnlens_export.parity.grid import Case, Inputs, Padding, make_inputs
from attnlens_export.published.pooling import read_pooling
from attnlens_export.published.side_files import read_max_tokens
from attnlens_export.runtimes.graph import ProcessGraph
from attnlens_model import EncoderConfig

# How many texts of a batch are run alone.
NUM_ALONE = 8
# Random ids, where there is no tokenizer: 8 texts of as many lengths.
_RANDOM_LENGTHS = (15, 31, 127)
_RANDOM_BATCH_SIZE = 8


@dataclass(frozen=True)
class Limits:
    """What the embeddings of texts must keep.

    Attributes:
        mean_cosine: the least mean over the texts of a kind of the cosines with the embeddings in fp32.
        min_cosine: the least of any text.
        max_batch_difference: the largest difference of a component, of embeddings of length 1, between a text
            alone and in a batch.
    """

    mean_cosine: float
    min_cosine: float
    max_batch_difference: float

    @classmethod
    def of_int8(cls, manifest: Manifest) -> Self:
        """Return those that the bundle states of its graph in int8."""
        stated = [gate for gate in manifest.parity.gates if gate.graph == int8.GRAPH_ID]
        gate = int8.Gate.from_messages(stated)
        return cls(gate.min_mean_cosine, gate.min_cosine, max_batch_difference=1e-2)


FP32_LIMITS = Limits(0.999999, 0.999999, 1e-5)
BF16_LIMITS = Limits(0.9999, 0.9998, 1e-3)


@dataclass(frozen=True)
class Texts:
    """Texts by kind, in batches as a server makes them.

    Attributes:
        embedders: by kind.
        expected: their vectors by the graph in fp32 in ONNX Runtime; none for random ids, which only show
            what a batch changes.
    """

    embedders: Mapping[str, Embedder]
    expected: Mapping[str, Vectors] | None

    @classmethod
    def of_package(cls, directory: Path, config: EncoderConfig) -> Self:
        """Return all texts of this package; without a tokenizer random ids."""
        if not (directory / "tokenizer.json").is_file():
            lengths = sorted({min(length, config.max_tokens) for length in _RANDOM_LENGTHS})
            cases = [Case(_RANDOM_BATCH_SIZE, length, Padding.STEPS) for length in lengths]
            batches = [_random_batch(case, number, config) for number, case in enumerate(cases)]
            return cls({"random_ids": _embedder(directory, config, batches)}, None)
        kinds = {kind: list(dict.fromkeys(texts)) for kind, texts in read_kinds(None).items()}
        return cls._tokenized(directory, config, kinds)

    @classmethod
    def of_int8(cls, directory: Path, config: EncoderConfig, manifest: Manifest) -> Self:
        """Return those that the bundle's graph in int8 is verified with."""
        [graph] = [graph for graph in manifest.graphs if graph.path == int8.INT8_PATH]
        sizes = {kind.name: kind.num_texts for kind in graph.quantization.text_kinds}
        return cls._tokenized(directory, config, read_written(directory / TEXTS_PATH, sizes))

    @classmethod
    def _tokenized(cls, directory: Path, config: EncoderConfig, kinds: Mapping[str, Sequence[str]]) -> Self:
        max_tokens, tokenizer = read_max_tokens(directory, config), directory / "tokenizer.json"
        embedders = {
            kind: _embedder(directory, config, make_batches(texts, tokenizer, config, max_tokens))
            for kind, texts in kinds.items()
        }
        return cls(embedders, run_all(embedders, open_session(directory / EMBEDDINGS_PATH)))

    @property
    def num_texts(self) -> int:
        """How many real texts there are."""
        return sum(len(vectors.embeddings) for vectors in (self.expected or {}).values())


def _random_batch(case: Case, number: int, config: EncoderConfig) -> Batch:
    first = number * case.batch_size
    return Batch(make_inputs(case, config), tuple(range(first, first + case.batch_size)))


def _embedder(directory: Path, config: EncoderConfig, batches: Sequence[Batch]) -> Embedder:
    pooling = read_pooling(directory, config.vector_size)
    parts = [part for batch in batches for part in split_by_length(batch, config)]
    return Embedder(directory, pooling, config.vector_size, parts)


def split_by_length(batch: Batch, config: EncoderConfig) -> Iterator[Batch]:
    """Yield the texts of a batch by their padded length, padded to it, as a server runs them."""
    lengths = batch.inputs.attention_mask.sum(axis=1)  # (B,)
    rounded = -(-lengths // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    padded = np.maximum(lengths, np.minimum(rounded, config.max_tokens))
    for length in np.unique(padded):
        [rows] = np.nonzero(padded == length)
        inputs = _with_length(batch.inputs, int(length), config.embeddings.pad_token_id)
        yield Batch(_rows(inputs, rows), tuple(batch.places[row] for row in rows))


def _with_length(inputs: Inputs, length: int, pad_token_id: int) -> Inputs:
    """Return inputs (B, length): padding on the right is cut off or added."""

    def changed(array: npt.NDArray[np.int64], padding: int) -> npt.NDArray[np.int64]:
        kept = array[:, :length]
        return np.pad(kept, ((0, 0), (0, length - kept.shape[1])), constant_values=padding)

    types = inputs.token_type_ids
    return Inputs(
        changed(inputs.input_ids, pad_token_id),
        changed(inputs.attention_mask, 0),
        None if types is None else changed(types, 0),
    )


def _rows(inputs: Inputs, rows: npt.NDArray[np.intp]) -> Inputs:
    types = inputs.token_type_ids
    return Inputs(inputs.input_ids[rows], inputs.attention_mask[rows], None if types is None else types[rows])


class _Session:
    """A graph of an engine as `Embedder` runs one."""

    def __init__(self, graph: ProcessGraph) -> None:
        self._graph = graph

    def run(self, _names: Sequence[str], feed: Feed) -> list[FloatArray]:
        return [self._graph.run_feed(feed)[HIDDEN_OUTPUT]]


def measure_texts(graph: ProcessGraph, graph_alone: ProcessGraph, texts: Texts, limits: Limits) -> Part:
    """Run a graph on all texts in batches, and on some alone.

    Args:
        graph: as a server opens it for batches side by side.
        graph_alone: the same, as a server opens it for a batch alone.
        texts: in fp32 and in batches.
        limits: of the gates.

    Raises:
        RuntimeFailureError: the engine does not answer.
    """
    found = run_all(texts.embedders, _Session(graph))
    gates = []
    if texts.expected is not None:
        for kind, agreement in compare(found, texts.expected).kinds.items():
            for gate_kind, limit, cosine in (
                (GateKind.GATE_KIND_MEAN_COSINE, limits.mean_cosine, agreement.mean_cosine),
                (GateKind.GATE_KIND_MIN_COSINE, limits.min_cosine, agreement.min_cosine),
            ):
                gates.append(_gate(graph, gate_kind, limit, cosine, kind))
    session = _Session(graph_alone)
    errors = [
        _max_batch_difference(session, embedder, found[kind]) for kind, embedder in texts.embedders.items()
    ]
    alone = float(np.max(errors))
    gates.append(_gate(graph, GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE, limits.max_batch_difference, alone))
    return Part(tuple(gates), (), broken(graph.path, gates))


def _gate(
    graph: ProcessGraph, kind: GateKind.ValueType, limit: float, value: float, text_kind: str = ""
) -> Gate:
    role = OutputRole.OUTPUT_ROLE_EMBEDDING
    return Gate(
        graph=graph_id(graph.path), role=role, kind=kind, limit=limit, value=value, text_kind=text_kind
    )


def _max_batch_difference(session: _Session, embedder: Embedder, found: Vectors) -> float:
    """Return the largest difference of a component between embeddings of texts in a batch and alone.

    Some texts of each batch that has several are run alone.
    """
    alone = [
        Batch(_rows(batch.inputs, np.array([row])), (batch.places[row],))
        for batch in embedder.batches
        for row in _spread(len(batch.places))
    ]
    if not alone:
        return 0.0
    places = embedder.places
    in_batch = found.embeddings[[places.index(batch.places[0]) for batch in sorted(alone, key=_place)]]
    return float(np.abs(embedder.of(alone).run(session).embeddings - in_batch).max())


def _place(batch: Batch) -> int:
    return batch.places[0]


def _spread(size: int) -> list[int]:
    """Return some rows of a batch, the first and the last among them; none of a batch of one text."""
    rows = np.linspace(0, size - 1, min(size, NUM_ALONE)).round().astype(int)
    return [int(row) for row in rows] if size > 1 else []
