"""From what the graphs return to scores. Pure functions; the formulas are those of `attnlens.explanations`.

Letters: T tokens of a text, W words, E components of an embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnlens.explanations import (
    ExplainLevel,
    ExplainMethod,
    Float64Array,
    PairMatrix,
    interaction_matrix,
    leave_one_out_effects,
    output_matrix,
    output_shares,
    received_attention,
    rollout,
    sum_over_words,
    unit,
)
from attnlens.pooling import FloatArray, Pooling
from attnlens.reductions import TextUnits
from attnlens_server.bundle import Model
from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.serving.explanations.checks import (
    CONTRIBUTION_NORM,
    CONTRIBUTIONS,
    LEAVE_ONE_OUT,
    OUTPUT_SHARE,
    ROLLOUT,
    ExplanationPlan,
)
from attnlens_server.serving.explanations.results import Explanation, PairMatrixResult, TokenScores
from attnlens_server.serving.explanations.runs import Contributions, Text, Vectors
from attnlens_server.serving.results import usage
from attnlens_server.text import Tokens, TokenSource


@dataclass(frozen=True, slots=True)
class Found:
    """What the graphs brought of one text; None or empty: it was not needed.

    Attributes:
        text: the text.
        tokens: its tokens.
        direction: d, (E,); None: p / |p|.
        contributions: of the graph of contributions.
        vectors: of the graph of vectors.
        attention: the mean over heads of some layers, the last one last.
        left_out: p / |p| without each token, (T, E).
        norms: |c| / |p| of each token or word, (T,) or (W,).
    """

    text: Text
    tokens: Tokens
    direction: Float64Array | None
    contributions: Contributions | None
    vectors: Vectors | None
    attention: Sequence[FloatArray]
    left_out: Float64Array | None
    norms: Float64Array | None = None

    @property
    def embedding(self) -> Float64Array:
        """p, (E,)."""
        source = self.vectors or self.contributions
        assert source is not None  # noqa: S101 - one of them is always run
        return source.embedding


def direction_of(embedding: Float64Array, field: str) -> Float64Array:
    """Return p / |p|.

    Raises:
        InvalidFieldsError: p has no direction.
    """
    length = float(np.linalg.norm(embedding))
    if not (np.isfinite(length) and length > 0):
        text = f"has an embedding of length {length:g}, which has no direction: send another text"
        raise InvalidFieldsError([FieldViolation(field, text)])
    return unit(embedding)


def explanation(found: Found, field: str, plan: ExplanationPlan, model: Model) -> Explanation:
    """Return the explanation of a text, which the request calls `field`.

    Raises:
        InvalidFieldsError: Its embedding has no direction, or its scores overflow.
    """
    own = direction_of(found.embedding, field)
    direction = own if found.direction is None else found.direction
    words = words_of(found.tokens) if plan.level is ExplainLevel.WORDS else []
    scores = []
    for method in plan.methods:
        values, baseline, expected_sum = _values(method, found, plan, (own, direction))
        if words and method is not CONTRIBUTION_NORM:
            values = sum_over_words(values, words)
        measured = model.faithfulness.get(int(method))
        scores.append(
            TokenScores(
                method,
                _as_float32(values, field, plan),
                baseline,
                expected_sum,
                measured.rank_correlation if measured else None,
            )
        )
    heads = found.contributions.heads if found.contributions else None
    value = float(direction @ own)
    return Explanation(
        found.tokens,
        usage(found.text.encoded),
        words,
        value,
        tuple(scores),
        None if heads is None else _as_float32(heads, field, plan),
    )


def _as_float32(values: Float64Array, field: str, plan: ExplanationPlan) -> FloatArray:
    """Round scores to float32; NaN, the score of a token that can't be left out, stays.

    Raises:
        InvalidFieldsError: A score overflows.
    """
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if np.isinf(rounded).any():
        largest = float(np.nanmax(np.abs(values)))
        text = f"has scores up to {largest:.3g}, which overflow float32"
        if plan.direction is not None:
            field, text = (
                "direction",
                f"is too long: a score is {largest:.3g}, which overflows float32. Shorten it",
            )
        raise InvalidFieldsError([FieldViolation(field, text)])
    return rounded


def _values(
    method: ExplainMethod, found: Found, plan: ExplanationPlan, directions: tuple[Float64Array, Float64Array]
) -> tuple[Float64Array, float | None, float | None]:
    """Return the scores of a method, its baseline and the sum of both, which is the target.

    The scores have the shape (T,), except those of CONTRIBUTION_NORM, which are of words already if the plan
    asks for words. A method that is for ranking only has neither a baseline nor a sum.
    """
    own, direction = directions
    weights, target = found.text.weights, float(direction @ own)
    if method is CONTRIBUTIONS:
        assert found.contributions is not None  # noqa: S101 - the plan has seen to it, and so below
        return found.contributions.scores.astype(np.float64), found.contributions.baseline, target
    if method is OUTPUT_SHARE:
        assert found.vectors is not None  # noqa: S101
        assert found.vectors.hidden_state is not None  # noqa: S101
        length = float(np.linalg.norm(found.embedding))
        return output_shares(found.vectors.hidden_state, weights, direction, length), 0.0, target
    if method is LEAVE_ONE_OUT:
        assert found.left_out is not None  # noqa: S101
        return leave_one_out_effects(direction, own, found.left_out), None, None
    if method is CONTRIBUTION_NORM:
        assert found.norms is not None  # noqa: S101
        return found.norms, None, None
    if method is ROLLOUT:
        rows = np.ones_like(weights) if plan.pooling is Pooling.MAX else weights
        return rollout(found.attention, rows), None, None
    return received_attention(found.attention[-1]), None, None


def matrix(
    first: Found, second: Found, plan: ExplanationPlan, of_inputs: Float64Array | None
) -> PairMatrixResult | None:
    """Return what a plan wants of each pair of tokens, or of words.

    Args:
        first: T tokens.
        second: T' tokens.
        plan: says what is wanted.
        of_inputs: the input matrix with its baselines last, (T + 1, T' + 1), where the plan wants it.
    """
    match plan.matrix:
        case None:
            return None
        case PairMatrix.INTERACTION:
            found = _interaction(first, second)
        case PairMatrix.OUTPUT:
            found = _output(first, second, plan)
        case PairMatrix.INPUT:
            assert of_inputs is not None  # noqa: S101 - the plan has seen to it
            found = of_inputs
    if plan.level is ExplainLevel.WORDS:
        found = _over_words(found, words_of(first.tokens), axis=0)
        found = _over_words(found, words_of(second.tokens), axis=1)
    values = found.astype(np.float32)
    if plan.matrix is not PairMatrix.INPUT:
        return PairMatrixResult(values)
    return PairMatrixResult(values[:-1, :-1], values[-1, :-1], values[:-1, -1], float(found[-1, -1]))


def _over_words(cells: Float64Array, words: list[int], axis: int) -> Float64Array:
    """Add up the cells of each word; a row or column behind those of tokens stays by itself."""
    rest = cells.shape[axis] - len(words)
    return sum_over_words(cells, words + [max(words) + 1] * rest, axis)


def _interaction(first: Found, second: Found) -> Float64Array:
    assert first.left_out is not None  # noqa: S101 - the plan has seen to it
    assert second.left_out is not None  # noqa: S101
    return interaction_matrix(
        (unit(first.embedding), first.left_out), (unit(second.embedding), second.left_out)
    )


def _output(first: Found, second: Found, plan: ExplanationPlan) -> Float64Array:
    sides = []
    for side in (first, second):
        assert side.vectors is not None  # noqa: S101 - the plan has seen to it
        assert side.vectors.hidden_state is not None  # noqa: S101
        sides.append((side.vectors.hidden_state, side.text.weights))
    lengths = float(np.linalg.norm(first.embedding) * np.linalg.norm(second.embedding))
    return output_matrix(sides[0], sides[1], lengths, plan.dimensions)


def words_of(tokens: Tokens) -> list[int]:
    """Return the number of each token's word, from 0 in the order in which words begin.

    The tokens of a word have one text and one `word_index`; one that has none is a word of its own.
    """
    is_special = [source is TokenSource.SPECIAL for source in tokens.sources]
    is_second = [source is TokenSource.SECOND_TEXT for source in tokens.sources]
    return [int(word) for word in TextUnits.of(tokens.words, is_special, is_second).words]
