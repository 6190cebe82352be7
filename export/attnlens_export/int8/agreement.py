"""How far the embeddings of two graphs agree. N texts, M tokens, T tokens of a text, D width."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime

from attnlens.dense import open_layers
from attnlens.pooling import Pooling, finish, normalize, pool
from attnlens.v1.manifest_pb2 import PoolingDefaults
from attnlens_export.graph.names import HIDDEN_OUTPUT
from attnlens_export.int8.products import FloatArray
from attnlens_export.int8.sessions import Feed
from attnlens_export.int8.texts import Batch


class Session(Protocol):
    """A graph of embeddings that is open in some runtime: ONNX Runtime's own sessions are such."""

    def run(self, names: list[str], feed: Feed, /) -> Sequence[FloatArray]:
        """Return the outputs of these names."""


@dataclass(frozen=True)
class Vectors:
    """What a graph makes of texts: embeddings (N, E) and token vectors (M, D), each of length 1."""

    embeddings: FloatArray
    tokens: FloatArray


@dataclass(frozen=True)
class KindAgreement:
    """The embeddings of one kind of text by one graph against another's.

    Attributes:
        num_texts: how many there are.
        mean_cosine: of the embeddings of a text.
        min_cosine: the smallest.
    """

    num_texts: int
    mean_cosine: float
    min_cosine: float


@dataclass(frozen=True)
class Agreement:
    """One graph's vectors against another's.

    Attributes:
        kinds: by the kind of text.
        mean_cosine: of the embeddings of a text.
        min_cosine: the smallest.
        mean_token_cosine: of the vectors of a token.
        min_token_cosine: the smallest.
        neighbor_agreement: the share of texts whose nearest other text is the same.
    """

    kinds: Mapping[str, KindAgreement]
    mean_cosine: float
    min_cosine: float
    mean_token_cosine: float
    min_token_cosine: float
    neighbor_agreement: float


class Embedder:
    """Makes embeddings of fixed texts of one kind as a bundle's pooling says, prompts left out."""

    def __init__(
        self, directory: Path, pooling: PoolingDefaults, hidden_size: int, batches: Sequence[Batch]
    ) -> None:
        self.batches = tuple(batches)
        self._pooling = pooling
        self._dense = open_layers(directory, pooling.dense, hidden_size)

    @property
    def places(self) -> list[int]:
        """The places of the texts that have tokens, in order."""
        return sorted(place for batch in self.batches for place in batch.places)

    def part(self, num_batches: int) -> "Embedder":
        """Return one for fewer texts, of all lengths."""
        step = max(1, len(self.batches) // num_batches)
        return self.of(self.batches[step // 2 :: step])

    def of(self, batches: Sequence[Batch]) -> "Embedder":
        """Return one for other batches."""
        other = copy.copy(self)
        other.batches = tuple(batches)
        return other

    def run(self, session: Session) -> Vectors:
        """Run a graph on every text."""
        pooled: dict[int, FloatArray] = {}
        tokens = []
        for batch in self.batches:
            (hidden,) = session.run([HIDDEN_OUTPUT], batch.inputs.feed())
            for row, place in enumerate(batch.places):
                vectors = hidden[row][batch.inputs.attention_mask[row] == 1]  # (T, D)
                pooled[place] = pool(vectors, Pooling(self._pooling.pooling))
                tokens.append(vectors)
        embeddings = finish(
            np.stack([pooled[place] for place in sorted(pooled)]),
            self._dense,
            dimensions=self._pooling.truncate_dim or None,
            normalize_last=True,
        )
        return Vectors(embeddings, normalize(np.concatenate(tokens)))


def run_all(embedders: Mapping[str, Embedder], session: Session) -> dict[str, Vectors]:
    """Run a graph on the texts of every kind."""
    return {kind: embedder.run(session) for kind, embedder in embedders.items()}


def compare(found: Mapping[str, Vectors], expected: Mapping[str, Vectors]) -> Agreement:
    """Compare the vectors of the same texts, by kind; a NaN makes the figures NaN."""
    cosines = {
        kind: (vectors.embeddings * expected[kind].embeddings).sum(axis=1) for kind, vectors in found.items()
    }
    token_cosines = np.concatenate(
        [(vectors.tokens * expected[kind].tokens).sum(axis=1) for kind, vectors in found.items()]
    )
    of_all = np.concatenate(list(cosines.values()))
    same = _nearest(found) == _nearest(expected)
    return Agreement(
        {
            kind: KindAgreement(len(each), float(each.mean()), float(each.min()))
            for kind, each in cosines.items()
        },
        float(of_all.mean()),
        float(of_all.min()),
        float(token_cosines.mean()),
        float(token_cosines.min()),
        float(same.mean()),
    )


def _nearest(kinds: Mapping[str, Vectors]) -> FloatArray:
    embeddings = np.concatenate([vectors.embeddings for vectors in kinds.values()])
    cosines = embeddings @ embeddings.T  # (N, N)
    np.fill_diagonal(cosines, -np.inf)
    return np.asarray(cosines.argmax(axis=1))


def max_batch_difference(session: onnxruntime.InferenceSession, batches: Sequence[Batch]) -> float:
    """Return the largest difference of a token's vector between its batch and its text alone.

    The first and the last text of each batch are run alone.
    """
    errors = [0.0]
    for batch in batches:
        (hidden,) = session.run([HIDDEN_OUTPUT], batch.inputs.feed())
        for row in {0, len(batch.places) - 1}:
            (alone,) = session.run([HIDDEN_OUTPUT], batch.inputs.alone(row).feed())
            errors.append(float(np.abs(hidden[row, : alone.shape[1]] - alone[0]).max()))
    return float(np.max(errors))
