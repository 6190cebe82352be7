"""What comes of a job. Letters: T tokens of a text, W words, L layers, H heads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnlens.explanations import ExplainMethod
from attnlens_server.serving.results import FloatArray, Usage
from attnlens_server.serving.spent import Timings
from attnlens_server.text import Tokens


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What one method says of one text.

    Attributes:
        method: which.
        values: (T,) or (W,) float32; NaN where there is no number.
        baseline: what no token contributes. None for a method that is for ranking only.
        expected_sum: the target, which the sum equals up to rounding. None if the method only ranks tokens.
        faithfulness: the measured rank correlation with leave-one-out; None: it was not measured.
    """

    method: ExplainMethod
    values: FloatArray
    baseline: float | None
    expected_sum: float | None
    faithfulness: float | None

    @property
    def sum(self) -> float:
        """The sum of the values that are numbers, and of the baseline."""
        return float(np.nansum(self.values, dtype=np.float64)) + (self.baseline or 0.0)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the tokens of one text did.

    Attributes:
        tokens: those that the model saw.
        usage: how much of the text was used.
        unit_ids: with words, the number of each token's word; else empty.
        target_value: d . p / |p|.
        scores: one for each method.
        head_contributions: (L, H); None: not asked for.
    """

    tokens: Tokens
    usage: Usage
    unit_ids: Sequence[int]
    target_value: float
    scores: tuple[TokenScores, ...]
    head_contributions: FloatArray | None


@dataclass(frozen=True, slots=True)
class ExplainResult:
    """What Explain has of all texts."""

    texts: list[Explanation]
    timings: Timings


@dataclass(frozen=True, slots=True)
class PairMatrixResult:
    """What each pair of tokens of two texts did, or each pair of words.

    Attributes:
        values: (T, T') or (W, W').
        baseline_row: of an input matrix, biases of the first text with the tokens or words of the second
            one, (T',) or (W',); None, as the next two: another matrix.
        baseline_column: tokens or words of the first text with biases of the second one, (T,) or (W,).
        baseline: biases of both.
    """

    values: FloatArray
    baseline_row: FloatArray | None = None
    baseline_column: FloatArray | None = None
    baseline: float | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of its numbers."""
        arrays = (self.values, self.baseline_row, self.baseline_column)
        return sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two texts have in common; `matrix` is None where not asked for."""

    a: Explanation
    b: Explanation
    similarity: float
    matrix: PairMatrixResult | None


@dataclass(frozen=True, slots=True)
class CompareResult:
    """What Compare has of all pairs."""

    pairs: list[Comparison]
    timings: Timings
