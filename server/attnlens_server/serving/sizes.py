"""What a call costs, known before the model runs: the bytes of its messages, and the memory that they take.

Letters: N texts, T tokens of a text, D hidden size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from attnlens.reductions import AttentionReduction, sizes
from attnlens_server.bundle import RowSum
from attnlens_server.errors import ResponseTooLargeError
from attnlens_server.serving.checks import EmbedPlan, EncodePlan, QueryPlan
from attnlens_server.serving.jobs import FLOAT32, DataType
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
        making_copies: of a message that is being made.
        sending_copies: of one that is not read yet.
    """

    max_response_bytes: int
    text_bytes: int
    tokens_bytes: Callable[[Tokens], int]
    making_copies: int
    sending_copies: int

    @property
    def least_memory_bytes(self) -> int:
        """What the largest reply takes in fp16: arrays in fp32, twice its size, and the copies."""
        return (2 + self.making_copies) * self.max_response_bytes


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
