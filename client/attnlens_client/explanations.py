"""Results of `explain` and `compare`.

Shapes: T tokens, U units (tokens or words), L layers, H heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from attnlens.explanations import LOW_FAITHFULNESS
from attnlens.short_repr import short_repr
from attnlens_client import colored_text
from attnlens_client.colored_text import printable
from attnlens_client.results import Array, Token, Usage

_DEFAULT_COUNT = 3


@short_repr
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TokenScores:
    """Scores of one method for one text. The array is read-only.

    Attributes:
        method: `contributions`, `output_share`, `leave_one_out`, `rollout`, `received_attention` or
            `contribution_norm`.
        values: Scores (U,) in float32. For `leave_one_out`, NaN for special tokens and tokens without which
            nothing is left to pool.
        baseline: Contribution of the encoder's biases. None for methods that only rank tokens, whose scores
            do not add up to the target value.
        sum: Sum of the defined scores and the baseline.
        expected_sum: Target value, which `sum` equals up to rounding. None for methods that only rank tokens.
        faithfulness: Spearman's rank correlation between the method's scores and leave-one-out, measured for
            this model by `attnlens export` or `attnlens check --faithfulness`. None if not measured for this
            kind of question: it is measured for tokens, not for words, of a text's own embedding or highest
            logit. See `ModelInfo.faithfulness` for its confidence interval.
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


