"""One model at the service of any protocol. Each method is the way of a job: check, tokenize, measure, run.

Everything here runs on the event loop except what is handed to `workers`: checks of large jobs, tokenizing,
and the last steps of embeddings.
"""

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from enum import Enum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from attnlens.pooling import finish
from attnlens_server import errors
from attnlens_server.bundle import Bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine, Item, ItemResult, TokenPooling, Wanted
from attnlens_server.serving.admission import Admission, Budget
from attnlens_server.serving.checks import Checks, EmbedPlan, EncodePlan, Part
from attnlens_server.serving.explanations import ExplanationChecks, ExplanationService
from attnlens_server.serving.jobs import EmbedJob, EncodeJob, Job, TokenizeJob
from attnlens_server.serving.reduction_checks import check_rows
from attnlens_server.serving.reduction_costs import ReductionCosts
from attnlens_server.serving.results import (
    AttentionParts,
    EmbedResult,
    EncodedText,
    EncodeResult,
    StreamAttention,
    StreamText,
    TokenizedText,
    check_range,
    timings,
    usage,
)
from attnlens_server.serving.runner import ItemRunner
from attnlens_server.serving.sizes import (
    TEXT_MEMORY_BYTES,
    TOKEN_MEMORY_BYTES,
    UNIT_BYTES,
    ReplyCosts,
    ReplySizes,
    working_bytes,
)
from attnlens_server.serving.streams import Piece, Window, cut_into_pieces, run_pieces
from attnlens_server.serving.workers import Workers
from attnlens_server.text import EncodedInput, InputEncoder, TextEncoder, Tokens, portions

SomeJob = TypeVar("SomeJob", bound=Job)
Plan = TypeVar("Plan")

TOKEN_ID_BYTES = 16  # of a token that waits: its id and its type
SMALL_JOB = 1 << 16  # characters and ids that are checked on the event loop
SHORT_JOB = 1 << 10  # and those that are tokenized there, in about half a millisecond
SMALL_REPLY = 1 << 14  # bytes of embeddings that are finished there


