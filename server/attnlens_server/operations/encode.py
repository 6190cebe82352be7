"""Encode: token vectors, attention or both for each text."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from attnlens.pooling import FloatArray
from attnlens_server.core.admission import Budget
from attnlens_server.core.loaded_model import LoadedModel
from attnlens_server.core.process import Process
from attnlens_server.core.reply_costs import (
    DESCRIBING_BYTES,
    PART_BYTES,
    TEXT_MEMORY_BYTES,
    TOKEN_ID_BYTES,
    TOKEN_MEMORY_BYTES,
    UNIT_BYTES,
)
from attnlens_server.core.usage import Clock, Timings, Usage, usage
from attnlens_server.engine import Item, ItemResult
from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.operations.attention import (
    MAX_QUERIES,
    AttentionParts,
    AttentionQuery,
    AttentionResult,
    EncodePlan,
    Part,
    ReducedAttention,
    check_reduction,
    check_rows,
    plan_query,
)
from attnlens_server.operations.encode_costs import EncodeSizes, ReductionCosts, ReplySizes, working_bytes
from attnlens_server.operations.operation import (
    MAX_INLINE_PARTS,
    Operation,
    TextSources,
    TruncatedRequest,
    input_name,
)
from attnlens_server.operations.values import FLOAT32, DataType
from attnlens_server.text import EncodedInput, TextShape, Tokens

Described = tuple[EncodedInput, Tokens, int]
"""Token ids and tokens of a text, and the size of the tokens in a message in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRequest(TruncatedRequest):
    """Request for token vectors, attention or both."""

    last_hidden_state: bool = False
    attention: Sequence[AttentionQuery] = ()
    data_type: DataType = FLOAT32


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


class EncodingOperation(Operation):
    """Steps that Encode and EncodeStream share."""

    def __init__(self, process: Process, model: LoadedModel) -> None:
        super().__init__(process, model)
        self._sizes = ReplySizes(model.spec.hidden_size, model.costs)

    def plan(self, request: EncodeRequest) -> EncodePlan:
        """Validate an Encode request.

        Raises:
            InvalidFieldsError: One or more fields are invalid.
        """
        prompt, violations = self._inputs.validate(request)
        if len(request.attention) > MAX_QUERIES:
            problem = f"has more than {MAX_QUERIES} queries: send several requests"
            violations.append(FieldViolation("attention", problem))
        numbered = list(enumerate(request.attention[:MAX_QUERIES]))
        queries = [plan_query(index, query, self._spec, violations) for index, query in numbered]
        for index, query in numbered:
            violations += check_reduction(f"attention[{index}]", query, self._spec, request.inputs)
        if violations:
            raise InvalidFieldsError(violations)
        has_hidden_state = request.last_hidden_state or not queries
        hidden_state = self._spec.outputs.hidden_state("attention" if queries else "embeddings")
        return EncodePlan(
            prompt=prompt,
            hidden_state=hidden_state if has_hidden_state else None,
            queries=tuple(query for query in queries if query is not None),
            data_type=request.data_type,
        )

    def _describe(self, request: EncodeRequest, portion: range, *, plan: EncodePlan) -> list[Described]:
        """Return the token ids and tokens of texts, and the message size of the tokens in bytes."""
        encoded = self._encoder.encode(
            request.inputs,
            portion,
            prompt=plan.prompt,
            truncate=request.truncate,
            with_records=True,
            with_units=plan.needs_units,
        )
        check_rows(plan.row_selections, portion.start, encoded)
        described = []
        for text in encoded:
            tokens = self._encoder.describe(text)
            described.append((text.without_record(), tokens, self._costs.tokens_bytes(tokens)))
        return described

    def _reductions_cost(self, plan: EncodePlan, runs: Iterable[tuple[Sequence[Part], int]]) -> int:
        """Return the cost of reductions in tokens. Raises TooExpensiveError if it exceeds the limit."""
        return ReductionCosts(plan, self._spec.token_flops).check(
            runs, self._model.config.max_computed_tokens
        )


