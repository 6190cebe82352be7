"""What `explain` and `compare` return.

Letters: T tokens of a text, W words of it, U either of the two, L layers, H heads.
"""

from dataclasses import dataclass

import numpy as np

from attnlens.explanations import LOW_FAITHFULNESS
from attnlens_client import coloured_text
from attnlens_client.coloured_text import printable
from attnlens_client.results import Array, Token, Usage

_MOST_SHOWN = 3


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TokenScores:
    """What one method says of one text. The array is read-only; `.copy()` gives one to change.

    Attributes:
        method: `contributions`, `output_share`, `leave_one_out`, `rollout`, `received_attention` or
            `contribution_norm`.
        values: float32, shape (U,), a score for each token or word. NaN where `leave_one_out` has none: for
            special tokens, and where nothing would be left to pool.
        baseline: what the encoder's biases contribute. None for a method that is for ranking only: its
            scores do not add up to the target.
        sum: of the scores that are numbers, and of the baseline.
        expected_sum: the target, which `sum` equals up to rounding. None if the method only ranks tokens.
        faithfulness: Spearman's rank correlation between the method's scores and leave-one-out, as measured
            for this model by `attnlens export` or `attnlens check --faithfulness`. None if not measured. See
            `ModelInfo.faithfulness` for the confidence interval.
    """

    method: str
    values: Array
    baseline: float | None
    sum: float
    expected_sum: float | None
    faithfulness: float | None

    def __repr__(self) -> str:
        parts = [self.method, f"{self.values.dtype} {self.values.shape}"]
        parts += [] if self.baseline is None else [f"baseline {self.baseline:+.4f}"]
        parts += [f"sum {self.sum:.4f}", *_faithfulness(self)]
        return f"TokenScores({', '.join(parts)})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Explanation:
    """What the tokens of one text did for the target d . p / |p|, p being its embedding.

    Attributes:
        tokens: the T tokens that the model saw.
        usage: how much of the text was used.
        unit_ids: with words, the number of each token's word, from 0; else empty.
        target_value: d . p / |p|: 1 towards the text itself, the cosine towards another text.
        scores: one entry for each method, in the order asked for.
        head_contributions: float32, shape (L, H): what each head contributes through its output. None where
            not asked for.
        model, model_version: which bundle it comes from, see `ModelInfo.version`.
        engine, precision: what computed it, see `ModelInfo.engine`; always `fp32`.
    """

    tokens: tuple[Token, ...]
    usage: Usage
    unit_ids: tuple[int, ...]
    target_value: float
    scores: tuple[TokenScores, ...]
    head_contributions: Array | None
    model: str
    model_version: str
    engine: str = ""
    precision: str = ""

    @property
    def units(self) -> tuple[tuple[Token, ...], ...]:
        """What each score is about: the tokens of each word, or each token by itself."""
        if not self.unit_ids:
            return tuple((token,) for token in self.tokens)
        words: list[list[Token]] = [[] for _ in range(max(self.unit_ids) + 1)]
        for token, word in zip(self.tokens, self.unit_ids, strict=True):
            words[word].append(token)
        return tuple(tuple(word) for word in words)

    @property
    def labels(self) -> tuple[str, ...]:
        """How the tokenizer spells what each score is about."""
        return tuple("".join(_spelling(token, at) for at, token in enumerate(unit)) for unit in self.units)

    @property
    def values(self) -> Array:
        """The scores of the only method; see `TokenScores.values`.

        Raises:
            ValueError: there are several.
        """
        if len(self.scores) != 1:
            raise ValueError(f"there are {len(self.scores)} methods, not one: take `by(METHOD).values`")
        return self.scores[0].values

    def by(self, method: str) -> TokenScores:
        """Return the scores of a method.

        Raises:
            KeyError: it was not asked for.
        """
        for scores in self.scores:
            if scores.method == method:
                return scores
        raise KeyError(f"{method}: there are {', '.join(scores.method for scores in self.scores)}")

    def top(self, count: int = _MOST_SHOWN, method: str = "") -> list[tuple[str, float]]:
        """Return the units with the largest scores in magnitude, of a method or of the first one."""
        values = self.by(method).values if method else self.scores[0].values
        order = np.argsort(-np.abs(np.nan_to_num(values)), kind="stable")[:count]
        labels = self.labels
        return [(labels[place], float(values[place])) for place in order]

    def _repr_html_(self) -> str:
        """Show the first method's scores as colours in a notebook."""
        scores = self.scores[0]
        parts = [f"{scores.method}: sum {scores.sum:.4f}"]
        parts += [] if scores.baseline is None else [f"of which baseline {scores.baseline:+.4f}"]
        parts += [f"target {self.target_value:.4f}", self.model, *_faithfulness(scores)]
        shown = coloured_text.coloured(self.labels, scores.values.tolist())
        return coloured_text.part(shown, coloured_text.line(" · ".join(parts)))

    def __repr__(self) -> str:
        shown = ", ".join(f"{printable(label)} {value:+.3f}" for label, value in self.top())
        baseline = self.scores[0].baseline
        rest = "" if baseline is None else f", baseline {baseline:+.3f}"
        rest += "".join(f", {part}" for part in _faithfulness(self.scores[0]))
        return (
            f"Explanation({len(self.units)} {'words' if self.unit_ids else 'tokens'}, "
            f"target {self.target_value:.4f}, {self.scores[0].method}: {shown}{rest})"
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Comparison:
    """What the tokens of two texts did for their similarity.

    Attributes:
        a: the first text, explained towards the second one.
        b: the second text, explained towards the first one.
        similarity: the cosine of their embeddings.
        matrix: float32, shape (U, U'): element (i, j) is about unit i of the first text and unit j of the
            second one. NaN where `interaction` has none. None where not asked for.
        baseline_row: with the matrix `input`, float32, shape (U',): the encoder's biases on the side of the
            first text and unit j of the second one. Else None, and so the next two.
        baseline_column: float32, shape (U,): unit i of the first text and the second one's biases.
        baseline: the biases on both sides. `matrix` and all three add up to `similarity`.
    """

    a: Explanation
    b: Explanation
    similarity: float
    matrix: Array | None
    baseline_row: Array | None = None
    baseline_column: Array | None = None
    baseline: float | None = None

    def top_pairs(self, count: int = _MOST_SHOWN) -> list[tuple[str, str, float]]:
        """Return the pairs with the largest elements of the matrix in magnitude.

        Raises:
            ValueError: there is no matrix.
        """
        if self.matrix is None:
            raise ValueError("there is no matrix: ask for matrix='output', 'interaction' or 'input'")
        order = np.argsort(-np.abs(np.nan_to_num(self.matrix)), axis=None, kind="stable")[:count]
        rows, columns = self.a.labels, self.b.labels
        places = zip(*np.unravel_index(order, self.matrix.shape), strict=True)
        return [(rows[row], columns[column], float(self.matrix[row, column])) for row, column in places]

    def _repr_html_(self) -> str:
        """Show both texts with their scores as colours, and the largest pairs, in a notebook."""
        rows = [
            coloured_text.line(f"cosine {self.similarity:.4f}"),
            self.a._repr_html_(),
            self.b._repr_html_(),
        ]
        if self.matrix is not None:
            pairs = [f"{first} - {second} {value:+.4f}" for first, second, value in self.top_pairs()]
            rows.append(coloured_text.line(f"largest pairs: {', '.join(pairs)}"))
        return coloured_text.part(*rows)

    def __repr__(self) -> str:
        matrix = "" if self.matrix is None else f", matrix {self.matrix.shape}"
        return f"Comparison(similarity {self.similarity:.4f}, a={self.a!r}, b={self.b!r}{matrix})"


def _faithfulness(scores: TokenScores) -> list[str]:
    """Return the measured faithfulness, with a caution if it is low. Nothing for leave-one-out itself."""
    if scores.faithfulness is None or scores.method == "leave_one_out":
        return []
    caution = " (low)" if scores.faithfulness < LOW_FAITHFULNESS else ""
    return [f"faithfulness {scores.faithfulness:.2f}{caution}"]


def _spelling(token: Token, place: int) -> str:
    """Return a token's spelling, without WordPiece's mark of a continued word inside of a word."""
    return token.text.removeprefix("##") if place else token.text