class State(Enum):
    """Where the server is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


class ModelService:
    """Serves one bundle. A protocol makes jobs, gives each call a budget, and makes messages of results.

    Attributes:
        state: where the server is in its life.
        admission: who may come in.
        workers: threads for what is slow.
        max_tokens: the longest input, special tokens included.
        takes_pairs: whether an input may be a pair of texts.
        explanations: what the tokens of texts did.
    """

    def __init__(
        self,
        bundle: Bundle,
        config: ServerConfig,
        engine: Engine,
        text_encoder: TextEncoder | None,
        *,
        max_tokens: int,
        costs: ReplyCosts,
    ) -> None:
        self.state = State.STARTING
        self.workers = Workers(config.worker_threads)
        self.admission = Admission(
            config.max_concurrent_inputs,
            max(config.max_memory_bytes, costs.least_memory_bytes),
            engine.retry_after_s,
        )
        self._model = bundle.model
        self._dense = bundle.dense
        self._window_bytes = config.max_response_bytes
        self._max_computed_tokens = config.max_computed_tokens
        self._engine = engine
        self._runner = ItemRunner(engine)
        self.max_tokens = max_tokens
        self.takes_pairs = bool(bundle.model.takes_pairs and text_encoder and text_encoder.takes_pairs)
        self._checks = Checks(
            bundle.model,
            config,
            max_tokens=max_tokens,
            has_tokenizer=text_encoder is not None,
            takes_pairs=self.takes_pairs,
        )
        self._encoder = InputEncoder(text_encoder, max_tokens, exclude_prompt=bundle.model.exclude_prompt)
        self._sizes = ReplySizes(bundle.model.hidden_size, costs)
        self.explanations = ExplanationService(
            bundle,
            config,
            engine,
            self._runner,
            checks=ExplanationChecks(
                bundle.model,
                config,
                self._checks.inputs,
                has_contributions=engine.has_contributions,
                has_dense=bool(bundle.dense),
            ),
            encoder=self._encoder,
            admission=self.admission,
            workers=self.workers,
            sizes=self._sizes,
        )

    def check_serving(self) -> None:
        """Raise NotReadyError or ShuttingDownError unless jobs are welcome."""
        if self.state is State.STARTING:
            raise errors.NotReadyError("the server is starting: try again soon", retry_after_s=0.5)
        if self.state is State.DRAINING:
            raise errors.ShuttingDownError("the server is shutting down: ask another one")
        if self.state is State.FAILED:
            raise errors.ShuttingDownError(
                "the engine has stopped: restart the server, or open the model again"
            )

    def check_model(self, name: str) -> None:
        """Make sure that the model is the one that is here.

        Raises:
            ModelNotFoundError: it is another.
        """
        self._checks.model_name(name)

    async def embed(self, job: EmbedJob, budget: Budget) -> EmbedResult:
        """Return one vector for each text.

        Raises:
            RequestError: what `errors` lists.
        """
        plan = await self._checked(job, self._checks.embed)
        num_texts = len(job.inputs)
        with self.admission.texts("embeddings", num_texts):
            reply_bytes = self._sizes.check_embed(num_texts, plan)
            making_bytes = self._sizes.costs.making_copies * reply_bytes
            budget.memory.grow(making_bytes + num_texts * TEXT_MEMORY_BYTES)
            inputs, tokenize_s = await self._ids(job, plan.prompt, budget)
            items = list(self._embed_items(inputs, plan, budget))
            results = await self._runner.run(items, "embeddings")
            is_slow = bool(self._dense) or reply_bytes > SMALL_REPLY
            embeddings = await self.workers.run_if(is_slow, self._finish, results, plan)
        took = budget.spent.add(timings(tokenize_s, results))
        return EmbedResult(embeddings, [usage(encoded) for encoded in inputs], took)

    async def encode(self, job: EncodeJob, budget: Budget) -> EncodeResult:
        """Return token vectors, attention or both for each text.

        Raises:
            RequestError: what `errors` lists.
        """
        plan = await self._checked(job, self._checks.encode)
        with self.admission.texts(plan.kind, len(job.inputs)):
            started = time.monotonic()
            inputs, tokens = await self._described(job, plan, budget)
            tokenize_s = time.monotonic() - started
            parts = plan.parts
            self._check_cost(plan, ((parts, encoded.num_tokens) for encoded in inputs))
            wanted = plan.wanted(parts)
            reduced = [part for part in parts if part[0].reduction is not None]
            items = [
                Item(
                    encoded.input_ids,
                    wanted,
                    encoded.token_type_ids,
                    budget.deadline,
                    plan.wanted_reductions(reduced, encoded.units),
                )
                for encoded in inputs
            ]
            results = await self._runner.run(items, plan.kind)
        texts = [_encoded_text(*of_text, plan) for of_text in zip(inputs, tokens, results, strict=True)]
        return EncodeResult(texts, budget.spent.add(timings(tokenize_s, results)))

    async def encode_stream(
        self, job: EncodeJob, budget: Budget
    ) -> AsyncGenerator[StreamText | StreamAttention]:
        """Yield the result of `encode` in parts: for each text a `StreamText`, then the layers of each query.

        The next part is asked for when the last one is sent: close the generator where that never happens.

        Raises:
            RequestError: what `errors` lists.
        """
        plan = await self._checked(job, self._checks.encode)
        with self.admission.texts(plan.kind, 1):
            budget.memory.grow(len(job.inputs) * TEXT_MEMORY_BYTES)
            inputs, tokenize_s = await self._ids(job, plan.prompt, budget, plan)
            room_bytes = budget.memory.room_bytes // 2
            pieces = cut_into_pieces(
                inputs, plan, self._sizes, room_bytes=room_bytes, deadline=budget.deadline
            )
            self._check_cost(plan, ((piece.parts, piece.item.num_tokens) for piece in pieces))
            window = Window(
                lambda items, kind: self._engine.submit(items, kind=kind),
                plan.kind,
                self.admission,
                budget.memory,
                self._window_bytes,
            )
            async with aclosing(run_pieces(window, pieces)) as results:
                async for piece, result in results:
                    took = timings(tokenize_s, [result])
                    budget.spent.at_least(took)
                    if piece.has_text:
                        tokens = await self.workers.run(self._tokens_of, job, plan, piece.index)
                        text = _without_attention(inputs[piece.index], tokens, result, plan)
                        yield StreamText(piece.index, text, len(plan.parts), took)
                    for part in _attention_parts(piece, result, plan):
                        yield part

    async def tokenize(self, job: TokenizeJob, budget: Budget) -> AsyncGenerator[list[TokenizedText]]:
        """Yield the tokens of all texts, some texts at a time.

        Raises:
            RequestError: what `errors` lists.
        """
        prompt = await self._checked(job, self._checks.tokenize)
        costs, size = self._sizes.costs, 0
        with self.admission.texts("embeddings", len(job.inputs)):
            for portion in portions([given.size for given in job.inputs]):
                texts, part_bytes = await self.workers.run(self._tokenize, job, portion, prompt)
                size += part_bytes
                budget.spent.num_tokens += sum(len(text.tokens.ids) for text in texts)
                self._sizes.check("the response", size, "send fewer or shorter texts")
                budget.memory.grow(costs.sending_copies * part_bytes)  # as a part, then in the whole
                yield texts

    # --- from jobs to token ids -------------------------------------------------------------------

    async def _checked(self, job: SomeJob, check: Callable[[SomeJob], Plan]) -> Plan:
        """Check a job: a large one in a worker thread."""
        return await self.workers.run_if(job.size > SMALL_JOB, check, job)

    async def _ids(
        self, job: EmbedJob | EncodeJob, prompt: str, budget: Budget, plan: EncodePlan | None = None
    ) -> tuple[list[EncodedInput], float]:
        """Return the token ids of all texts, and the seconds that it took."""
        token_bytes = TOKEN_ID_BYTES + (UNIT_BYTES if plan and plan.needs_units else 0)
        is_slow = job.size + len(job.inputs) * len(prompt) > SHORT_JOB
        started = time.monotonic()
        inputs: list[EncodedInput] = []
        for portion in portions([given.size for given in job.inputs]):
            encoded = await self.workers.run_if(is_slow, self._encode, job, portion, prompt, plan)
            num_tokens = sum(text.num_tokens for text in encoded)
            budget.spent.num_tokens += num_tokens
            budget.memory.grow(token_bytes * num_tokens)
            inputs += encoded
        return inputs, time.monotonic() - started

    async def _described(
        self, job: EncodeJob, plan: EncodePlan, budget: Budget
    ) -> tuple[list[EncodedInput], list[Tokens]]:
        """Return the token ids of all texts and what is told of their tokens.

        Raises:
            ResponseTooLargeError: as soon as it is known that the response would be.
        """
        inputs: list[EncodedInput] = []
        tokens: list[Tokens] = []
        sizes, size = self._sizes, 0
        running: list[int] = []
        for portion in portions([given.size for given in job.inputs]):
            described = await self.workers.run(self._describe, job, portion, plan)
            memory_bytes = 0
            for encoded, of_text, tokens_bytes in described:
                num_tokens = encoded.num_tokens
                budget.spent.num_tokens += num_tokens
                tensor_bytes = sizes.tensor_bytes(encoded, plan)
                size += tokens_bytes + tensor_bytes
                # The last text's arrays are there while its tensors are copied into the message.
                memory_bytes += sizes.array_bytes(encoded, plan) + TEXT_MEMORY_BYTES
                memory_bytes += (sizes.costs.making_copies - 1) * tensor_bytes
                memory_bytes += num_tokens * (TOKEN_ID_BYTES + TOKEN_MEMORY_BYTES)
                if plan.needs_units:
                    memory_bytes += num_tokens * UNIT_BYTES
                running.append(working_bytes(plan.queries, num_tokens))
                inputs.append(encoded)
                tokens.append(of_text)
            sizes.check_encode(size)
            budget.memory.grow(memory_bytes)
        # Texts are reduced where they run: at most one in each lane at a time.
        budget.memory.grow(sum(sorted(running)[-self._engine.num_lanes :]))
        return inputs, tokens

    def _check_cost(self, plan: EncodePlan, runs: Iterable[tuple[Sequence[Part], int]]) -> None:
        ReductionCosts(plan, self._model.token_flops).check(runs, self._max_computed_tokens)

    def _embed_items(self, inputs: Sequence[EncodedInput], plan: EmbedPlan, budget: Budget) -> Iterator[Item]:
        hidden = self._model.outputs.hidden_state("embeddings")
        for encoded in inputs:
            pooling = TokenPooling(plan.pooling, encoded.num_excluded)
            wanted = (Wanted(hidden.name, hidden.layout, pooling),)
            yield Item(encoded.input_ids, wanted, encoded.token_type_ids, budget.deadline)

    # --- in worker threads ------------------------------------------------------------------------

    def _encode(
        self, job: EmbedJob | EncodeJob, portion: range, prompt: str, plan: EncodePlan | None
    ) -> list[EncodedInput]:
        with_units = plan is not None and plan.needs_units
        encoded = self._encoder.encode(
            job.inputs, portion, prompt=prompt, truncate=job.truncate, with_units=with_units
        )
        if plan is not None:
            check_rows(plan.with_rows, portion.start, encoded)
        return encoded

    def _describe(
        self, job: EncodeJob, portion: range, plan: EncodePlan
    ) -> list[tuple[EncodedInput, Tokens, int]]:
        """Return texts as token ids, without records, their tokens, and the bytes of these."""
        encoded = self._encoder.encode(
            job.inputs,
            portion,
            prompt=plan.prompt,
            truncate=job.truncate,
            with_records=True,
            with_units=plan.needs_units,
        )
        check_rows(plan.with_rows, portion.start, encoded)
        described = []
        for text in encoded:
            tokens = self._encoder.describe(text)
            described.append((text.without_record(), tokens, self._sizes.costs.tokens_bytes(tokens)))
        return described

    def _tokens_of(self, job: EncodeJob, plan: EncodePlan, index: int) -> Tokens:
        """Return the tokens of a text of a stream. They are described only now: those of all are many."""
        [(_, tokens, _)] = self._describe(job, range(index, index + 1), plan)
        self._sizes.check_text_part(f"inputs[{index}]", tokens, plan)
        return tokens

    def _tokenize(self, job: TokenizeJob, portion: range, prompt: str) -> tuple[list[TokenizedText], int]:
        """Return the tokens of some texts, and their bytes in messages."""
        texts, size = [], 0
        for encoded in self._encoder.encode_whole(job.inputs, portion, prompt):
            tokens = self._encoder.describe(encoded)
            texts.append(TokenizedText(tokens, encoded.num_tokens > self.max_tokens))
            size += self._sizes.costs.tokens_bytes(tokens)
        return texts, size

    def _finish(self, results: Sequence[ItemResult], plan: EmbedPlan) -> npt.NDArray[np.floating]:
        """Turn each text's pooled vector into its embedding, and return them as one array (N, dimensions).

        Raises:
            InvalidFieldsError: a value is beyond the range of the chosen element type.
        """
        vectors = finish(
            np.array([result.arrays[0] for result in results]),  # (N, D)
            self._dense,
            dimensions=plan.dimensions,
            normalize_first=plan.normalize_first,
            normalize_last=plan.normalize,
        )
        check_range(vectors, plan.data_type)
        return vectors.astype(plan.data_type, copy=False)


def _without_attention(
    encoded: EncodedInput, tokens: Tokens, result: ItemResult, plan: EncodePlan
) -> EncodedText:
    """Return the result of a text, except for attention."""
    hidden = result.arrays[0] if plan.hidden_state else None
    return EncodedText(tokens, usage(encoded), hidden)


def _encoded_text(encoded: EncodedInput, tokens: Tokens, result: ItemResult, plan: EncodePlan) -> EncodedText:
    came = AttentionParts(result, has_hidden_state=plan.hidden_state is not None)
    attention = tuple(came.take(query, query.parts) for query in plan.queries)
    return replace(_without_attention(encoded, tokens, result, plan), attention=attention)


def _attention_parts(piece: Piece, result: ItemResult, plan: EncodePlan) -> Iterator[StreamAttention]:
    came = AttentionParts(result, has_hidden_state=piece.has_text and plan.hidden_state is not None)
    for query, outputs in piece.parts:
        yield StreamAttention(piece.index, came.take(query, [outputs]))
