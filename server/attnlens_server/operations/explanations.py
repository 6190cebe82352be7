"""Explanations of texts: plans, results of the graphs, and the scores that are computed from them.

Shapes: T tokens, W words, D hidden size, E dimensions of an embedding, L layers, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnlens.explanations import (
    MAX_MEASURED_TOKENS,
    MIN_MEASURED_TOKENS,
    ExplainLevel,
    ExplainMethod,
    Float64Array,
    PairMatrix,
    leave_one_out_effects,
    output_shares,
    pooling_weights,
    received_attention,
    rollout,
    sum_over_words,
    to_unit_length,
)
from attnlens.pooling import FloatArray, Pooling
from attnlens.reductions import TextUnits
from attnlens_server.bundle import Model
from attnlens_server.core.admission import Slots
from attnlens_server.core.usage import Clock, Usage, usage
from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.operations.inputs import Request
from attnlens_server.operations.values import check_finite
from attnlens_server.text import EncodedInput, Tokens, TokenSource
from attnlens_server.text.tokens import Span

_TINY = 1e-24  # added to |p|^2 in the contributions graph


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationRequest(Request):
    """Base class of ExplainRequest and CompareRequest."""

    truncate: bool | None = None
    pooling: Pooling | None = None
    dimensions: int = 0
    methods: Sequence[ExplainMethod] = ()
    level: ExplainLevel = ExplainLevel.TOKENS
    head_contributions: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationPlan:
    """Validated ExplainRequest or CompareRequest.

    Attributes:
        prompt: Text that precedes each of `inputs`.
        other_prompt: Text that precedes each text of the target, or the second text of each pair.
        truncate: Whether to truncate long texts. If None, the default of the server.
        pooling: Pooling of the token vectors.
        dimensions: Number of components E of an embedding.
        methods: Methods, each once.
        level: Whether scores are per token or per word.
        head_contributions: Whether to return contributions of heads.
        direction: Direction (E,), or None if it is the embedding of a text.
        matrix: Matrix of token pairs of a comparison, or None.
        is_logit: Whether p are the logits of a classifier. The target is then d . p, not d . p / |p|.
        is_dot: Whether a comparison is about the dot product of embeddings. The target is then d . p, where d
            is the embedding of the other text.
    """

    prompt: str
    other_prompt: str
    truncate: bool | None
    pooling: Pooling
    dimensions: int
    methods: tuple[ExplainMethod, ...]
    level: ExplainLevel
    head_contributions: bool
    direction: Float64Array | None = None
    matrix: PairMatrix | None = None
    is_logit: bool = False
    is_dot: bool = False

    @property
    def keeps_length(self) -> bool:
        """Whether the target is d . p, not d . p / |p|."""
        return self.is_logit or self.is_dot

    @property
    def needs_contributions(self) -> bool:
        """Whether to run the contributions graph."""
        return ExplainMethod.CONTRIBUTIONS in self.methods

    @property
    def needs_token_vectors(self) -> bool:
        """Whether the vectors of all tokens are needed."""
        return ExplainMethod.OUTPUT_SHARE in self.methods or self.matrix is PairMatrix.OUTPUT

    @property
    def needs_input_matrix(self) -> bool:
        """Whether to run the contributions graph once per component for each pair."""
        return self.matrix is PairMatrix.INPUT

    @property
    def needs_norms(self) -> bool:
        """Whether to run the contributions graph once per component for each text."""
        return ExplainMethod.CONTRIBUTION_NORM in self.methods

    @property
    def needs_masked_runs(self) -> bool:
        """Whether to run the model without each token."""
        return ExplainMethod.LEAVE_ONE_OUT in self.methods or self.matrix is PairMatrix.INTERACTION

    @property
    def needs_further_runs(self) -> bool:
        """Whether texts need more than one run of a graph."""
        return self.needs_masked_runs or self.needs_input_matrix or self.needs_norms


# --- Results of graphs ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """A tokenized text.

    Attributes:
        encoded: Token ids.
        weights: Pooling weights (T,).
        is_removable: For each token, whether leave-one-out may remove it.
    """

    encoded: EncodedInput
    weights: FloatArray
    is_removable: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors of a text.

    Attributes:
        embedding: Embedding p (E,), not normalized.
        hidden_state: Token vectors (T, D), or None if not needed.
    """

    embedding: Float64Array
    hidden_state: FloatArray | None


