"""Estimates of memory, message sizes and computation, before the work starts."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from attnlens.costs import reduction_cost
from attnlens.explanations import ExplainMethod
from attnlens.reductions import AttentionReduction, sizes
from attnlens_server.bundle import RowSum
from attnlens_server.errors import ResponseTooLargeError, TooExpensiveError
from attnlens_server.serving.requests import (
    FLOAT32,
    AttentionView,
    DataType,
    EmbedPlan,
    EncodePlan,
    ExplanationPlan,
    Part,
    QueryPlan,
)
from attnlens_server.text import TextShape, Tokens

TEXT_MEMORY_BYTES = 4096  # per text: item, array headers, futures
TOKEN_MEMORY_BYTES = 384  # per token with its text and offsets
# Per UTF-8 byte of texts that are being tokenized, and of texts whose tokens are being described. Punctuation
# needs that much, since each character is a token. Words need less than a third.
TOKENIZING_BYTES, DESCRIBING_BYTES = 768, 1024
DECODING_BYTES = 128  # per token id while its text is computed
TOKEN_ID_BYTES = 16  # per queued token: id and type, int64
PART_BYTES = 1024  # per layer of a query: array headers, and its message without the data
UNIT_BYTES = 6  # per token: index of its unit, and whether it is special
_FLOAT, _DOUBLE = 4, 8
_SCORES_BYTES = 64  # per method in a message, without its values
_REMEDY = "request fewer heads, the mean over heads, a smaller reduction or DATA_TYPE_FLOAT16"


@dataclass(frozen=True, slots=True)
class ReplyCosts:
    """Message sizes and memory of a protocol's replies.

    Attributes:
        max_response_bytes: Maximum message size.
        text_bytes: Overhead per text or layer in a message: tags, lengths and numbers.
        tokens_bytes: Returns an upper bound on the size of tokens in a message.
        serialization_copies: Copies of a message in memory during serialization.
        sending_copies: Copies of a message in memory until the client has read it.
    """

    max_response_bytes: int
    text_bytes: int
    tokens_bytes: Callable[[Tokens], int]
    serialization_copies: int
    sending_copies: int

    @property
    def least_memory_bytes(self) -> int:
        """Memory of the largest reply: its fp32 arrays, at most twice the message in fp16, and the copies."""
        return (2 + self.serialization_copies) * self.max_response_bytes


class EncodeSizes(NamedTuple):
    """Sizes of a text in an Encode call.

    Attributes:
        message_bytes: Size in the message.
        memory_bytes: Memory until the response was serialized.
        running_bytes: Working memory while its reductions run.
    """

    message_bytes: int
    memory_bytes: int
    running_bytes: int

    def with_tokens(self, tokens_bytes: int) -> "EncodeSizes":
        """Return the sizes of the text with tokens of this size in the message."""
        return self._replace(message_bytes=self.message_bytes + tokens_bytes)


class ReplySizes:
    """Sizes of one model's replies, in bytes."""

    def __init__(self, hidden_size: int, costs: ReplyCosts) -> None:
        self._hidden_size = hidden_size
        self.costs = costs

    def check_embed(self, num_texts: int, plan: EmbedPlan) -> int:
        """Return the size of an Embed reply.

        Raises:
            ResponseTooLargeError: The size exceeds the limit.
        """
        size = num_texts * (plan.row_bytes + self.costs.text_bytes)
        if plan.ranges is not None:
            size += plan.ranges.nbytes
        self.check("the response", size, "send fewer texts")
        return size

    def tensor_bytes(self, shape: TextShape, plan: EncodePlan) -> int:
        """Return the size of a text in an Encode reply, without its tokens."""
        return self._text_part_bytes(shape.num_tokens, plan) + sum(
            self.costs.text_bytes + len(query.parts) * _message_bytes(query, shape, plan.data_type)
            for query in plan.queries
        )

    def check_encode(self, size: int) -> None:
        """Compare the size of an Encode reply with the limit.

        Raises:
            ResponseTooLargeError: The size exceeds the limit.
        """
        self.check("the response", size, f"use EncodeStream, send fewer texts or layers, or {_REMEDY}")

    def hidden_state_bytes(self, num_tokens: int, plan: EncodePlan) -> int:
        """Return the size of a text's token vectors in fp32."""
        return 4 * num_tokens * self._hidden_size if plan.hidden_state else 0

    def array_bytes(self, shape: TextShape, plan: EncodePlan) -> int:
        """Return the size of all engine outputs for a text in fp32."""
        attention = sum(len(query.parts) * part_bytes(query, shape) for query in plan.queries)
        return self.hidden_state_bytes(shape.num_tokens, plan) + attention

    def check_parts(self, field: str, shape: TextShape, plan: EncodePlan) -> int:
        """Return the size of a text's largest stream message, without its tokens.

        Raises:
            ResponseTooLargeError: The size exceeds the limit.
        """
        largest = self._text_part_bytes(shape.num_tokens, plan)
        self.check(f"the token vectors of {field}", largest, "use DATA_TYPE_FLOAT16 or a shorter text")
        for query in plan.queries:
            size = self.costs.text_bytes + _message_bytes(query, shape, plan.data_type)
            self.check(f"one layer of {field}", size, _REMEDY)
            largest = max(largest, size)
        return largest

    def check_text_part(self, field: str, tokens: Tokens, plan: EncodePlan) -> None:
        """Compare the size of a text's first stream message with the limit.

        Raises:
            ResponseTooLargeError: The size exceeds the limit.
        """
        size = self.costs.tokens_bytes(tokens) + self._text_part_bytes(len(tokens.ids), plan)
        self.check(f"the token vectors of {field}", size, "send a shorter text")

    def check(self, name: str, size: int, remedy: str) -> None:
        """Compare a message size with the limit. The error message contains `name` and `remedy`.

        Raises:
            ResponseTooLargeError: The size exceeds the limit.
        """
        if size > self.costs.max_response_bytes:
            raise ResponseTooLargeError(name, size, self.costs.max_response_bytes, remedy)

    def _text_part_bytes(self, num_tokens: int, plan: EncodePlan) -> int:
        values = num_tokens * self._hidden_size if plan.hidden_state else 0
        return self.costs.text_bytes + values * plan.data_type.itemsize


