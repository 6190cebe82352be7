"""Typed results of all methods, independent of the protocol."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens.classifiers import ScoreActivation
from attnlens.explanations import ExplainMethod
from attnlens.patterns import Band, Pattern
from attnlens.reductions import Reduced
from attnlens.similarity import Similarity
from attnlens_server.bundle import Layout, Output
from attnlens_server.engine import ItemResult
from attnlens_server.errors import FieldViolation, InvalidFieldsError, InvalidResultError
from attnlens_server.serving.requests import FLOAT16, DataType, QueryPlan
from attnlens_server.serving.stages import Ran
from attnlens_server.text import EncodedInput, Tokens

FloatArray = npt.NDArray[np.float32]
MAX_FLOAT16 = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations in seconds. If there are several batches, the longest of each."""

    tokenize_s: float
    queue_s: float
    compute_s: float


@dataclass(slots=True)
class CallMetrics:
    """Resource use of a call, for the request log.

    Attributes:
        num_inputs: Number of texts or pairs.
        num_tokens: Number of tokens, including those of prompts and targets.
        tokenize_s: Tokenization time in seconds.
        queue_s: Longest wait for a batch in seconds. If the call has failed, the wait until then.
        compute_s: Longest batch in seconds. If the call has failed, its time until then.
        num_charged: Number of texts that were charged to the client.
        num_charged_tokens: Number of tokens that were charged to the client.
    """

    num_inputs: int = 0
    num_tokens: int = 0
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    num_charged: int = 0
    num_charged_tokens: int = 0


class Clock:
    """Durations of a request so far, which it adds to the metrics of its call.

    Args:
        metrics: Metrics of the call, which may have several requests.

    Attributes:
        timings: Tokenization time, and the longest queue and compute times of the runs.
    """

    def __init__(self, metrics: CallMetrics) -> None:
        self.timings = Timings(0.0, 0.0, 0.0)
        self._metrics = metrics

    def add(self, runs: Sequence[Ran] = (), *, tokenize_s: float = 0.0) -> None:
        """Add tokenization time, and runs that have ended or were abandoned."""
        before, metrics = self.timings, self._metrics
        after = self.timings = Timings(
            before.tokenize_s + tokenize_s,
            max([before.queue_s, *(run.queue_s for run in runs)]),
            max([before.compute_s, *(run.compute_s for run in runs)]),
        )
        metrics.tokenize_s += tokenize_s
        metrics.queue_s += after.queue_s - before.queue_s
        metrics.compute_s += after.compute_s - before.compute_s


@dataclass(frozen=True, slots=True)
class Usage:
    """Number of tokens of an input.

    Attributes:
        num_tokens: Number of tokens after truncation.
        num_tokens_total: Number of tokens before truncation.
    """

    num_tokens: int
    num_tokens_total: int

    @property
    def truncated(self) -> bool:
        """Whether the input was truncated."""
        return self.num_tokens < self.num_tokens_total


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """Embeddings (N, dimensions) in the requested data type, or quantized with `ranges` (2, dimensions)."""

    embeddings: npt.NDArray[Any]
    usages: list[Usage]
    timings: Timings
    ranges: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Relevance of a document.

    Attributes:
        index: Index of the document or pair in the request.
        score: Activation of the logit.
        logit: Logit, the maximum over the parts of the document.
        num_parts: Number of parts that were scored.
        part: Index of the part with that logit.
        explanation: Contributions of this part's tokens to the logit, if requested.
    """

    index: int
    score: float
    logit: float
    num_parts: int
    part: int
    explanation: "Explanation | None" = None


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Result of Score.

    Attributes:
        scores: With a query, sorted by descending logit. With pairs, in their order.
        activation: Function from logits to scores.
        usages: Number of tokens of each document or pair of the request, the sum over its parts.
        timings: Durations.
    """

    scores: list[Score]
    activation: ScoreActivation
    usages: list[Usage]
    timings: Timings


@dataclass(frozen=True, slots=True)
class ClassifyResult:
    """Result of Classify: logits and scores (N, C) in fp32."""

    labels: tuple[str, ...]
    logits: FloatArray
    scores: FloatArray
    activation: ScoreActivation
    usages: list[Usage]
    timings: Timings


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """Result of one query for one text, in fp32.

    Attributes:
        query: The query.
        layers: Layer of each array.
        arrays: Arrays (K, T, T), (T, K) or, for a band or blocks, (K, T, W). K is the number of heads, 1 for
            a mean over heads.
        patterns: Pattern of each array that is a band or blocks, for the heads of the query.
    """

    query: QueryPlan
    layers: tuple[int, ...]
    arrays: tuple[FloatArray, ...]
    patterns: tuple[Pattern, ...] = ()


