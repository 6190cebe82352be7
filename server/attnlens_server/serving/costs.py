"""Costs."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from attnlens.costs import reduction_cost
from attnlens.reductions import AttentionReduction, sizes
from attnlens_server.bundle import RowSum
from attnlens_server.errors import ResponseTooLargeError, TooExpensiveError
from attnlens_server.serving.requests import FLOAT32, AttentionView, DataType
from attnlens_server.serving.validation import (
    RECEIVED_ATTENTION,
    ROLLOUT,
    EmbedPlan,
    EncodePlan,
    ExplanationPlan,
    Part,
    QueryPlan,
)
from attnlens_server.text import EncodedInput, Tokens

TEXT_MEMORY_BYTES = 4096  # of a text under way: its item, arrays' headers, futures
TOKEN_MEMORY_BYTES = 384  # of a token in columns
UNIT_BYTES = 6  # of a token in a message and in memory: the number of its unit, and whether it is special
FEWER = "ask for fewer heads, the mean over heads, a smaller reduction or DATA_TYPE_FLOAT16"


@dataclass(frozen=True, slots=True)
class ReplyCosts:
    """What replies of a protocol take.

    Attributes:
        max_response_bytes: the largest message.
        text_bytes: of a message for a text or a layer, beside what is counted: tags, lengths, numbers.
        tokens_bytes: returns the bytes of tokens in a message, or a little more.
        serialization_copies: of a message that is being made.
        sending_copies: of one that is not read yet.
    """

    max_response_bytes: int
    text_bytes: int
    tokens_bytes: Callable[[Tokens], int]
    serialization_copies: int
    sending_copies: int

    @property
    def least_memory_bytes(self) -> int:
        """What the largest reply takes in fp16: arrays in fp32, twice its size, and the copies."""
        return (2 + self.serialization_copies) * self.max_response_bytes


class ReplySizes:
    """Measures replies of one model."""

    def __init__(self, hidden_size: int, costs: ReplyCosts) -> None:
        self._hidden_size = hidden_size
        self.costs = costs

    def check_embed(self, num_texts: int, plan: EmbedPlan) -> int:
        """Return the size of the reply of Embed.

        Raises:
            ResponseTooLargeError: it is over the limit.
        """
        row_bytes = plan.dimensions * plan.data_type.itemsize
        size = num_texts * (row_bytes + self.costs.text_bytes)
        self.check("the response", size, "send fewer texts")
        return size

    def tensor_bytes(self, encoded: EncodedInput, plan: EncodePlan) -> int:
        """Return the size of what Encode returns of a text beside its tokens."""
        return self._text_part_bytes(encoded.num_tokens, plan) + sum(
            self.costs.text_bytes + len(query.parts) * _message_bytes(query, encoded, plan.data_type)
            for query in plan.queries
        )

    def check_encode(self, size: int) -> None:
        """Compare the size of the reply of Encode, or of a part of it, with the limit.

        Raises:
            ResponseTooLargeError: it is over the limit.
        """
        self.check("the response", size, f"use EncodeStream, send fewer texts or layers, or {FEWER}")

    def hidden_state_bytes(self, num_tokens: int, plan: EncodePlan) -> int:
        """Return the size of a text's token vectors as the engine gives them, in fp32."""
        return 4 * num_tokens * self._hidden_size if plan.hidden_state else 0

    def array_bytes(self, encoded: EncodedInput, plan: EncodePlan) -> int:
        """Return the size of all that the engine gives for a text, in fp32."""
        attention = sum(len(query.parts) * part_bytes(query, encoded) for query in plan.queries)
        return self.hidden_state_bytes(encoded.num_tokens, plan) + attention

    def check_parts(self, field: str, encoded: EncodedInput, plan: EncodePlan) -> int:
        """Return the size of the largest message of a stream for a text, its tokens not counted.

        Raises:
            ResponseTooLargeError: it is over the limit.
        """
        largest = self._text_part_bytes(encoded.num_tokens, plan)
        self.check(f"the token vectors of {field}", largest, "use DATA_TYPE_FLOAT16 or a shorter text")
        for query in plan.queries:
            size = self.costs.text_bytes + _message_bytes(query, encoded, plan.data_type)
            self.check(f"one layer of {field}", size, FEWER)
            largest = max(largest, size)
        return largest

    def check_text_part(self, field: str, tokens: Tokens, plan: EncodePlan) -> None:
        """Compare the size of the first message of a text of a stream with the limit.

        Raises:
            ResponseTooLargeError: it is over the limit.
        """
        size = self.costs.tokens_bytes(tokens) + self._text_part_bytes(len(tokens.ids), plan)
        self.check(f"the token vectors of {field}", size, "send a shorter text")

    def check(self, what: str, size: int, remedy: str) -> None:
        """Compare a size with the limit.

        Raises:
            ResponseTooLargeError: it is over the limit; the message calls it `what` and ends with `remedy`.
        """
        if size > self.costs.max_response_bytes:
            raise ResponseTooLargeError(what, size, self.costs.max_response_bytes, remedy)

    def _text_part_bytes(self, num_tokens: int, plan: EncodePlan) -> int:
        values = num_tokens * self._hidden_size if plan.hidden_state else 0
        return self.costs.text_bytes + values * plan.data_type.itemsize