def _message_bytes(query: QueryPlan, shape: TextShape, data_type: DataType) -> int:
    """Return the size of one part of a query's result in a message."""
    if query.reduction is None:
        num_tokens = shape.num_tokens
        return query.num_values(num_tokens) * data_type.itemsize + query.pattern_bytes(num_tokens)
    units_bytes = UNIT_BYTES * shape.num_tokens if query.reduction.has_units else 0
    return units_bytes + _reduced_bytes(query, query.reduction, shape, data_type)


def part_bytes(query: QueryPlan, shape: TextShape) -> int:
    """Return the size of one part of a query's result in fp32."""
    if query.reduction is None:
        return 4 * query.num_values(shape.num_tokens)
    return _reduced_bytes(query, query.reduction, shape, FLOAT32)


def _reduced_bytes(
    query: QueryPlan, reduction: AttentionReduction, shape: TextShape, data_type: DataType
) -> int:
    return sizes.data_bytes(
        reduction,
        query.num_result_heads,
        shape.num_units(reduction),
        value_bytes=data_type.itemsize,
        is_distribution=query.row_sum in (RowSum.ONE, RowSum.GATE),
    )


def working_bytes(queries: Iterable[QueryPlan], num_tokens: int) -> int:
    """Return the working memory of a text's reductions, which run one after the other, in bytes."""
    return max(
        (
            sizes.working_bytes(query.reduction, len(query.heads), num_tokens)
            + _rows_bytes(query, num_tokens)
            for query in queries
            if query.reduction is not None
        ),
        default=0,
    )


def _rows_bytes(query: QueryPlan, num_tokens: int) -> int:
    """Return the memory of a band or blocks and their padded dense form, in bytes."""
    output, num_heads = query.outputs[0], len(query.heads)
    if output.pattern is None:
        return 0
    padded = num_heads * num_tokens**2  # assembled from whole blocks before it is cut to T
    return 4 * (output.num_values(num_tokens, num_heads) + padded)