@dataclass(frozen=True, slots=True)
class Contributions:
    """Outputs of the contributions graph for a text.

    Attributes:
        embedding: Embedding p (E,), not normalized.
        scores: Contributions of tokens (T,).
        baseline: Contribution of the biases.
        heads: Contributions of heads (L, H), or None if not requested.
    """

    embedding: Float64Array
    scores: Float64Array
    baseline: float
    heads: Float64Array | None


@dataclass(frozen=True, slots=True)
class Call:
    """A running Explain or Compare call.

    Attributes:
        plan: Validated request.
        deadline: Deadline on the monotonic clock, or None.
        slots: Queue slots of the call.
        clock: Durations of the request.
    """

    plan: ExplanationPlan
    deadline: float | None
    slots: Slots
    clock: Clock


@dataclass(frozen=True, slots=True)
class GraphResults:
    """Results of all graphs for one text. None or empty if not needed.

    Attributes:
        text: The text.
        tokens: Tokens of the text.
        direction: Direction d (E,), or None for p / |p|.
        contributions: Results of the contributions graph.
        vectors: Vectors of the text.
        attention: Mean over heads (T, T) of the last layers.
        masked_embeddings: p / |p| without each token, (T, E).
        norms: |c| / |p| of each token or word, (T,) or (W,).
    """

    text: Text
    tokens: Tokens
    direction: Float64Array | None
    contributions: Contributions | None
    vectors: Vectors | None
    attention: Sequence[FloatArray]
    masked_embeddings: Float64Array | None
    norms: Float64Array | None = None

    @property
    def embedding(self) -> Float64Array:
        """Embedding p (E,), not normalized."""
        source = self.vectors or self.contributions
        assert source is not None  # noqa: S101 - one of the two graphs always runs
        return source.embedding


# --- Scores ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of one method for one text.

    Attributes:
        method: The method.
        values: Scores (T,) or (W,) in fp32. NaN where undefined.
        baseline: Contribution of the biases. None for methods that only rank tokens.
        expected_sum: Target value, which `sum` equals up to rounding. None for methods that only rank tokens.
        faithfulness: Rank correlation with leave-one-out, or None if it was not measured for this kind of
            question.
    """

    method: ExplainMethod
    values: FloatArray
    baseline: float | None
    expected_sum: float | None
    faithfulness: float | None

    @property
    def sum(self) -> float:
        """Sum of the defined values and the baseline."""
        return float(np.nansum(self.values, dtype=np.float64)) + (self.baseline or 0.0)


@dataclass(frozen=True, slots=True)
class SourceSums:
    """Sums of contributions by the source of the tokens, which add up to the target with the baseline."""

    text: float
    second_text: float
    prompt: float
    special_tokens: float
    token_ids: float
    baseline: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of one text with embedding p and direction d.

    Attributes:
        tokens: Tokens after truncation.
        usage: Number of tokens.
        unit_ids: Index of each token's word if scores are per word, else empty.
        target_value: d . p / |p|, or d . p for the logits p of a classifier.
        scores: One entry per method.
        head_contributions: Contributions (L, H), or None if not requested.
        sums_by_source: Sums of the contributions to a logit, else None.
    """

    tokens: Tokens
    usage: Usage
    unit_ids: Sequence[int]
    target_value: float
    scores: tuple[TokenScores, ...]
    head_contributions: FloatArray | None
    sums_by_source: SourceSums | None = None