def _message_bytes(query: QueryPlan, encoded: EncodedInput, data_type: DataType) -> int:
    """Return the size of a layer of a text, or of joined ones, in a message."""
    if query.reduction is None:
        num_tokens = encoded.num_tokens
        return query.num_values(num_tokens) * data_type.itemsize + query.pattern_bytes(num_tokens)
    units_bytes = UNIT_BYTES * encoded.num_tokens if query.reduction.has_units else 0
    return units_bytes + _reduced_bytes(query, query.reduction, encoded, data_type)


def part_bytes(query: QueryPlan, encoded: EncodedInput) -> int:
    """Return the size of a layer of a text, or of joined ones, as the engine gives it, in fp32."""
    if query.reduction is None:
        return 4 * query.num_values(encoded.num_tokens)
    return _reduced_bytes(query, query.reduction, encoded, FLOAT32)


def _reduced_bytes(
    query: QueryPlan, reduction: AttentionReduction, encoded: EncodedInput, data_type: DataType
) -> int:
    return sizes.data_bytes(
        reduction,
        query.num_result_heads,
        encoded.num_units(reduction),
        value_bytes=data_type.itemsize,
        is_distribution=query.row_sum in (RowSum.ONE, RowSum.GATE),
    )


def working_bytes(queries: Iterable[QueryPlan], num_tokens: int) -> int:
    """Return what reductions of a text of T = `num_tokens` take while they run, one after the other."""
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
    """Return what a band or blocks of a layer take beside the dense weights that they are put together to."""
    output, num_heads = query.outputs[0], len(query.heads)
    if output.pattern is None:
        return 0
    padded = num_heads * num_tokens**2  # blocks are put together whole, and then cut to T
    return 4 * (output.num_values(num_tokens, num_heads) + padded)


_CHEAPER = "ask for fewer layers, heads or reductions"