class ReductionCosts:
    """Computation of one plan's reductions. Equal queries are computed and counted once per run."""

    def __init__(self, plan: EncodePlan, token_flops: int) -> None:
        self._token_flops = token_flops
        first: dict[QueryPlan, QueryPlan] = {}
        self._equal = {
            query.index: first.setdefault(replace(query, index=0), query)
            for query in plan.queries
            if query.reduction is not None
        }

    def check(self, runs: Iterable[tuple[Sequence[Part], int]], max_computed_tokens: int) -> int:
        """Return the cost of all runs.

        Args:
            runs: Parts and number of tokens of each run of the attention graph.
            max_computed_tokens: Limit, in tokens whose computation costs as much.

        Raises:
            TooExpensiveError: The cost exceeds the limit.
        """
        if not self._equal:
            return 0
        costs: Counter[int] = Counter()  # keyed by query index
        cache: dict[tuple[int, int, int], int] = {}
        counted: Sequence[Part] | None = None
        num_layers_of: Counter[int] = Counter()
        for parts, num_tokens in runs:
            if parts is not counted:  # most texts have the same parts
                counted, num_layers_of = parts, self._num_layers(parts)
            for index, num_layers in num_layers_of.items():
                key = index, num_layers, num_tokens
                if key not in cache:
                    cache[key] = self._cost(self._equal[index], num_layers, num_tokens)
                costs[index] += cache[key]
        if costs.total() > max_computed_tokens:
            fields = {f"attention[{index}].reduction": cost for index, cost in costs.items()}
            raise TooExpensiveError(fields, max_computed_tokens, "request fewer layers, heads or reductions")
        return costs.total()

    def _num_layers(self, parts: Sequence[Part]) -> Counter[int]:
        """Return the number of reduced layers by query index. Equal queries count once."""
        layers = {
            (self._equal[query.index].index, outputs[0].layer): len(outputs)
            for query, outputs in parts
            if query.reduction is not None
        }
        counts: Counter[int] = Counter()
        for (index, _), count in layers.items():
            counts[index] += count
        return counts

    def _cost(self, query: QueryPlan, num_layers: int, num_tokens: int) -> int:
        assert query.reduction is not None  # noqa: S101 - `_equal` has only queries with a reduction
        return reduction_cost(
            query.reduction,
            num_layers,
            len(query.heads),
            num_tokens,
            is_mean_of_heads=query.view is AttentionView.HEAD_MEAN,
            token_flops=self._token_flops,
        )


@dataclass(frozen=True, slots=True)
class ExplanationCosts:
    """Sizes and memory of explanations of one model, in bytes.

    Attributes:
        reply: Costs of replies.
        hidden_size: Hidden size D.
        max_dimensions: Maximum number of components of an embedding.
        heads: Number of heads in all layers.
        num_layers: Number of layers L.
    """

    reply: ReplyCosts
    hidden_size: int
    max_dimensions: int
    heads: int
    num_layers: int

    def message_bytes(self, tokens: Tokens, plan: ExplanationPlan) -> int:
        """Return an upper bound on the size of a text in a message."""
        count = len(tokens.ids)
        scores = len(plan.methods) * (_FLOAT * count + _SCORES_BYTES)
        words = 5 * count
        heads = _FLOAT * self.heads if plan.head_contributions else 0
        sums = _SCORES_BYTES if plan.is_logit else 0
        return self.reply.text_bytes + self.reply.tokens_bytes(tokens) + scores + words + heads + sums

    def matrix_bytes(self, num_tokens: tuple[int, int], plan: ExplanationPlan) -> int:
        """Return the size of a pair's matrix in a message."""
        rows, columns = num_tokens
        if plan.needs_input_matrix:
            return _FLOAT * (rows + 1) * (columns + 1) + 2 * _SCORES_BYTES
        return 0 if plan.matrix is None else _FLOAT * rows * columns

    def sweep_bytes(self, num_tokens: tuple[int, int], plan: ExplanationPlan) -> int:
        """Return the working memory of a pair's input matrix: two arrays (T + 1, E)."""
        return 2 * _DOUBLE * (min(num_tokens) + 1) * plan.dimensions if plan.needs_input_matrix else 0

    def memory_bytes(self, tokens: Tokens, plan: ExplanationPlan) -> int:
        """Return the memory of a text until its scores are computed."""
        count = len(tokens.ids)
        size = TEXT_MEMORY_BYTES + count * (TOKEN_ID_BYTES + TOKEN_MEMORY_BYTES)
        size += _DOUBLE * (2 * self.max_dimensions + 2 * self.heads) + len(plan.methods) * _DOUBLE * count
        if plan.needs_token_vectors:
            size += (_FLOAT + _DOUBLE) * count * self.hidden_size
        if plan.needs_masked_runs:
            size += count * (_DOUBLE * 2 * plan.dimensions + _FLOAT * count)
        if ExplainMethod.ROLLOUT in plan.methods:
            size += _FLOAT * self.num_layers * count**2
        elif ExplainMethod.RECEIVED_ATTENTION in plan.methods:
            size += _FLOAT * count**2
        return size