def norm_in_graph(embedding: Float64Array) -> float:
    """Return |p| as the contributions graph computes it, not 0."""
    return float(np.sqrt(embedding @ embedding + _TINY))


def weights_of(encoded: EncodedInput, plan: ExplanationPlan) -> FloatArray:
    """Return the pooling weights (T,) of a text."""
    return pooling_weights(plan.pooling, encoded.num_tokens, encoded.num_excluded)


def direction_of(embedding: Float64Array, field: str) -> Float64Array:
    """Return p / |p| of the text `field`.

    Raises:
        InvalidFieldsError: The embedding is zero or not finite.
    """
    length = float(np.linalg.norm(embedding))
    if not (np.isfinite(length) and length > 0):
        problem = f"has an embedding of norm {length:g}, which has no direction: send another text"
        raise InvalidFieldsError([FieldViolation(field, problem)])
    return to_unit_length(embedding)


def explanation(results: GraphResults, field: str, plan: ExplanationPlan, model: Model) -> Explanation:
    """Return the explanation of the text `field`.

    Raises:
        InvalidFieldsError: The embedding has no direction, or scores overflow.
        InvalidResultError: A logit is not finite.
    """
    if plan.keeps_length:
        own = results.embedding
        check_finite(own[None], [field])
    else:
        own = direction_of(results.embedding, field)
    direction = own if results.direction is None else results.direction
    words = words_of(results.tokens) if plan.level is ExplainLevel.WORDS else []
    is_measured = _is_measured(results, plan, model, own)
    scores = []
    for method in plan.methods:
        values, baseline, expected_sum = _values(method, results, plan, (own, direction))
        if words and method is not ExplainMethod.CONTRIBUTION_NORM:
            values = sum_over_words(values, words)
        measured = model.faithfulness.get(int(method)) if is_measured else None
        scores.append(
            TokenScores(
                method,
                _as_float32(values, field, plan),
                baseline,
                expected_sum,
                measured.rank_correlation if measured else None,
            )
        )
    heads = results.contributions.heads if results.contributions else None
    value = float(direction @ own)
    return Explanation(
        results.tokens,
        usage(results.text.encoded),
        words,
        value,
        tuple(scores),
        None if heads is None else _as_float32(heads, field, plan),
        _sums_by_source(results.contributions, results.tokens) if plan.is_logit else None,
    )


def _is_measured(results: GraphResults, plan: ExplanationPlan, model: Model, own: Float64Array) -> bool:
    """Return whether the model's faithfulness was measured for this kind of question.

    The export explains tokens of short texts without a prompt towards the text's own embedding, with the
    default pooling and dimensions. For classifiers it explains the highest logit, and for rerankers the logit
    of a pair.

    Args:
        results: Results of the text.
        plan: Validated request.
        model: The model.
        own: p / |p| (E,), or the logits.
    """
    classifier, num_removable = model.classifier, sum(results.text.is_removable)
    is_short = results.text.encoded.num_tokens <= MAX_MEASURED_TOKENS
    if plan.level is ExplainLevel.WORDS or not is_short or num_removable < MIN_MEASURED_TOKENS:
        return False
    is_reranker = classifier is not None and classifier.is_reranker
    measured_sources = {TokenSource.TEXT, TokenSource.SECOND_TEXT} if is_reranker else {TokenSource.TEXT}
    if plan.prompt or set(results.tokens.sources) - {TokenSource.SPECIAL} != measured_sources:
        return False
    if plan.pooling is not model.pooling:
        return False
    if classifier is None:
        return results.direction is None and plan.dimensions == model.embedding_size
    direction = results.direction
    return direction is not None and np.array_equal(direction, np.eye(len(own))[own.argmax()])


