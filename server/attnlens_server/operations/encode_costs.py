"""Sizes and computation of Encode, before the work starts."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from attnlens.costs import reduction_cost
from attnlens.reductions import AttentionReduction, sizes
from attnlens_server.bundle import RowSum
from attnlens_server.core.reply_costs import UNIT_BYTES, ReplyCosts
from attnlens_server.errors import TooExpensiveError
from attnlens_server.operations.attention import AttentionView, EncodePlan, Part, QueryPlan
from attnlens_server.operations.values import FLOAT32, DataType
from attnlens_server.text import TextShape, Tokens

_REMEDY = "request fewer heads, the mean over heads, a smaller reduction or DATA_TYPE_FLOAT16"


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
    """Sizes of one model's Encode replies, in bytes."""

    def __init__(self, hidden_size: int, costs: ReplyCosts) -> None:
        self._hidden_size = hidden_size
        self.costs = costs

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
        self.costs.check("the response", size, f"use EncodeStream, send fewer texts or layers, or {_REMEDY}")

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
        self.costs.check(f"the token vectors of {field}", largest, "use DATA_TYPE_FLOAT16 or a shorter text")
        for query in plan.queries:
            size = self.costs.text_bytes + _message_bytes(query, shape, plan.data_type)
            self.costs.check(f"one layer of {field}", size, _REMEDY)
            largest = max(largest, size)
        return largest

    def check_text_part(self, field: str, tokens: Tokens, plan: EncodePlan) -> None:
        """Compare the size of a text's first stream message with the limit.

        Raises:
            ResponseTooLargeError: The size exceeds the limit.
        """
        size = self.costs.tokens_bytes(tokens) + self._text_part_bytes(len(tokens.ids), plan)
        self.costs.check(f"the token vectors of {field}", size, "send a shorter text")

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
