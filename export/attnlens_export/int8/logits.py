"""Calibration inputs for classifiers, and the agreement between the logits of two graphs.

Pairs are built from texts. Each query has six documents, from identical to unrelated: the query itself, its
first half, its second half, its first half with half of another text, and two other texts. The logits of a
trained reranker therefore vary within a query as much as they do for search results.

Shapes: N texts and pairs, C labels, G texts or pairs of one query.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens.v1.manifest_pb2 import GateKind
from attnlens_export.graph.names import LOGITS_OUTPUT
from attnlens_export.int8.texts import (
    Agreement,
    Batch,
    FloatArray,
    KindAgreement,
    Session,
    TextRunner,
    make_batches,
    make_embedders,
)
from attnlens_export.published.classifier import read_stored_classifier
from attnlens_export.published.side_files import read_max_tokens
from attnlens_export.tokenizer.pairs import takes_pairs
from attnlens_model import EncoderConfig

# Limits the run time: each query has 6 documents, and a pair is longer than a text.
MAX_QUERIES = 24
# Query index of unpaired texts.
_NO_QUERY = -1

Item = str | tuple[str, str]


@dataclass(frozen=True)
class Logits:
    """Logits of texts and pairs.

    Attributes:
        per_text: Logits (N, C).
        queries: Query index of each pair, (N,). All unpaired texts have the same index.
    """

    per_text: FloatArray
    queries: npt.NDArray[np.int64]


class Scorer(TextRunner[Logits]):
    """Computes the logits of texts and pairs of one kind."""

    def __init__(self, batches: Sequence[Batch], queries: Sequence[int]) -> None:
        """`queries` contains the query index of each text and pair. If empty, all inputs form one group."""
        super().__init__(batches)
        size = len(queries) or max(index for batch in batches for index in batch.text_indices) + 1
        self._queries = np.array(queries or [_NO_QUERY] * size, np.int64)

    def select_lines(self, lines: Sequence[str]) -> list[str]:
        """Return all texts, because each pair combines several of them."""
        return list(lines)

    def run(self, session: Session) -> Logits:
        """Run a logits graph on every text and pair."""
        logits: dict[int, FloatArray] = {}
        for batch in self.batches:
            (rows,) = session.run([LOGITS_OUTPUT], batch.inputs.feed())
            logits |= dict(zip(batch.text_indices, rows, strict=True))
        indices = self.text_indices
        return Logits(np.stack([logits[index] for index in indices]), self._queries[indices])

    def unit(self, results: Iterable[Logits]) -> float:
        """Return the spread of the logits: their standard deviation per label, as a root mean square."""
        logits = np.concatenate([result.per_text for result in results], dtype=np.float64)
        return float(np.sqrt(logits.var(axis=0).mean()))

    def compare(self, measured: Mapping[str, Logits], expected: Mapping[str, Logits]) -> Agreement:
        """Compare the logits of the same texts and pairs, by kind.

        Errors are relative to the spread of the logits in fp32. The loss is their mean square.
        """
        spread = self.unit(expected.values())
        kinds, losses = {}, []
        for kind, logits in measured.items():
            fp32 = expected[kind]
            errors = np.abs(np.subtract(logits.per_text, fp32.per_text, dtype=np.float64))
            errors /= max(spread, np.finfo(np.float64).tiny)  # 0 if all logits are equal
            agreement = rank_agreement(logits.per_text, fp32.per_text, fp32.queries)
            values = {
                GateKind.GATE_KIND_MIN_RANK_AGREEMENT: agreement,
                GateKind.GATE_KIND_MAX_LOGIT_ERROR: float(np.max(errors)),
            }
            kinds[kind] = KindAgreement(len(errors), values)
            losses.append(float(np.square(errors).mean()))
        remark = f"errors are relative to the spread of the logits in fp32, {spread:.4g}"
        return Agreement(kinds, float(np.max(losses)), remark)


def make_runners(
    directory: Path, config: EncoderConfig, kinds: Mapping[str, Sequence[str]]
) -> Mapping[str, TextRunner[Any]]:
    """Return an embedder or a scorer for each kind of text. It runs the bundle's main graph.

    A classifier with one label that accepts pairs is a reranker, which is measured only on pairs.

    Raises:
        SourceError: The bundle lacks a tokenizer.
    """
    classifier = read_stored_classifier(directory)
    if classifier is None:
        return make_embedders(directory, config, kinds)
    has_pairs, max_tokens = takes_pairs(directory, config), read_max_tokens(directory, config)
    runners = {}
    for kind, lines in kinds.items():
        items: list[tuple[int, Item]] = []
        if len(classifier.labels) > 1 or not has_pairs:
            items += [(_NO_QUERY, line) for line in lines]
        if has_pairs:
            items += make_pairs(lines)
        batches = make_batches([item for _, item in items], directory / "tokenizer.json", config, max_tokens)
        runners[kind] = Scorer(batches, [query for query, _ in items])
    return runners


def make_pairs(texts: Sequence[str]) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield each pair with its query index, for up to `MAX_QUERIES` queries."""
    step = -(-len(texts) // MAX_QUERIES)
    for index in range(0, len(texts), step):
        query, *others = (texts[(index + offset) % len(texts)] for offset in range(3))
        start, end = _halve(query)
        mixed = f"{start} {_halve(others[0])[1]}"
        for document in (query, start, end, mixed, *others):
            yield index, (query, document)


def _halve(text: str) -> tuple[str, str]:
    """Split a text in the middle, between words if it has several, otherwise between characters."""
    words = text.split()
    middle = len(words) // 2
    if middle:
        return " ".join(words[:middle]), " ".join(words[middle:])
    return text[: len(text) // 2], text[len(text) // 2 :]


def rank_agreement(measured: FloatArray, expected: FloatArray, queries: npt.NDArray[np.int64]) -> float:
    """Return Kendall's rank correlation between two arrays of logits (N, C).

    Logits are compared within each label and query. The result is the fraction of comparisons with the same
    sign, minus the fraction with the opposite sign. Ties in `expected` are skipped.
    """
    agreed, compared = 0.0, 0
    for query in np.unique(queries):
        rows = queries == query
        for label in range(expected.shape[1]):
            first, second = np.triu_indices(int(rows.sum()), 1)
            found, known = measured[rows, label], expected[rows, label]
            signs = np.sign(known[first] - known[second])
            agreed += float((np.sign(found[first] - found[second]) * signs).sum())
            compared += int(np.count_nonzero(signs))
    return agreed / compared if compared else 1.0