class ReductionCosts:
    """Estimates the reductions of one plan. Equal queries of one run are computed once, and counted once."""

    def __init__(self, plan: EncodePlan, token_flops: int) -> None:
        self._token_flops = token_flops
        first: dict[QueryPlan, QueryPlan] = {}
        self._equal = {
            query.index: first.setdefault(replace(query, index=0), query)
            for query in plan.queries
            if query.reduction is not None
        }

    def check(self, runs: Iterable[tuple[Sequence[Part], int]], max_computed_tokens: int) -> None:
        """Compare the cost of all runs with the limit.

        Args:
            runs: The parts and the number of tokens of each run of the attention graph.
            max_computed_tokens: The limit.

        Raises:
            TooExpensiveError: The cost is over the limit.
        """
        if not self._equal:
            return
        costs: Counter[int] = Counter()  # by index of the query
        known: dict[tuple[int, int, int], int] = {}
        for parts, num_tokens in runs:
            for index, num_layers in self._num_layers(parts).items():
                key = index, num_layers, num_tokens
                if key not in known:
                    known[key] = self._cost(self._equal[index], num_layers, num_tokens)
                costs[index] += known[key]
        if costs.total() > max_computed_tokens:
            fields = {f"attention[{index}].reduction": cost for index, cost in costs.items()}
            raise TooExpensiveError(fields, max_computed_tokens, _CHEAPER)

    def _num_layers(self, parts: Sequence[Part]) -> Counter[int]:
        """Return the number of layers that are reduced for each query, without those of equal queries."""
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
        assert query.reduction is not None  # noqa: S101 - only queries with a reduction are in `_equal`
        return reduction_cost(
            query.reduction,
            num_layers,
            len(query.heads),
            num_tokens,
            is_mean_of_heads=query.view is AttentionView.HEAD_MEAN,
            token_flops=self._token_flops,
        )


TOKEN_ID_BYTES = 16  # of a token that waits: its id and its type
_FLOAT, _DOUBLE = 4, 8
_SCORES_BYTES = 64  # of a method in a message beside its values


@dataclass(frozen=True, slots=True)
class ExplanationCosts:
    """Measures texts of one model.

    Attributes:
        reply: what replies take.
        hidden_size: D.
        max_dimensions: the components that an embedding may have.
        heads: L x H.
        num_layers: L.
    """

    reply: ReplyCosts
    hidden_size: int
    max_dimensions: int
    heads: int
    num_layers: int

    def message_bytes(self, tokens: Tokens, plan: ExplanationPlan) -> int:
        """Return the bytes of a text in a message, or a little more."""
        count = len(tokens.ids)
        scores = len(plan.methods) * (_FLOAT * count + _SCORES_BYTES)
        words = 5 * count
        heads = _FLOAT * self.heads if plan.head_contributions else 0
        return self.reply.text_bytes + self.reply.tokens_bytes(tokens) + scores + words + heads

    def matrix_bytes(self, num_tokens: tuple[int, int], plan: ExplanationPlan) -> int:
        """Return the bytes of the matrix of a pair in a message."""
        rows, columns = num_tokens
        if plan.needs_input_matrix:
            return _FLOAT * (rows + 1) * (columns + 1) + 2 * _SCORES_BYTES
        return 0 if plan.matrix is None else _FLOAT * rows * columns

    def sweep_bytes(self, num_tokens: tuple[int, int], plan: ExplanationPlan) -> int:
        """Return what an input matrix takes in memory while it is made: (T + 1, E) twice."""
        return 2 * _DOUBLE * (min(num_tokens) + 1) * plan.dimensions if plan.needs_input_matrix else 0

    def memory_bytes(self, tokens: Tokens, plan: ExplanationPlan) -> int:
        """Return what a text takes in memory until its scores are there."""
        count = len(tokens.ids)
        size = TEXT_MEMORY_BYTES + count * (TOKEN_ID_BYTES + TOKEN_MEMORY_BYTES)
        size += _DOUBLE * (2 * self.max_dimensions + 2 * self.heads) + len(plan.methods) * _DOUBLE * count
        if plan.needs_token_vectors:
            size += (_FLOAT + _DOUBLE) * count * self.hidden_size
        if plan.needs_masked_runs:
            size += count * (_DOUBLE * 2 * plan.dimensions + _FLOAT * count)
        if ROLLOUT in plan.methods:
            size += _FLOAT * self.num_layers * count**2
        elif RECEIVED_ATTENTION in plan.methods:
            size += _FLOAT * count**2
        return size