@dataclass(frozen=True, slots=True)
class ReducedAttention:
    """Reduced result of one query for one text.

    Attributes:
        query: The query.
        layers: Layer of each part, or all layers that are joined in the only part.
        parts: Results of the reduction.
    """

    query: QueryPlan
    layers: tuple[int, ...]
    parts: tuple[Reduced, ...]


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Result of Encode for one text.

    Attributes:
        tokens: Tokens after truncation.
        usage: Number of tokens.
        last_hidden_state: Token vectors (T, D) in fp32, or None if not requested.
        attention: One entry per query. Empty in streams.
    """

    tokens: Tokens
    usage: Usage
    last_hidden_state: FloatArray | None
    attention: tuple[AttentionResult | ReducedAttention, ...] = ()


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """Result of Encode. Consumers should pop texts from the list to free memory early."""

    texts: list[EncodedText]
    timings: Timings


@dataclass(frozen=True, slots=True)
class StreamText:
    """First part of each text of a stream.

    Attributes:
        input_index: Index of the text in the request.
        text: Result without attention.
        num_attention_parts: Number of attention parts that follow.
        timings: Durations of the text.
    """

    input_index: int
    text: EncodedText
    num_attention_parts: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class StreamAttention:
    """Further part of a text of a stream: one layer of a query, or all layers that a reduction joins."""

    input_index: int
    attention: AttentionResult | ReducedAttention


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """All tokens of one text, without truncation."""

    tokens: Tokens
    exceeds_max_tokens: bool


def usage(encoded: EncodedInput) -> Usage:
    """Return the number of tokens of an input."""
    return Usage(encoded.num_tokens, encoded.num_tokens_total)


class AttentionParts:
    """Iterator over the attention outputs of a text, in the order of the queries."""

    def __init__(self, result: ItemResult, *, has_hidden_state: bool) -> None:
        self._arrays = iter(result.arrays[1 if has_hidden_state else 0 :])
        self._reduced = iter(result.reduced)

    def take(
        self, query: QueryPlan, parts: Sequence[tuple[Output, ...]]
    ) -> AttentionResult | ReducedAttention:
        """Return the result of a query for its next parts."""
        outputs = [output for part in parts for output in part]
        if query.reduction is None:
            return attention_result(query, outputs, [next(self._arrays) for _ in outputs])
        layers = tuple(output.layer or 0 for output in outputs)
        return ReducedAttention(query, layers, tuple(next(self._reduced) for _ in parts))


def attention_result(
    query: QueryPlan, outputs: Sequence[Output], arrays: Sequence[FloatArray]
) -> AttentionResult:
    """Return the result of a query for some of its layers."""
    patterns = tuple(
        output.pattern if isinstance(output.pattern, Band) else output.pattern.of_heads(query.heads)
        for output in outputs
        if output.pattern is not None and query.layout is not Layout.DENSE
    )
    return AttentionResult(query, tuple(output.layer or 0 for output in outputs), tuple(arrays), patterns)


def check_range(array: FloatArray, data_type: DataType) -> None:
    """Check that all values are in the range of the data type.

    Raises:
        InvalidFieldsError: A value would become infinite.
    """
    if data_type == FLOAT16:
        beyond = array[np.isfinite(array) & (np.abs(array) > MAX_FLOAT16)]
        if beyond.size:
            largest = beyond[np.abs(beyond).argmax()]
            problem = (
                f"is DATA_TYPE_FLOAT16, whose maximum is {MAX_FLOAT16:.0f}, but the result has the value "
                f"{largest:.6g}: use DATA_TYPE_FLOAT32"
            )
            raise InvalidFieldsError([FieldViolation("data_type", problem)])


def check_finite(vectors: npt.NDArray[np.floating], fields: Sequence[str] = ()) -> None:
    """Check that all embeddings (N, E) or logits (N, C) are finite.

    Args:
        vectors: One row for each text.
        fields: Paths of the texts. If empty, they are the inputs of the request.

    Raises:
        InvalidResultError: A value is NaN or infinite.
    """
    is_finite = np.isfinite(vectors).all(axis=1)
    if not is_finite.all():
        row = int(is_finite.argmin())
        raise InvalidResultError(fields[row] if fields else f"inputs[{row}]")


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


@dataclass(frozen=True, slots=True)
class ExplainResult:
    """Result of Explain."""

    texts: list[Explanation]
    timings: Timings


@dataclass(frozen=True, slots=True)
class PairMatrixResult:
    """Scores of each pair of tokens, or words, of two texts.

    The baselines belong to input matrices, and are None for others.

    Attributes:
        values: Scores (T, T') or (W, W').
        baseline_row: Biases of the first text with tokens or words of the second, (T',) or (W',).
        baseline_column: Tokens or words of the first text with biases of the second, (T,) or (W,).
        baseline: Biases of both.
    """

    values: FloatArray
    baseline_row: FloatArray | None = None
    baseline_column: FloatArray | None = None
    baseline: float | None = None

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        arrays = (self.values, self.baseline_row, self.baseline_column)
        return sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Explanation of the similarity of two texts. `matrix` is None if not requested."""

    a: Explanation
    b: Explanation
    similarity: float
    matrix: PairMatrixResult | None


@dataclass(frozen=True, slots=True)
class CompareResult:
    """Result of Compare. `similarity` is the function that compares embeddings."""

    pairs: list[Comparison]
    timings: Timings
    similarity: Similarity
