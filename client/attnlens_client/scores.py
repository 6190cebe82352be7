"""Results of `score`, `rerank` and `classify`."""

from dataclasses import dataclass

import numpy as np

from attnlens.short_repr import short_repr
from attnlens_client import colored_text
from attnlens_client.explanations import Explanation
from attnlens_client.results import Array, Usage, describe, describe_model


@short_repr
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Scores:
    """Relevance of N documents to a query, or of N pairs, in their order.

    Attributes:
        scores: Scores (N,) in float64, the activation of the logits.
        logits: Logits (N,) in float32. For a document in several parts, the highest.
        num_parts: Number of parts (N,) in int32 of each document that were scored.
        parts: Index (N,) in int32 of the part with the highest logit.
        usages: Number of tokens of each input. For a document in several parts, their sum.
        activation: Function from logits to scores: `identity` or `sigmoid`.
        model: Model name.
        model_version: Model version, see `ModelInfo.version`.
        engine: Runtime, see `ModelInfo.engine`.
        precision: Precision of the computation.
    """

    scores: Array
    logits: Array
    num_parts: Array
    parts: Array
    usages: tuple[Usage, ...]
    activation: str
    model: str
    model_version: str
    engine: str = ""
    precision: str = ""

    def __len__(self) -> int:
        return len(self.scores)

    def __repr__(self) -> str:
        model = describe_model(self.model, self.model_version)
        return f"Scores({describe(self.scores)}, {self.activation}, {model})"


@short_repr
@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document with its relevance to a query.

    Attributes:
        index: Index of the document in the argument.
        document: The document.
        score: Activation of the logit.
        logit: Logit. For a document in several parts, the highest.
        num_parts: Number of parts of the document that were scored.
        part: Index of the part with the highest logit.
        explanation: Contributions of the query and of this part of the document to the logit, if requested.
    """

    index: int
    document: str
    score: float
    logit: float
    num_parts: int
    part: int
    explanation: Explanation | None = None

    def _repr_html_(self) -> str:
        """Show the score, and the contributions as colors, in a notebook."""
        head = f"{self.index} · score {self.score:.4f} · logit {self.logit:.4f}"
        if self.explanation is None:
            return colored_text.rows(colored_text.line(f"{head} · {self.document}"))
        return colored_text.rows(colored_text.line(head), self.explanation._repr_html_())


@short_repr
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Classification:
    """Logits and scores of N texts for C labels.

    Attributes:
        labels: Names of the labels, in the order of the columns.
        logits: Logits (N, C) in float32.
        scores: Scores (N, C) in float32, the activation of the logits.
        usages: Number of tokens of each text.
        activation: Function from logits to scores: `identity`, `sigmoid` or `softmax`.
        model: Model name.
        model_version: Model version, see `ModelInfo.version`.
        engine: Runtime, see `ModelInfo.engine`.
        precision: Precision of the computation.
    """

    labels: tuple[str, ...]
    logits: Array
    scores: Array
    usages: tuple[Usage, ...]
    activation: str
    model: str
    model_version: str
    engine: str = ""
    precision: str = ""

    def __len__(self) -> int:
        return len(self.scores)

    def top(self, count: int | None = None) -> list[list[tuple[str, float]]]:
        """Return the labels of each text with their scores, in descending order.

        Args:
            count: Maximum number of labels per text. If None, all.
        """
        orders = np.argsort(-self.logits, axis=1, kind="stable")[:, :count]
        return [
            [(self.labels[label], float(row[label])) for label in order]
            for row, order in zip(self.scores, orders, strict=True)
        ]

    def __repr__(self) -> str:
        model = describe_model(self.model, self.model_version)
        return f"Classification({describe(self.scores)}, {self.activation}, {model})"