def _sums_by_source(contributions: Contributions | None, tokens: Tokens) -> SourceSums | None:
    if contributions is None:
        return None
    sums = dict.fromkeys(TokenSource, 0.0)
    for source, score in zip(tokens.sources, contributions.scores.tolist(), strict=True):
        sums[source] += score
    return SourceSums(
        text=sums[TokenSource.TEXT],
        second_text=sums[TokenSource.SECOND_TEXT],
        prompt=sums[TokenSource.PROMPT],
        special_tokens=sums[TokenSource.SPECIAL],
        token_ids=sums[TokenSource.IDS],
        baseline=contributions.baseline,
    )


def words_of_document(text: Explanation) -> tuple[list[Span], list[float]]:
    """Return the spans in code points of a reranked document's words or tokens, and their contributions."""
    rows = [row for row, source in enumerate(text.tokens.sources) if source is TokenSource.SECOND_TEXT]
    units = text.unit_ids or range(len(text.tokens.ids))
    spans: dict[int, Span] = {}
    for row in rows:
        start, end = text.tokens.chars[row]
        first, last = spans.get(units[row], (start, end))
        spans[units[row]] = min(first, start), max(last, end)
    [scores] = (each for each in text.scores if each.method is ExplainMethod.CONTRIBUTIONS)
    return list(spans.values()), [float(scores.values[unit]) for unit in spans]


def _as_float32(values: Float64Array, field: str, plan: ExplanationPlan) -> FloatArray:
    """Convert scores to float32.

    Raises:
        InvalidFieldsError: A score overflows.
    """
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if np.isinf(rounded).any():
        largest = float(np.nanmax(np.abs(values)))
        problem = f"has scores up to {largest:.3g}, which overflow float32: send another text"
        if plan.direction is not None:
            field = "direction"
            problem = f"is too long, since a score of {largest:.3g} overflows float32: shorten it"
        raise InvalidFieldsError([FieldViolation(field, problem)])
    return rounded


def _values(
    method: ExplainMethod,
    results: GraphResults,
    plan: ExplanationPlan,
    directions: tuple[Float64Array, Float64Array],
) -> tuple[Float64Array, float | None, float | None]:
    """Return the scores (T,) of a method, its baseline, and the expected sum of both.

    Contribution norms are (W,) if scores are per word. Methods that only rank tokens have no baseline or sum.
    """
    own, direction = directions
    weights, target = results.text.weights, float(direction @ own)
    if method is ExplainMethod.CONTRIBUTIONS:
        assert results.contributions is not None  # noqa: S101 - the plan needs them; so below
        return results.contributions.scores.astype(np.float64), results.contributions.baseline, target
    if method is ExplainMethod.OUTPUT_SHARE:
        assert results.vectors is not None  # noqa: S101
        assert results.vectors.hidden_state is not None  # noqa: S101
        length = 1.0 if plan.is_dot else float(np.linalg.norm(results.embedding))
        return output_shares(results.vectors.hidden_state, weights, direction, length), 0.0, target
    if method is ExplainMethod.LEAVE_ONE_OUT:
        assert results.masked_embeddings is not None  # noqa: S101
        return leave_one_out_effects(direction, own, results.masked_embeddings), None, None
    if method is ExplainMethod.CONTRIBUTION_NORM:
        assert results.norms is not None  # noqa: S101
        return results.norms, None, None
    if method is ExplainMethod.ROLLOUT:
        rows = np.ones_like(weights) if plan.pooling is Pooling.MAX else weights
        return rollout(results.attention, rows), None, None
    return received_attention(results.attention[-1]), None, None


def words_of(tokens: Tokens) -> list[int]:
    """Return the index of each token's word, numbered from 0 in order of appearance.

    Tokens of one text with the same `word_index` form a word. A token without one is a word of its own.
    """
    is_special = [source is TokenSource.SPECIAL for source in tokens.sources]
    is_second = [source is TokenSource.SECOND_TEXT for source in tokens.sources]
    return [int(word) for word in TextUnits.of(tokens.words, is_special, is_second).words]
