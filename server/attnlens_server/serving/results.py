"""Typed results of all methods, independent of the protocol."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens.explanations import ExplainMethod
from attnlens.patterns import Band, Pattern
from attnlens.reductions import Reduced
from attnlens_server.bundle import Layout, Output
from attnlens_server.engine import ItemResult
from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.serving.requests import FLOAT16, DataType
from attnlens_server.serving.validation import QueryPlan
from attnlens_server.text import EncodedInput, Tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in seconds; over several batches, the longest of each."""

    tokenize_s: float
    queue_s: float
    compute_s: float


@dataclass(slots=True)
class CallMetrics:
    """What a call has used so far, for whoever logs its end, however it ends.

    Attributes:
        num_inputs: texts, or pairs of them.
        num_tokens: of all texts that were tokenized; those of a prompt and of a target count.
        tokenize_s: seconds; these three are 0 until the model has run.
        queue_s: the longest wait for a batch.
        compute_s: the longest batch.
    """

    num_inputs: int = 0
    num_tokens: int = 0
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0

    def add(self, timings: Timings) -> Timings:
        """Note the times of one job, and return them."""
        self.tokenize_s += timings.tokenize_s
        self.queue_s += timings.queue_s
        self.compute_s += timings.compute_s
        return timings

    def at_least(self, timings: Timings) -> None:
        """Note the times of one batch of the only job."""
        self.tokenize_s = max(self.tokenize_s, timings.tokenize_s)
        self.queue_s = max(self.queue_s, timings.queue_s)
        self.compute_s = max(self.compute_s, timings.compute_s)


FloatArray = npt.NDArray[np.float32]
MAX_FLOAT16 = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of an input was used.

    Attributes:
        num_tokens: that the model saw.
        num_tokens_total: before truncation.
    """

    num_tokens: int
    num_tokens_total: int

    @property
    def truncated(self) -> bool:
        """Whether tokens were cut off."""
        return self.num_tokens < self.num_tokens_total


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """Embeddings (N, dimensions) in the type asked for."""

    embeddings: npt.NDArray[np.floating]
    usages: list[Usage]
    timings: Timings


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """What one query brought of one text, in fp32.

    Attributes:
        query: which.
        layers: the layer of each array.
        arrays: (K, T, T), (T, K) or, of a band or blocks, (K, T, W) each; with the mean over heads, K is 1.
        patterns: of each array that is a band or blocks, for the heads of the query.
    """

    query: QueryPlan
    layers: tuple[int, ...]
    arrays: tuple[FloatArray, ...]
    patterns: tuple[Pattern, ...] = ()


@dataclass(frozen=True, slots=True)
class ReducedAttention:
    """What the reduction of one query brought of one text.

    Attributes:
        query: which.
        layers: the layer of each entry of `parts`, or all that are joined in the only one.
        parts: what came of each.
    """

    query: QueryPlan
    layers: tuple[int, ...]
    parts: tuple[Reduced, ...]


@dataclass(frozen=True, slots=True)
class EncodedText:
    """What Encode has of one text.

    Attributes:
        tokens: those that the model saw.
        usage: how much of the text was used.
        last_hidden_state: (T, D) in fp32; None: not asked for.
        attention: one entry for each query; in a stream: empty.
    """

    tokens: Tokens
    usage: Usage
    last_hidden_state: FloatArray | None
    attention: tuple[AttentionResult | ReducedAttention, ...] = ()


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """What Encode has of all texts. Take each out of the list, so that nothing is in memory twice."""

    texts: list[EncodedText]
    timings: Timings


@dataclass(frozen=True, slots=True)
class StreamText:
    """The first part of each text of a stream.

    Attributes:
        input_index: the number of the text.
        text: everything but attention.
        num_attention_parts: how many parts with attention follow.
        timings: of the text.
    """

    input_index: int
    text: EncodedText
    num_attention_parts: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class StreamAttention:
    """A later part of a text of a stream: one layer of one query, or several layers joined by a reduction."""

    input_index: int
    attention: AttentionResult | ReducedAttention


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokens of one text, whatever the model's limit."""

    tokens: Tokens
    exceeds_max_tokens: bool


def usage(encoded: EncodedInput) -> Usage:
    """Say how much of an input was used."""
    return Usage(encoded.num_tokens, encoded.num_tokens_total)


def timings(tokenize_s: float, results: Sequence[ItemResult]) -> Timings:
    """Say where the time went."""
    return Timings(
        tokenize_s,
        queue_s=max(result.queue_s for result in results),
        compute_s=max(result.compute_s for result in results),
    )


class AttentionParts:
    """What came out for the attention of a text, handed out in the order of the queries."""

    def __init__(self, result: ItemResult, *, has_hidden_state: bool) -> None:
        self._arrays = iter(result.arrays[1 if has_hidden_state else 0 :])
        self._reduced = iter(result.reduced)

    def take(
        self, query: QueryPlan, parts: Sequence[tuple[Output, ...]]
    ) -> AttentionResult | ReducedAttention:
        """Join a query with what came out for some of its parts, which are the next ones."""
        outputs = [output for part in parts for output in part]
        if query.reduction is None:
            return attention_result(query, outputs, [next(self._arrays) for _ in outputs])
        layers = tuple(output.layer or 0 for output in outputs)
        return ReducedAttention(query, layers, tuple(next(self._reduced) for _ in parts))


def attention_result(
    query: QueryPlan, outputs: Sequence[Output], arrays: Sequence[FloatArray]
) -> AttentionResult:
    """Join a query with what came out for some of its layers."""
    patterns = tuple(
        output.pattern if isinstance(output.pattern, Band) else output.pattern.of_heads(query.heads)
        for output in outputs
        if output.pattern is not None and query.layout is not Layout.DENSE
    )
    return AttentionResult(query, tuple(output.layer or 0 for output in outputs), tuple(arrays), patterns)


def check_range(array: FloatArray, data_type: DataType) -> None:
    """Make sure that fp16 has the values of vectors, which unlike weights may be beyond it.

    Raises:
        InvalidFieldsError: a number would become infinite.
    """
    if data_type == FLOAT16:
        beyond = array[np.isfinite(array) & (np.abs(array) > MAX_FLOAT16)]
        if beyond.size:
            largest = beyond[np.abs(beyond).argmax()]
            text = (
                f"is DATA_TYPE_FLOAT16, which ends at {MAX_FLOAT16:.0f}, but the result has the value "
                f"{largest:.6g}: ask for DATA_TYPE_FLOAT32"
            )
            raise InvalidFieldsError([FieldViolation("data_type", text)])


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
