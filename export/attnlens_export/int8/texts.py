"""Texts for int8 quantization, their embeddings, and the agreement of the embeddings of two graphs.

The texts are of several kinds, such as prose or code. Those of each kind are split into three disjoint sets:
to calibrate, to select methods, and to judge the final graph.

Shapes: N texts, M tokens of all texts, B texts in a batch, T tokens of a text, D hidden size, E embedding
size.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import onnxruntime
from tokenizers import Encoding

from attnlens.bundle import BundleError
from attnlens.dense import open_layers
from attnlens.pooling import Pooling, finish, normalize, pool
from attnlens.v1.manifest_pb2 import GateKind, PoolingDefaults
from attnlens.v1.quantization_pb2 import Quantization, QuantizedTextKind
from attnlens_export.errors import SourceError
from attnlens_export.graph.names import HIDDEN_OUTPUT, input_names
from attnlens_export.parity.grid import Inputs
from attnlens_export.parity.sessions import Feed
from attnlens_export.published.pooling import read_pooling
from attnlens_export.published.side_files import read_max_tokens
from attnlens_export.results import kind_name
from attnlens_export.tokenizer.read import BundleTokenizer
from attnlens_model import EncoderConfig

# Longer texts are truncated: the time of attention grows with the square of the length, and attention itself
# is not quantized.
MAX_TEXT_TOKENS = 256
MAX_BATCH_TOKENS = 1024
_MAX_NAMED_CHARS = 60
MIN_TEXTS = 20
# Files of this package, in data/.
KINDS = ("sentences", "prose", "very_short", "code_and_numbers", "other_scripts")
GIVEN = "given"
EMPTY = ""

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """Texts of similar length, padded on the right.

    Attributes:
        inputs: Graph inputs (B, T).
        text_indices: Index of each row's text, (B,).
    """

    inputs: Inputs
    text_indices: tuple[int, ...]


class TextSets(NamedTuple):
    """Disjoint sets of texts, apart from the empty text.

    Attributes:
        calibration: Texts from which scales and rounding are computed.
        selection: Texts that decide which matrix products are quantized, and how.
        judgement: Texts on which the final graph is measured.
    """

    calibration: list[str]
    selection: list[str]
    judgement: list[str]


def read_kinds(path: Path | None) -> dict[str, list[str]]:
    """Return the texts of this package by kind, and those of a file as a further kind.

    Args:
        path: File with one text per line. Empty lines are ignored. If None, only the texts of this package.

    Raises:
        SourceError: The file has too few texts or is not UTF-8.
    """
    data = files("attnlens_export.int8") / "data"
    kinds = {kind: _split_lines((data / f"{kind}.txt").read_text(encoding="utf-8")) for kind in KINDS}
    return kinds if path is None else {**kinds, GIVEN: _read_given(path)}


def _split_lines(content: str) -> list[str]:
    """Return one text per line. An empty line is an empty text."""
    return content.removesuffix("\n").split("\n")


def _read_given(path: Path) -> list[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} can't be read as text: {error}") from error
    texts = [line.strip() for line in content.split("\n") if line.strip()]
    if len(texts) < MIN_TEXTS:
        raise SourceError(f"{path} has {len(texts)} texts, but at least {MIN_TEXTS} are needed, one per line")
    return texts


def split_texts(texts: Sequence[str]) -> TextSets:
    """Split texts: one half for calibration, a quarter each for selection and judgement.

    If the empty text is among the texts, it is in every set, since every server receives it sooner or later.
    """
    sets = [texts[::2], texts[1::4], texts[3::4]]
    if EMPTY in texts:
        sets = [members if EMPTY in members else [EMPTY, *members] for members in sets]
    return TextSets(*map(list, sets))


def write_texts(path: Path, kinds: Mapping[str, Sequence[str]]) -> None:
    """Write one text per line, one kind after the other."""
    lines = [text for texts in kinds.values() for text in texts]
    path.write_text("".join(f"{text}\n" for text in lines), encoding="utf-8")


def read_written(path: Path, sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """Read a file of `write_texts`.

    Args:
        path: The file.
        sizes: Number of texts of each kind, in the order of the file. Empty for bundles of attnlens 0.1.0,
            whose texts are of one kind.

    Raises:
        BundleError: The number of texts is wrong.
    """
    texts = _split_lines(path.read_text(encoding="utf-8"))
    sizes = sizes or {"texts": len(texts)}
    if sum(sizes.values()) != len(texts):
        raise BundleError(
            f"{path} has {len(texts)} texts, but the manifest states {sum(sizes.values())}: export the "
            "bundle again"
        )
    lines = iter(texts)
    return {kind: list(islice(lines, size)) for kind, size in sizes.items()}


def make_batches(
    texts: Sequence[str | tuple[str, str]],
    tokenizer_path: Path,
    config: EncoderConfig,
    max_tokens: int,
    prompt: str = "",
) -> list[Batch]:
    """Tokenize and truncate texts or pairs with a prompt, and group those of similar length.

    Texts without tokens are omitted.

    Raises:
        SourceError: There is no tokenizer.
    """
    if not tokenizer_path.is_file():
        raise SourceError(
            "int8 is calibrated with texts, but the bundle has no tokenizer: specify one with --tokenizer, "
            "or export without --precision int8"
        )
    encodings = BundleTokenizer(tokenizer_path, min(max_tokens, MAX_TEXT_TOKENS)).encode(texts, prompt)
    lengths = [len(encoding.ids) for encoding in encodings]
    by_length = sorted(
        (index for index, length in enumerate(lengths) if length), key=lambda index: lengths[index]
    )
    return [_to_batch(indices, encodings, config) for indices in _group(by_length, lengths)]


def _group(by_length: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    indices: list[int] = []
    for index in by_length:
        if indices and (len(indices) + 1) * lengths[index] > MAX_BATCH_TOKENS:
            yield indices
            indices = []
        indices.append(index)
    yield indices


def _to_batch(indices: Sequence[int], encodings: Sequence[Encoding], config: EncoderConfig) -> Batch:
    shape = (len(indices), max(len(encodings[index].ids) for index in indices))
    input_ids = np.full(shape, config.embeddings.pad_token_id, np.int64)
    mask, types = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, index in enumerate(indices):
        encoding = encodings[index]
        length = len(encoding.ids)
        input_ids[row, :length], mask[row, :length] = encoding.ids, 1
        types[row, :length] = encoding.type_ids
    has_types = "token_type_ids" in input_names(config)
    return Batch(Inputs(input_ids, mask, types if has_types else None), tuple(indices))


class Session(Protocol):
    """An open graph, such as an ONNX Runtime session."""

    def run(self, names: list[str], feed: Feed, /) -> Sequence[FloatArray]:
        """Return the named outputs."""


@dataclass(frozen=True)
class Vectors:
    """Embeddings (N, E) and token vectors (M, D) of texts, all of length 1 or 0, and the N texts if known."""

    embeddings: FloatArray
    tokens: FloatArray
    texts: Sequence[str] = ()

    @property
    def per_text(self) -> FloatArray:
        """The embeddings."""
        return self.embeddings


class Results(Protocol):
    """Results of a graph for all texts of one kind."""

    @property
    def per_text(self) -> FloatArray:
        """Embeddings (N, E), or logits (N, C)."""


R = TypeVar("R", bound=Results)


class TextRunner(ABC, Generic[R]):
    """Runs graphs on fixed texts of one kind."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = tuple(batches)

    @abstractmethod
    def run(self, session: Session) -> R:
        """Run a graph on every text."""

    @abstractmethod
    def compare(self, measured: Mapping[str, R], expected: Mapping[str, R]) -> "Agreement":
        """Compare the results of two graphs for the same texts, by kind. NaN makes the figures NaN."""

    def unit(self, _results: Iterable[R]) -> float:
        """Return the unit of errors, for the results of all kinds. Embeddings have the length 1."""
        return 1.0

    def select_lines(self, lines: Sequence[str]) -> list[str]:
        """Return the texts that are needed to create this runner again."""
        return [lines[index] for index in self.text_indices]

    @property
    def text_indices(self) -> list[int]:
        """Indices of the texts that have tokens, in ascending order."""
        return sorted(index for batch in self.batches for index in batch.text_indices)

    def sample(self, num_batches: int) -> Self:
        """Return a runner for some of the batches, of all lengths."""
        step = max(1, len(self.batches) // num_batches)
        return self.with_batches(self.batches[step // 2 :: step])

    def with_batches(self, batches: Sequence[Batch]) -> Self:
        """Return a runner for the texts of other batches."""
        other = copy.copy(self)
        other.batches = tuple(batches)
        return other


class Embedder(TextRunner[Vectors]):
    """Computes the embeddings of texts with the pooling of a bundle, without prompts."""

    def __init__(
        self,
        directory: Path,
        pooling: PoolingDefaults,
        hidden_size: int,
        batches: Sequence[Batch],
        texts: Sequence[str] = (),
    ) -> None:
        super().__init__(batches)
        self._texts = texts
        self._pooling = pooling
        self._dense = open_layers(directory, pooling.dense, hidden_size)

    def compare(self, measured: Mapping[str, Vectors], expected: Mapping[str, Vectors]) -> "Agreement":
        """Compare the vectors of the same texts, by kind."""
        return compare(measured, expected)

    def run(self, session: Session) -> Vectors:
        """Run a graph on every text."""
        pooled: dict[int, FloatArray] = {}
        tokens = []
        for batch in self.batches:
            (hidden,) = session.run([HIDDEN_OUTPUT], batch.inputs.feed())
            for row, index in enumerate(batch.text_indices):
                vectors = hidden[row][batch.inputs.attention_mask[row] == 1]  # (T, D)
                pooled[index] = pool(vectors, Pooling(self._pooling.pooling))
                tokens.append(vectors)
        embeddings = finish(
            np.stack([pooled[index] for index in sorted(pooled)]),
            self._dense,
            dimensions=self._pooling.truncate_dim or None,
            normalize_last=True,
        )
        return Vectors(
            embeddings,
            normalize(np.concatenate(tokens)),
            self.select_lines(self._texts) if self._texts else (),
        )


def make_embedders(
    directory: Path, config: EncoderConfig, kinds: Mapping[str, Sequence[str]]
) -> dict[str, Embedder]:
    """Return an embedder for each kind of text, with the tokenizer and pooling of a bundle.

    Raises:
        SourceError: There is no tokenizer.
    """
    max_tokens = read_max_tokens(directory, config)
    pooling = read_pooling(directory, config.vector_size)
    tokenizer = directory / "tokenizer.json"
    return {
        kind: Embedder(
            directory, pooling, config.vector_size, make_batches(texts, tokenizer, config, max_tokens), texts
        )
        for kind, texts in kinds.items()
    }


def run_all(runners: Mapping[str, TextRunner[R]], session: Session) -> dict[str, R]:
    """Run a graph on the texts of every kind."""
    return {kind: runner.run(session) for kind, runner in runners.items()}


def compare_all(
    runners: Mapping[str, TextRunner[R]], session: Session, expected: Mapping[str, R]
) -> "Agreement":
    """Run a graph on the texts of every kind, and compare the results with those of another graph."""
    return next(iter(runners.values())).compare(run_all(runners, session), expected)


@dataclass(frozen=True)
class KindAgreement:
    """Agreement of two graphs on texts of one kind.

    Attributes:
        num_texts: Number of texts, or of texts and pairs.
        values: Figures by kind of gate.
        worst_text: Text with the minimum cosine. Empty if unknown.
    """

    num_texts: int
    values: Mapping[GateKind.ValueType, float]
    worst_text: str = ""

    @property
    def named_text(self) -> str:
        """The beginning of the text with the minimum cosine, in quotes. Empty if unknown."""
        text = self.worst_text
        short = text if len(text) <= _MAX_NAMED_CHARS else f"{text[:_MAX_NAMED_CHARS]}..."
        return repr(short) if text else ""

    def describe(self) -> str:
        """Return the figures, and the text with the minimum cosine."""
        values = (f"{kind_name(kind).replace('_', ' ')} {value:.6g}" for kind, value in self.values.items())
        return " and ".join(values) + (f" for the text {self.named_text}" if self.worst_text else "")


@dataclass(frozen=True)
class Agreement:
    """Agreement of two graphs on all texts.

    Attributes:
        kinds: Agreement by kind of text.
        loss: Error of the worst kind of text. The losses of several changes to a graph approximately add up.
        remark: A further figure of all texts.
        recorded: Figures for the manifest entry of the graph.
    """

    kinds: Mapping[str, KindAgreement]
    loss: float
    remark: str = ""
    recorded: Quantization = field(default_factory=Quantization)

    def describe_kinds(self) -> str:
        """Return the figures of each kind in one line."""
        return "; ".join(f"{name}: {kind.describe()}" for name, kind in self.kinds.items())


def compare(measured: Mapping[str, Vectors], expected: Mapping[str, Vectors]) -> Agreement:
    """Compare the vectors of the same texts, by kind. NaN in a vector makes the results NaN.

    The cosine of two zero vectors is 1, because they are equal. The loss is 1 - mean cosine.

    Kinds that were not measured are ignored.
    """
    cosines = {
        kind: _cosines(vectors.embeddings, expected[kind].embeddings) for kind, vectors in measured.items()
    }
    token_cosines = np.concatenate(
        [_cosines(vectors.tokens, expected[kind].tokens) for kind, vectors in measured.items()]
    )
    all_cosines = np.concatenate(list(cosines.values()))
    is_same_neighbor = _nearest(measured) == _nearest({kind: expected[kind] for kind in measured})
    recorded = Quantization(
        mean_cosine=float(all_cosines.mean()),
        min_cosine=float(all_cosines.min()),
        mean_token_cosine=float(token_cosines.mean()),
        min_token_cosine=float(token_cosines.min()),
        neighbor_agreement=float(is_same_neighbor.mean()),
        text_kinds=[
            QuantizedTextKind(
                name=kind,
                num_texts=len(values),
                mean_cosine=float(values.mean()),
                min_cosine=float(values.min()),
            )
            for kind, values in cosines.items()
        ],
    )
    kinds = {
        kind.name: KindAgreement(
            kind.num_texts,
            {
                GateKind.GATE_KIND_MEAN_COSINE: kind.mean_cosine,
                GateKind.GATE_KIND_MIN_COSINE: kind.min_cosine,
            },
            measured[kind.name].texts[int(cosines[kind.name].argmin())] if measured[kind.name].texts else "",
        )
        for kind in recorded.text_kinds
    }
    remark = f"the nearest other text is the same for {recorded.neighbor_agreement:.1%}"
    loss = float(np.max([1 - kind.mean_cosine for kind in recorded.text_kinds]))
    return Agreement(kinds, loss, remark, recorded)


def _cosines(first: FloatArray, second: FloatArray) -> FloatArray:
    """Return the cosine of each row of two arrays, whose rows have the length 1 or 0."""
    are_zero = ~(first.any(axis=1) | second.any(axis=1))
    return np.where(are_zero, np.float32(1), (first * second).sum(axis=1))


def _nearest(kinds: Mapping[str, Vectors]) -> npt.NDArray[np.intp]:
    """Return the index of the nearest other text for each text, (N,)."""
    embeddings = np.concatenate([vectors.embeddings for vectors in kinds.values()])
    cosines = embeddings @ embeddings.T  # (N, N)
    np.fill_diagonal(cosines, -np.inf)
    return np.asarray(cosines.argmax(axis=1))


def max_batch_difference(session: onnxruntime.InferenceSession, batches: Sequence[Batch]) -> float:
    """Return the maximum difference of a token vector or logit between the batch and the text alone.

    Only the first and the last text of each batch are compared.
    """
    errors = [0.0]
    for batch in batches:
        (results,) = session.run(None, batch.inputs.feed())
        for row in {0, len(batch.text_indices) - 1}:
            (alone,) = session.run(None, batch.inputs.alone(row).feed())
            errors.append(float(np.abs(results[row, : alone.shape[1]] - alone[0]).max()))
    return float(np.max(errors))
