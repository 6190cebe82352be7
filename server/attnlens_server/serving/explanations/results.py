"""What comes of a job. Letters: T tokens of a text, W words, L layers, H heads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens.explanations import ExplainMethod
from attnlens_server.serving.results import FloatArray, Timings, Usage
from attnlens_server.text import Tokens


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What one method says of one text.

    Attributes:
        method: which.
        values: (T,) or (W,) float32; NaN where there is no number.
        baseline: what no token contributes; None: the method has none.
        expected: what the sum must be but for rounding; None: nothing is promised.
        faithfulness: the measured rank correlation with leave-one-out; None: it was not measured.
    """

    method: ExplainMethod
    values: FloatArray
    baseline: float | None
    expected: float | None
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
        word_of_token: with words, the number of each token's word; else empty.
        target_value: d . p / |p|.
        scores: one for each method.
        head_contributions: (L, H); None: not asked for.
    """

    tokens: Tokens
    usage: Usage
    word_of_token: Sequence[int]
    target_value: float
    scores: tuple[TokenScores, ...]
    head_contributions: FloatArray | None


@dataclass(frozen=True, slots=True)
class ExplainResult:
    """What Explain has of all texts."""

    texts: list[Explanation]
    timings: Timings


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two texts have in common; `matrix` is (T, T') or (W, W') in fp32, None where not asked for."""

    a: Explanation
    b: Explanation
    similarity: float
    matrix: npt.NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class CompareResult:
    """What Compare has of all pairs."""

    pairs: list[Comparison]
    timings: Timings