@short_repr
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Explanation:
    """Contributions of the tokens of a text to a logit, or to d . p / |p| with embedding p and direction d.

    Attributes:
        tokens: Tokens after truncation.
        usage: Number of tokens.
        unit_ids: Index of each token's word if scores are per word, else empty.
        target_value: d . p / |p|: 1 for the text's own embedding, the cosine for another text. For a
            classifier, the logit or the difference of two logits.
        scores: Scores of each requested method.
        head_contributions: Contributions (L, H) of heads through their outputs, in float32. None if not
            requested.
        model: Model name.
        model_version: Model version, see `ModelInfo.version`.
        engine: Runtime, see `ModelInfo.engine`.
        precision: Precision of the computation, always `fp32`.
        sums_by_source: Sums of the contributions to a logit by `Token.source`: `text` (the query of a
            reranker), `second_text` (the document), `prompt`, `special` and `ids`, and the `baseline`. They
            add up to the target value. None for other targets.
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
    sums_by_source: Mapping[str, float] | None = None

    @property
    def units(self) -> tuple[tuple[Token, ...], ...]:
        """Tokens of each score: all tokens of a word, or a single token."""
        if not self.unit_ids:
            return tuple((token,) for token in self.tokens)
        words: list[list[Token]] = [[] for _ in range(max(self.unit_ids) + 1)]
        for token, word in zip(self.tokens, self.unit_ids, strict=True):
            words[word].append(token)
        return tuple(tuple(word) for word in words)

    @property
    def labels(self) -> tuple[str, ...]:
        """Text of each unit, as the tokenizer spells it."""
        return tuple("".join(_spelling(token, at) for at, token in enumerate(unit)) for unit in self.units)

    @property
    def values(self) -> Array:
        """Scores of the only method, see `TokenScores.values`.

        Raises:
            ValueError: There is more than one method.
        """
        if len(self.scores) != 1:
            raise ValueError(f"there are {len(self.scores)} methods: use `by(METHOD).values`")
        return self.scores[0].values

    def by(self, method: str) -> TokenScores:
        """Return the scores of a method.

        Raises:
            KeyError: The method was not requested.
        """
        for scores in self.scores:
            if scores.method == method:
                return scores
        raise KeyError(f"{method}: use one of {', '.join(scores.method for scores in self.scores)}")

    def top(self, count: int = _DEFAULT_COUNT, method: str = "") -> list[tuple[str, float]]:
        """Return the units with the largest absolute scores of a method, by default the first one."""
        values = self.by(method).values if method else self.scores[0].values
        order = np.argsort(-np.abs(np.nan_to_num(values)), kind="stable")[:count]
        labels = self.labels
        return [(labels[place], float(values[place])) for place in order]

    def _repr_html_(self) -> str:
        """Show the scores of the first method as colors in a notebook."""
        scores = self.scores[0]
        parts = [f"{scores.method}: sum {scores.sum:.4f}"]
        parts += [] if scores.baseline is None else [f"including baseline {scores.baseline:+.4f}"]
        parts += [f"{source} {value:+.4f}" for source, value in self._sums()]
        parts += [f"target {self.target_value:.4f}", self.model, *_faithfulness(scores)]
        labels = colored_text.colored(self.labels, scores.values.tolist())
        return colored_text.rows(labels, colored_text.line(" · ".join(parts)))

    def _sums(self) -> list[tuple[str, float]]:
        """Return the sums of the sources that the text has, without the baseline."""
        sources = {token.source for token in self.tokens}
        return [(name, value) for name, value in (self.sums_by_source or {}).items() if name in sources]

    def __repr__(self) -> str:
        top = ", ".join(f"{printable(label)} {value:+.3f}" for label, value in self.top())
        baseline = self.scores[0].baseline
        rest = "" if baseline is None else f", baseline {baseline:+.3f}"
        rest += "".join(f", {part}" for part in _faithfulness(self.scores[0]))
        return (
            f"Explanation({len(self.units)} {'words' if self.unit_ids else 'tokens'}, "
            f"target {self.target_value:.4f}, {self.scores[0].method}: {top}{rest})"
        )


@short_repr
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Comparison:
    """Contributions of the tokens of two texts to their similarity.

    For the matrix `input`, the matrix and the three baselines add up to `similarity`. For other matrices, the
    baselines are None.

    Attributes:
        a: Explanation of the first text towards the second.
        b: Explanation of the second text towards the first.
        similarity: Similarity of the embeddings.
        matrix: Scores (U, U') of pairs of units in float32. NaN where `interaction` is undefined. None if not
            requested.
        baseline_row: Biases of the first text with units of the second, (U',) in float32.
        baseline_column: Units of the first text with biases of the second, (U,) in float32.
        baseline: Biases of both texts.
        function: Function of `similarity`, that of the model: `cosine` or `dot`.
    """

    a: Explanation
    b: Explanation
    similarity: float
    matrix: Array | None
    baseline_row: Array | None = None
    baseline_column: Array | None = None
    baseline: float | None = None
    function: str = "cosine"

    @property
    def function_label(self) -> str:
        """Name of the similarity function for readers."""
        return "dot product" if self.function == "dot" else self.function

    def top_pairs(self, count: int = _DEFAULT_COUNT) -> list[tuple[str, str, float]]:
        """Return the pairs with the largest absolute scores.

        Raises:
            ValueError: There is no matrix.
        """
        if self.matrix is None:
            raise ValueError("there is no matrix: request matrix='output', 'interaction' or 'input'")
        order = np.argsort(-np.abs(np.nan_to_num(self.matrix)), axis=None, kind="stable")[:count]
        rows, columns = self.a.labels, self.b.labels
        places = zip(*np.unravel_index(order, self.matrix.shape), strict=True)
        return [(rows[row], columns[column], float(self.matrix[row, column])) for row, column in places]

    def _repr_html_(self) -> str:
        """Show the scores of both texts as colors, and the largest pairs, in a notebook."""
        rows = [
            colored_text.line(f"{self.function_label} {self.similarity:.4f}"),
            self.a._repr_html_(),
            self.b._repr_html_(),
        ]
        if self.matrix is not None:
            pairs = [f"{first} - {second} {value:+.4f}" for first, second, value in self.top_pairs()]
            rows.append(colored_text.line(f"largest pairs: {', '.join(pairs)}"))
        return colored_text.rows(*rows)

    def __repr__(self) -> str:
        matrix = "" if self.matrix is None else f", matrix {self.matrix.shape}"
        return f"Comparison(similarity {self.similarity:.4f}, a={self.a!r}, b={self.b!r}{matrix})"


def _faithfulness(scores: TokenScores) -> list[str]:
    """Describe the measured faithfulness. Empty for leave-one-out itself."""
    if scores.method == "leave_one_out":
        return []
    if scores.faithfulness is None:
        return ["faithfulness not measured for this question"]
    caution = " (low)" if scores.faithfulness < LOW_FAITHFULNESS else ""
    return [f"faithfulness {scores.faithfulness:.2f}{caution}"]


def _spelling(token: Token, place: int) -> str:
    """Return the text of a token, without WordPiece's `##` inside a word."""
    return token.text.removeprefix("##") if place else token.text