class EncodeOperation(EncodingOperation):
    """Returns token vectors, attention or both for each text."""

    async def __call__(self, request: EncodeRequest, budget: Budget) -> EncodeResult:
        """Return token vectors, attention or both for each text.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        plan = await self._validated(request, self.plan)
        clock = Clock(budget.metrics)
        with self._process.admission.slots(plan.kind, len(request.inputs), budget.client):
            budget.charge_texts(len(request.inputs))
            started = time.monotonic()
            inputs, tokens = await self._described_inputs(request, plan, budget)
            clock.add(tokenize_s=time.monotonic() - started)
            is_slow = len(inputs) * (1 + len(plan.parts)) > MAX_INLINE_PARTS
            items, cost = await self._process.workers.run_if(is_slow, self._items, inputs, plan, budget)
            budget.charge_tokens(cost)
            results = await self._model.runner.run(items, plan.kind, budget.client, clock, input_name)
        texts = await self._process.workers.run_if(is_slow, _encoded_texts, inputs, tokens, results, plan)
        return EncodeResult(texts, clock.timings)

    async def _described_inputs(
        self, request: EncodeRequest, plan: EncodePlan, budget: Budget
    ) -> tuple[list[EncodedInput], list[Tokens]]:
        """Return the token ids and the tokens of all texts.

        Raises:
            ResponseTooLargeError: The response would exceed the limit. Raised as soon as this is known.
        """
        size = 0
        running: list[int] = []
        measured = cache(partial(self._measure, plan, budget))

        def describe(portion: range) -> list[tuple[EncodedInput, Tokens, EncodeSizes]]:
            return [
                (encoded, tokens, measured(encoded.shape).with_tokens(tokens_bytes))
                for encoded, tokens, tokens_bytes in self._describe(request, portion, plan=plan)
            ]

        def reserve(texts: list[tuple[EncodedInput, Tokens, EncodeSizes]]) -> None:
            nonlocal size
            budget.count_tokens(sum(encoded.num_tokens for encoded, _, _ in texts))
            size += sum(sizes.message_bytes for _, _, sizes in texts)
            running.extend(sizes.running_bytes for _, _, sizes in texts)
            self._sizes.check_encode(size)
            budget.memory.grow(sum(sizes.memory_bytes for _, _, sizes in texts))

        texts = await self._in_portions(
            TextSources(request.inputs, self._encoder.surroundings(plan.prompt), DESCRIBING_BYTES, budget),
            describe,
            reserve,
        )
        # Reductions run in the lanes, so at most one text per lane needs working memory at a time.
        budget.memory.grow(sum(sorted(running)[-self._model.engine.num_lanes :]))
        return [encoded for encoded, _, _ in texts], [tokens for _, tokens, _ in texts]

    def _measure(self, plan: EncodePlan, budget: Budget, shape: TextShape) -> EncodeSizes:
        """Return the sizes of a text in an Encode reply, without its tokens."""
        costs, num_tokens = self._costs, shape.num_tokens
        tensor_bytes = self._sizes.tensor_bytes(shape, plan)
        # The arrays of a text exist while its tensors are copied into the message.
        memory_bytes = self._sizes.array_bytes(shape, plan) + TEXT_MEMORY_BYTES
        memory_bytes += PART_BYTES * sum(len(query.parts) for query in plan.queries)
        memory_bytes += (costs.serialization_copies - 1) * tensor_bytes
        memory_bytes += num_tokens * (TOKEN_ID_BYTES + TOKEN_MEMORY_BYTES)
        memory_bytes += num_tokens * UNIT_BYTES * plan.needs_units
        memory_bytes += budget.conversion.memory_bytes(tensor_bytes, num_tokens, 1)
        return EncodeSizes(tensor_bytes, memory_bytes, working_bytes(plan.queries, num_tokens))

    def _items(
        self, inputs: Sequence[EncodedInput], plan: EncodePlan, budget: Budget
    ) -> tuple[list[Item], int]:
        """Return the items of all texts, and the cost of their reductions in tokens."""
        parts = plan.parts
        cost = self._reductions_cost(plan, ((parts, encoded.num_tokens) for encoded in inputs))
        outputs, reductions = plan.outputs(parts), plan.reduced_outputs(parts)
        items = [
            Item(
                encoded.input_ids,
                outputs,
                encoded.token_type_ids,
                budget.deadline,
                reductions,
                encoded.units,
            )
            for encoded in inputs
        ]
        return items, cost


def without_attention(
    encoded: EncodedInput, tokens: Tokens, result: ItemResult, plan: EncodePlan
) -> EncodedText:
    """Return the result of a text without its attention."""
    hidden = result.arrays[0] if plan.hidden_state else None
    return EncodedText(tokens, usage(encoded), hidden)


def _encoded_text(encoded: EncodedInput, tokens: Tokens, result: ItemResult, plan: EncodePlan) -> EncodedText:
    parts = AttentionParts(result, has_hidden_state=plan.hidden_state is not None)
    attention = tuple(parts.take(query, query.parts) for query in plan.queries)
    return replace(without_attention(encoded, tokens, result, plan), attention=attention)


def _encoded_texts(
    inputs: Sequence[EncodedInput], tokens: Sequence[Tokens], results: Sequence[ItemResult], plan: EncodePlan
) -> list[EncodedText]:
    return [_encoded_text(*text, plan) for text in zip(inputs, tokens, results, strict=True)]
