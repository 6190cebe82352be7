"""Service of one model, independent of the protocol.

Each method validates the request, acquires queue slots, tokenizes, reserves memory, runs the graphs and
builds the result. Everything runs on the event loop, except functions that are passed to `workers`:
validation of large requests, tokenization, and the last steps of results.
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from attnlens.classifiers import scores_of
from attnlens.costs import input_matrix_cost, masked_runs_cost, sweeps_cost
from attnlens.embedding_types import quantize
from attnlens.explanations import ExplainLevel, ExplainMethod, Float64Array, PairMatrix
from attnlens.pooling import FloatArray, finish
from attnlens_server import errors
from attnlens_server.bundle import Bundle, Model
from attnlens_server.clients import Client
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine, Item, ItemResult, RequestedOutput, TokenPooling
from attnlens_server.engine.sessions import give_back_freed_memory
from attnlens_server.serving.admission import Admission, Budget, Slots
from attnlens_server.serving.costs import (
    DECODING_BYTES,
    DESCRIBING_BYTES,
    PART_BYTES,
    TEXT_MEMORY_BYTES,
    TOKEN_ID_BYTES,
    TOKEN_MEMORY_BYTES,
    TOKENIZING_BYTES,
    UNIT_BYTES,
    EncodeSizes,
    ExplanationCosts,
    ReductionCosts,
    ReplyCosts,
    ReplySizes,
    working_bytes,
)
from attnlens_server.serving.execution import ItemRunner, Workers
from attnlens_server.serving.explanations import (
    MAX_INLINE_TEXTS,
    Call,
    GraphResults,
    Runs,
    Text,
    Vectors,
    direction_of,
    explanation,
    input_matrix,
    matrix,
    num_masked_runs,
    weights_of,
    words_of,
)
from attnlens_server.serving.requests import (
    FLOAT32,
    ClassifyRequest,
    CompareRequest,
    EmbedPlan,
    EmbedRequest,
    EncodePlan,
    EncodeRequest,
    ExplainRequest,
    ExplanationPlan,
    LogitsPlan,
    Part,
    Request,
    ScoreRequest,
    TokenizeRequest,
)
from attnlens_server.serving.results import (
    AttentionParts,
    ClassifyResult,
    Clock,
    CompareResult,
    Comparison,
    EmbedResult,
    EncodedText,
    EncodeResult,
    ExplainResult,
    Explanation,
    ScoreResult,
    StreamAttention,
    StreamText,
    Timings,
    TokenizedText,
    check_finite,
    check_range,
    usage,
)
from attnlens_server.serving.scoring import (
    ClassifierValidator,
    DocumentEncoder,
    ScoredInput,
    distinct,
    document_field,
    logits_of,
    scores,
)
from attnlens_server.serving.stages import mark, mark_run
from attnlens_server.serving.streams import Piece, Pieces, Window, cut_into_pieces, run_pieces
from attnlens_server.serving.validation import (
    ExplanationValidator,
    RequestValidator,
    check_rows,
    num_bytes,
    rename_error,
)
from attnlens_server.text import (
    EncodedInput,
    Input,
    InputEncoder,
    PairEncoder,
    TextEncoder,
    TextShape,
    Tokens,
    TokenSource,
    portions,
)

SomeRequest = TypeVar("SomeRequest", bound=Request)
Plan = TypeVar("Plan")
Tokenized = TypeVar("Tokenized")
Described = tuple[Text, Tokens]

MAX_INLINE_VALIDATION = 1 << 16
"""Characters and token ids that are validated on the event loop."""
MAX_INLINE_TOKENIZATION = 1 << 10
"""Characters and token ids that are tokenized on the event loop, in about half a millisecond."""
MAX_INLINE_PARTS = 1 << 8
"""Results and layers of attention that are prepared on the event loop, at about 5 us each."""
MAX_KEPT_BYTES = 1 << 25
"""Working memory that a worker thread keeps for the next texts."""
MAX_INLINE_RESULT_BYTES = 1 << 14
"""Size of embeddings that are finished on the event loop."""

_CHEAPER = "request fewer dimensions, or omit leave-one-out, contribution norms and the matrix"


class State(Enum):
    """Lifecycle state of the server."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TextSources:
    """Texts of a call to tokenize.

    Attributes:
        inputs: Inputs.
        prefix: Text that is tokenized with each input: its prompt, and the strings of a chat template.
        byte_memory: Working memory of the tokenizer for each byte of text.
        budget: Resources of the call.
        is_shared: Whether the prefix is tokenized only once for all inputs.
    """

    inputs: Sequence[Input]
    prefix: str
    byte_memory: int
    budget: Budget
    is_shared: bool = False

    def portions(self) -> Iterator[range]:
        """Yield ranges of inputs to tokenize together."""
        prefix_size = 0 if self.is_shared else len(self.prefix)
        return portions([prefix_size + each.size for each in self.inputs])

    def memory_bytes(self, portion: range) -> int:
        """Return the working memory of the tokenizer for a portion."""
        texts = (text for index in portion for text in self.inputs[index].texts)
        num_prefixes = 1 if self.is_shared else len(portion)
        return self.byte_memory * (sum(map(num_bytes, texts)) + num_prefixes * num_bytes(self.prefix))

    @property
    def max_memory_bytes(self) -> int:
        """Working memory of the tokenizer for the longest input."""
        return max(self.memory_bytes(range(index, index + 1)) for index in range(len(self.inputs)))


class ModelService:
    """Serves one bundle. Protocols pass requests and budgets, and serialize the results.

    Attributes:
        state: Lifecycle state of the server.
        problem: Reason why the server is not healthy although it accepts requests, or "".
        admission: Admission control.
        workers: Threads for slow functions.
        max_tokens: Maximum input length in tokens, special tokens included.
        takes_pairs: Whether an input may be a pair of texts.
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
        model = bundle.model
        self.state = State.STARTING
        self.problem = ""
        self.workers = Workers(config.worker_threads)
        self.admission = Admission(
            config.max_concurrent_inputs,
            max(config.call_memory_limit, costs.least_memory_bytes),
            engine.retry_after_s,
            config.max_calls,
        )
        self.max_tokens = max_tokens
        self.takes_pairs = bool(model.takes_pairs and text_encoder and text_encoder.takes_pairs)
        self._model = model
        self._dense = bundle.dense
        self._window_bytes = config.max_response_bytes
        self._max_computed_tokens = config.max_computed_tokens
        self._engine = engine
        self._runner = ItemRunner(engine, self.admission)
        self._runs = Runs(bundle, engine, self._runner, self.workers)
        self._tokenizers = asyncio.Semaphore(config.worker_threads)
        self._encoder = InputEncoder(
            text_encoder, max_tokens, exclude_prompt=model.exclude_prompt, auto_truncate=config.auto_truncate
        )
        self._validator = RequestValidator(
            model,
            config,
            max_tokens=max_tokens,
            has_tokenizer=text_encoder is not None,
            takes_pairs=self.takes_pairs,
            truncation_side=self.truncation_side,
        )
        self._explanations = ExplanationValidator(
            model,
            config,
            self._validator.inputs,
            has_contributions=engine.has_contributions,
            has_dense=bool(bundle.dense),
        )
        can_score = model.classifier is not None and model.classifier.is_reranker and self.takes_pairs
        self._classifiers = ClassifierValidator(
            model, self._validator.inputs, self._explanations, can_score=can_score
        )
        self._documents = (
            DocumentEncoder(PairEncoder(text_encoder), max_tokens) if can_score and text_encoder else None
        )
        self._sizes = ReplySizes(model.hidden_size, costs)
        num_layers, num_heads = model.contributions.heads if model.contributions else (0, 0)
        self._costs = ExplanationCosts(
            costs, model.hidden_size, model.max_dimensions, num_layers * num_heads, model.num_layers
        )

    @property
    def max_inputs(self) -> int:
        """Maximum number of texts of a request."""
        return self._validator.inputs.max_inputs

    @property
    def truncation_side(self) -> str:
        """Side of a long text that truncation removes, "left" or "right"."""
        return self._encoder.truncation_side

    @property
    def explain_methods(self) -> tuple[ExplainMethod, ...]:
        """Methods that Explain and Compare accept for this model."""
        return self._explanations.methods

    @property
    def pair_matrices(self) -> tuple[PairMatrix, ...]:
        """Matrices that Compare accepts for this model."""
        return self._explanations.matrices

    @property
    def is_serving(self) -> bool:
        """Whether the server accepts requests and is healthy."""
        return self.state is State.SERVING and not self.problem

    def check_serving(self) -> None:
        """Raise NotReadyError or ShuttingDownError unless the server accepts requests."""
        if self.state is State.STARTING:
            raise errors.NotReadyError("the server is starting: try again soon", retry_after_s=0.5)
        if self.state is State.DRAINING:
            raise errors.ShuttingDownError("the server is shutting down: use another server")
        if self.state is State.FAILED:
            raise errors.ShuttingDownError(
                "the engine has stopped: restart the server, or open the model again"
            )

    def check_healthy(self) -> None:
        """Raise the errors of `check_serving`, or NotReadyError with the reason if there is a problem."""
        self.check_serving()
        if self.problem:
            raise errors.NotReadyError(f"the server is not healthy: {self.problem}")

    def check_model(self, name: str, version: str) -> None:
        """Check that a request is for this model. An empty name or version matches any model.

        Raises:
            ModelNotFoundError: The name or the version is different.
        """
        model = self._model
        if name not in ("", model.name) or version not in ("", model.version):
            raise errors.ModelNotFoundError(name or model.name, model.name, version, model.version)

    async def embed(self, request: EmbedRequest, budget: Budget) -> EmbedResult:
        """Return one vector for each text.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        plan = await self._validate(request, self._validator.embed)
        num_texts, clock = len(request.inputs), Clock(budget.metrics)
        self.admission.acquire_slots("embeddings", num_texts, budget.client)
        try:
            budget.charge_texts(num_texts)
            result_bytes = self._sizes.check_embed(num_texts, plan)
            vector_bytes = FLOAT32.itemsize * num_texts * plan.dimensions if plan.is_quantized else 0
            budget.memory.grow(
                self._sizes.costs.serialization_copies * result_bytes
                + budget.conversion.memory_bytes(result_bytes, 0, num_texts)
                + vector_bytes
                + num_texts * TEXT_MEMORY_BYTES
            )
            inputs = await self._token_ids(request, plan.prompt, budget, clock)
            items = self._embed_items(inputs, plan, budget)
            results = await self._runner.run(items, "embeddings", budget.client, clock, _input_name)
            is_slow = bool(self._dense) or result_bytes + vector_bytes > MAX_INLINE_RESULT_BYTES
            embeddings = await self.workers.run_if(is_slow, self._embeddings, results, plan)
        finally:
            self.admission.release_slots("embeddings", num_texts, budget.client)
        return EmbedResult(embeddings, [usage(encoded) for encoded in inputs], clock.timings, plan.ranges)

    async def score(self, request: ScoreRequest, budget: Budget) -> ScoreResult:
        """Return the relevance of documents to a query, or of the second to the first text of pairs.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        plan = await self._validate(request, self._classifiers.score)
        if plan.explanation is not None and "Explain" in budget.client.denied:
            raise errors.PermissionDeniedError(
                "explanations of scores need the permission to call Explain: omit them, or ask the operator "
                "of the server to change its policy",
                metadata={"method": "Explain"},
            )
        firsts, rows = distinct(request.inputs)
        num_explained = min(request.top_n or len(firsts), len(firsts)) if plan.explanation else 0
        slots, clock = Slots(self.admission, budget.client), Clock(budget.metrics)
        try:
            slots.acquire({"logits": len(firsts), "contributions": num_explained})
            budget.charge_texts(len(request.inputs))
            result_bytes = len(rows) * self._sizes.costs.text_bytes
            self._sizes.check("the response", result_bytes, "send fewer texts")
            budget.memory.grow(
                self._sizes.costs.serialization_copies * result_bytes
                + budget.conversion.memory_bytes(result_bytes, 0, len(rows))
                + len(rows) * TEXT_MEMORY_BYTES
            )
            started = time.monotonic()
            inputs = await self._scored_inputs(request, plan, firsts, budget)
            num_parts = [len(scored.ranges) for scored in inputs]
            slots.acquire({"logits": sum(num_parts) - len(firsts)})
            clock.add(tokenize_s=time.monotonic() - started)
            call = Call(plan.explanation, budget.deadline, slots, clock) if plan.explanation else None
            explained: dict[int, Explanation] = {}
            explain = partial(self._explained_parts, request, firsts, inputs, budget)
            if call and num_explained == sum(num_parts) and self._runs.is_fp32:
                # The contributions graph computes the same logits.
                explained = await explain(dict.fromkeys(range(len(inputs)), 0), call)
                logits = np.array([[each.target_value] for each in explained.values()], np.float32)
            else:
                logits = await self._part_logits(request, firsts, inputs, budget, clock)
            found = scores(request, plan, rows, num_parts, logits)
            if call and not explained:
                chosen = {rows[each.index]: each.part for each in found}
                budget.charge_tokens(sum(inputs[row].tokens_of_part(part) for row, part in chosen.items()))
                explained = await explain(chosen, call)
        finally:
            slots.release()
        return ScoreResult(
            [replace(each, explanation=explained.get(rows[each.index])) for each in found],
            plan.activation,
            [inputs[row].usage for row in rows],
            clock.timings,
        )

    async def classify(self, request: ClassifyRequest, budget: Budget) -> ClassifyResult:
        """Return the logits and scores of each text.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        plan = await self._validate(request, self._classifiers.classify)
        assert self._model.classifier is not None  # noqa: S101 - ensured by the validation
        labels, num_texts = self._model.classifier.labels, len(request.inputs)
        clock = Clock(budget.metrics)
        with self.admission.slots("logits", num_texts, budget.client):
            budget.charge_texts(num_texts)
            result_bytes = num_texts * (2 * FLOAT32.itemsize * len(labels) + self._sizes.costs.text_bytes)
            result_bytes += len("".join(labels).encode()) + self._sizes.costs.text_bytes * len(labels)
            self._sizes.check("the response", result_bytes, "send fewer texts")
            budget.memory.grow(
                (1 + self._sizes.costs.serialization_copies) * result_bytes
                + budget.conversion.memory_bytes(result_bytes, 0, num_texts)
                + num_texts * TEXT_MEMORY_BYTES
            )
            inputs = await self._token_ids(request, plan.prompt, budget, clock)
            outputs = (self._logits_output(),)
            items = [
                Item(encoded.input_ids, outputs, encoded.token_type_ids, budget.deadline)
                for encoded in inputs
            ]
            results = await self._runner.run(items, "logits", budget.client, clock, _input_name)
        logits = logits_of(results)  # (N, C)
        return ClassifyResult(
            labels,
            logits,
            scores_of(logits, plan.activation).astype(np.float32),
            plan.activation,
            [usage(encoded) for encoded in inputs],
            clock.timings,
        )

    async def encode(self, request: EncodeRequest, budget: Budget) -> EncodeResult:
        """Return token vectors, attention or both for each text.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        plan = await self._validate(request, self._validator.encode)
        clock = Clock(budget.metrics)
        with self.admission.slots(plan.kind, len(request.inputs), budget.client):
            budget.charge_texts(len(request.inputs))
            started = time.monotonic()
            inputs, tokens = await self._described_inputs(request, plan, budget)
            clock.add(tokenize_s=time.monotonic() - started)
            is_slow = len(inputs) * (1 + len(plan.parts)) > MAX_INLINE_PARTS
            items, cost = await self.workers.run_if(is_slow, self._encode_items, inputs, plan, budget)
            budget.charge_tokens(cost)
            results = await self._runner.run(items, plan.kind, budget.client, clock, _input_name)
        texts = await self.workers.run_if(is_slow, _encoded_texts, inputs, tokens, results, plan)
        return EncodeResult(texts, clock.timings)

    async def encode_stream(
        self, request: EncodeRequest, budget: Budget
    ) -> AsyncGenerator[StreamText | StreamAttention]:
        """Yield the result of `encode` in parts: for each text a `StreamText`, then the layers of each query.

        Request the next part only after the previous one was sent. Close the generator to cancel the rest.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        plan = await self._validate(request, self._validator.encode)
        clock = Clock(budget.metrics)
        with self.admission.slots(plan.kind, 1, budget.client):
            budget.charge_texts(len(request.inputs))
            budget.memory.grow(len(request.inputs) * TEXT_MEMORY_BYTES)
            inputs = await self._token_ids(request, plan.prompt, budget, clock, plan)
            # The tokens of one text at a time are described again when they are sent.
            sources = TextSources(
                request.inputs, self._encoder.surroundings(plan.prompt), DESCRIBING_BYTES, budget
            )
            budget.memory.grow(sources.max_memory_bytes)
            is_slow = len(inputs) * (1 + len(plan.parts)) > MAX_INLINE_PARTS
            pieces, cost = await self.workers.run_if(is_slow, self._cut, inputs, plan, budget)
            budget.charge_tokens(cost)
            window = Window(
                lambda items, kind: self._engine.submit(items, kind=kind, client=budget.client),
                plan.kind,
                self.admission,
                budget.memory,
                self._window_bytes,
                clock,
            )
            started = run_pieces(window, pieces.start(budget.deadline), pieces.max_memory_bytes)
            async with aclosing(started) as results:
                async for piece, result in results:
                    mark_run([result], piece.item.queued_at)
                    elapsed = Timings(clock.timings.tokenize_s, result.queue_s, result.compute_s)
                    if piece.has_text:
                        tokens = await self.workers.run(self._stream_tokens, request, plan, piece.index)
                        text = _without_attention(inputs[piece.index], tokens, result, plan)
                        yield StreamText(piece.index, text, len(plan.parts), elapsed)
                    for part in _attention_parts(piece, result, plan):
                        yield part

    async def tokenize(self, request: TokenizeRequest, budget: Budget) -> AsyncGenerator[list[TokenizedText]]:
        """Yield the tokens of all texts, several texts at a time.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        prompt = await self._validate(request, self._validator.tokenize)
        costs, size = self._sizes.costs, 0
        with self.admission.slots("embeddings", len(request.inputs), budget.client):
            budget.charge_texts(len(request.inputs))
            sources = TextSources(
                request.inputs, self._encoder.surroundings(prompt), DESCRIBING_BYTES, budget
            )
            for portion in sources.portions():
                # The tokens remain in memory until the caller has serialized them.
                async with self._tokenizing(sources.memory_bytes(portion), budget):
                    texts, part_bytes = await self.workers.run(self._tokenize, request, portion, prompt)
                    mark("tokenize")
                    size += part_bytes
                    num_tokens = sum(len(text.tokens.ids) for text in texts)
                    budget.count_tokens(num_tokens)
                    self._sizes.check("the response", size, "send fewer or shorter texts")
                    # The part, and its copy in the whole.
                    budget.memory.grow(
                        costs.sending_copies * part_bytes
                        + budget.conversion.memory_bytes(part_bytes, num_tokens, len(texts))
                    )
                    yield texts

    async def decode(
        self, request: TokenizeRequest, budget: Budget, *, skip_special_tokens: bool
    ) -> list[str]:
        """Return the text of each input, which must consist of token ids.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        await self._validate(request, self._validator.tokenize)
        budget.charge_texts(len(request.inputs))
        budget.count_tokens(sum(each.size for each in request.inputs))
        texts: list[str] = []
        for portion in portions([each.size for each in request.inputs]):
            working_bytes = DECODING_BYTES * sum(request.inputs[index].size for index in portion)
            async with self._tokenizing(working_bytes, budget):
                decoded = await self.workers.run(
                    self._encoder.decode, request.inputs, portion, skip_special_tokens=skip_special_tokens
                )
            # The texts as Python strings, and in JSON.
            budget.memory.grow(3 * sum(map(sys.getsizeof, decoded)))
            texts += decoded
        return texts

    async def explain(self, request: ExplainRequest, budget: Budget) -> ExplainResult:
        """Return the contribution of each token of each text to its embedding or similarity.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        plan = await self._validate(request, self._explanations.explain)
        targets = request.target.inputs
        with self._explanation_slots(plan, len(request.inputs), len(targets), budget.client) as slots:
            budget.charge_texts(len(request.inputs))
            started = time.monotonic()
            texts = await self._described_texts(request.inputs, plan, budget)
            budget.charge_tokens(self._further_runs_cost([text for text, _ in texts], plan))
            target_texts = await self._target_texts(targets, plan, budget)
            clock = Clock(budget.metrics)
            clock.add(tokenize_s=time.monotonic() - started)
            call = Call(plan, budget.deadline, slots, clock)
            direction = await self._direction(target_texts, tuple(targets), call)
            found = await self._run_graphs(texts, [direction] * len(texts), call)
            fields = [f"inputs[{index}]" for index in range(len(found))]
            explained = await self.workers.run(_explained, found, fields, plan, self._model)
        return ExplainResult(explained, clock.timings)

    async def compare(self, request: CompareRequest, budget: Budget) -> CompareResult:
        """Return the contribution of each token of two texts to their similarity, for each pair of texts.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        plan = await self._validate(request, self._explanations.compare)
        count = len(request.inputs)
        with self._explanation_slots(plan, 2 * count, 2 * count, budget.client) as slots:
            budget.charge_texts(2 * count)
            started = time.monotonic()
            fields = [f"pairs[{index}].{side}" for side in "ab" for index in range(count)]
            described = await self._described_texts(request.inputs, plan, budget, fields[:count])
            described += await self._described_texts(
                request.second_inputs, plan, budget, fields[count:], prompt=plan.other_prompt
            )
            texts = [text for text, _ in described]
            pairs = list(zip(texts[:count], texts[count:], strict=True))
            self._reserve_matrices(pairs, plan, budget)
            budget.charge_tokens(self._further_runs_cost(texts, plan, pairs))
            clock = Clock(budget.metrics)
            clock.add(tokenize_s=time.monotonic() - started)
            call = Call(plan, budget.deadline, slots, clock)
            vectors = await self._runs.vectors(texts, call, with_tokens=plan.needs_token_vectors)
            own = (
                [each.embedding for each in vectors]
                if plan.is_dot
                else await self.workers.run_if(count > MAX_INLINE_TEXTS, _directions, vectors, fields)
            )
            found = await self._run_graphs(described, own[count:] + own[:count], call, vectors)
            input_matrices = [
                await input_matrix(first, second, self._runs, call) if plan.needs_input_matrix else None
                for first, second in pairs
            ]
            compared = await self.workers.run(_compared, found, fields, plan, self._model, input_matrices)
        return CompareResult(compared, clock.timings, self._model.similarity)

    # --- Validation and tokenization --------------------------------------------------------------

    async def _validate(self, request: SomeRequest, validate: Callable[[SomeRequest], Plan]) -> Plan:
        """Validate a request, in a worker thread if it is large."""
        self.check_model(request.model, request.model_version)
        plan = await self.workers.run_if(request.size > MAX_INLINE_VALIDATION, validate, request)
        mark("validate")
        return plan

    async def _in_portions(
        self,
        sources: TextSources,
        tokenize: Callable[[range], list[Tokenized]],
        reserve: Callable[[list[Tokenized]], None],
        *,
        is_slow: bool = True,
    ) -> list[Tokenized]:
        """Tokenize inputs portion by portion, and reserve the memory of each portion.

        A portion is short, so that a long request neither occupies a worker thread nor exceeds its memory.
        """
        texts: list[Tokenized] = []
        for portion in sources.portions():
            if is_slow:
                async with self._tokenizing(sources.memory_bytes(portion), sources.budget):
                    tokenized = await self.workers.run(tokenize, portion)
            else:
                tokenized = tokenize(portion)
            reserve(tokenized)
            texts += tokenized
        mark("tokenize")
        return texts

    @asynccontextmanager
    async def _tokenizing(self, memory_bytes: int, budget: Budget) -> AsyncGenerator[None]:
        """Reserve working memory of the tokenizer while the block runs.

        No more blocks run than there are worker threads, so that waiting calls hold no working memory. The
        memory of long texts is returned to the operating system, before another thread needs as much.
        """
        async with self._tokenizers:
            budget.memory.grow(memory_bytes)
            try:
                yield
                if memory_bytes > MAX_KEPT_BYTES:
                    await self.workers.run(give_back_freed_memory)
            finally:
                budget.memory.shrink(memory_bytes)

    async def _token_ids(
        self,
        request: EmbedRequest | EncodeRequest | ClassifyRequest,
        prompt: str,
        budget: Budget,
        clock: Clock,
        plan: EncodePlan | None = None,
    ) -> list[EncodedInput]:
        """Return the token ids of all texts."""
        token_bytes = TOKEN_ID_BYTES + (UNIT_BYTES if plan and plan.needs_units else 0)

        def reserve(texts: list[EncodedInput]) -> None:
            num_tokens = sum(text.num_tokens for text in texts)
            budget.count_tokens(num_tokens)
            budget.memory.grow(token_bytes * num_tokens)

        started = time.monotonic()
        surroundings = self._encoder.surroundings(prompt)
        inputs = await self._in_portions(
            TextSources(request.inputs, surroundings, TOKENIZING_BYTES, budget),
            partial(self._encode, request, prompt=prompt, plan=plan),
            reserve,
            is_slow=request.size + len(request.inputs) * len(surroundings) > MAX_INLINE_TOKENIZATION,
        )
        clock.add(tokenize_s=time.monotonic() - started)
        return inputs

    async def _scored_inputs(
        self, request: ScoreRequest, plan: LogitsPlan, firsts: Sequence[int], budget: Budget
    ) -> list[ScoredInput]:
        """Return the tokens of the inputs with the given indices, and the parts of their documents.

        Raises:
            TooExpensiveError: The parts beyond the first one of each document exceed the limit.
        """
        encoder = self._documents
        assert encoder is not None  # noqa: S101 - the validation rejects the request
        num_extra_tokens = 0

        def reserve(inputs: list[ScoredInput]) -> None:
            nonlocal num_extra_tokens
            num_extra_tokens += sum(each.num_extra_tokens for each in inputs)
            if num_extra_tokens > self._max_computed_tokens:
                costs = {"long_documents": num_extra_tokens}
                raise errors.TooExpensiveError(costs, self._max_computed_tokens, "truncate long documents")
            num_tokens = sum(each.num_tokens for each in inputs)
            num_extra_parts = sum(len(each.ranges) - 1 for each in inputs)
            budget.count_tokens(num_tokens)
            budget.memory.grow(2 * TOKEN_ID_BYTES * num_tokens + num_extra_parts * TEXT_MEMORY_BYTES)

        query = plan.prompt + (request.query or "")
        sources = TextSources(
            [request.inputs[index] for index in firsts],
            query,
            TOKENIZING_BYTES,
            budget,
            is_shared=encoder.encodes_query_once,
        )
        return await self._in_portions(
            sources,
            lambda portion: encoder.encode(request, firsts[portion.start : portion.stop], plan.prompt),
            reserve,
            is_slow=request.size + len(query) > MAX_INLINE_TOKENIZATION,
        )

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
        budget.memory.grow(sum(sorted(running)[-self._engine.num_lanes :]))
        return [encoded for encoded, _, _ in texts], [tokens for _, tokens, _ in texts]

    def _measure(self, plan: EncodePlan, budget: Budget, shape: TextShape) -> EncodeSizes:
        """Return the sizes of a text in an Encode reply, without its tokens."""
        costs, num_tokens = self._sizes.costs, shape.num_tokens
        tensor_bytes = self._sizes.tensor_bytes(shape, plan)
        # The arrays of a text exist while its tensors are copied into the message.
        memory_bytes = self._sizes.array_bytes(shape, plan) + TEXT_MEMORY_BYTES
        memory_bytes += PART_BYTES * sum(len(query.parts) for query in plan.queries)
        memory_bytes += (costs.serialization_copies - 1) * tensor_bytes
        memory_bytes += num_tokens * (TOKEN_ID_BYTES + TOKEN_MEMORY_BYTES)
        memory_bytes += num_tokens * UNIT_BYTES * plan.needs_units
        memory_bytes += budget.conversion.memory_bytes(tensor_bytes, num_tokens, 1)
        return EncodeSizes(tensor_bytes, memory_bytes, working_bytes(plan.queries, num_tokens))

    async def _described_texts(
        self,
        inputs: Sequence[Input],
        plan: ExplanationPlan,
        budget: Budget,
        fields: Sequence[str] = (),
        *,
        prompt: str | None = None,
    ) -> list[Described]:
        """Return texts to explain with their tokens.

        Raises:
            ResponseTooLargeError: The response would exceed the limit. Raised as soon as this is known.
        """
        message_bytes = 0

        def reserve(texts: list[Described]) -> None:
            nonlocal message_bytes
            budget.count_tokens(sum(text.encoded.num_tokens for text, _ in texts))
            message_bytes += self._reserve_explanations(texts, message_bytes, plan, budget)

        prompt = plan.prompt if prompt is None else prompt
        tokenize = partial(self._describe_texts, inputs, plan=plan, fields=fields, prompt=prompt)
        sources = TextSources(inputs, self._encoder.surroundings(prompt), DESCRIBING_BYTES, budget)
        return await self._in_portions(sources, tokenize, reserve)

    async def _target_texts(
        self, targets: dict[str, Input], plan: ExplanationPlan, budget: Budget
    ) -> list[Text]:
        """Return the texts of a target, given by their fields."""
        if not targets:
            return []
        inputs, fields = tuple(targets.values()), tuple(targets)

        def reserve(texts: list[Described]) -> None:
            budget.count_tokens(sum(text.encoded.num_tokens for text, _ in texts))
            budget.memory.grow(sum(self._costs.memory_bytes(tokens, plan) for _, tokens in texts))

        tokenize = partial(self._describe_texts, inputs, plan=plan, fields=fields, prompt=plan.other_prompt)
        surroundings = self._encoder.surroundings(plan.other_prompt)
        sources = TextSources(inputs, surroundings, DESCRIBING_BYTES, budget)
        return [text for text, _ in await self._in_portions(sources, tokenize, reserve)]

    # --- Limits -----------------------------------------------------------------------------------

    def _reserve_explanations(
        self, texts: Sequence[Described], message_bytes: int, plan: ExplanationPlan, budget: Budget
    ) -> int:
        """Reserve memory for the explanations of some texts, and return their size in the message.

        Args:
            texts: Texts.
            message_bytes: Size of the explanations that are already in the message.
            plan: Plan of the call.
            budget: Resources of the call.

        Raises:
            ResponseTooLargeError: The response would exceed the limit.
        """
        added = sum(self._costs.message_bytes(tokens, plan) for _, tokens in texts)
        self._sizes.check("the response", message_bytes + added, "send fewer or shorter texts")
        memory_bytes = sum(self._costs.memory_bytes(tokens, plan) for _, tokens in texts)
        num_tokens = sum(text.encoded.num_tokens for text, _ in texts)
        budget.memory.grow(
            memory_bytes
            + self._sizes.costs.serialization_copies * added
            + budget.conversion.memory_bytes(added, num_tokens, len(texts))
        )
        return added

    @contextmanager
    def _explanation_slots(
        self, plan: ExplanationPlan, num_texts: int, num_vectors: int, client: Client
    ) -> Iterator[Slots]:
        """Acquire the queue slots for the first runs of a call. `Runs` releases them as it proceeds."""
        slots = Slots(self.admission, client)
        try:
            slots.acquire(self._runs.first_slots(plan, num_texts, num_vectors))
            yield slots
        finally:
            slots.release()

    def _reductions_cost(self, plan: EncodePlan, runs: Iterable[tuple[Sequence[Part], int]]) -> int:
        """Return the cost of reductions in tokens. Raises TooExpensiveError if it exceeds the limit."""
        return ReductionCosts(plan, self._model.token_flops).check(runs, self._max_computed_tokens)

    def _reserve_matrices(
        self, pairs: Sequence[tuple[Text, Text]], plan: ExplanationPlan, budget: Budget
    ) -> None:
        """Reserve memory for the matrices of a comparison."""
        lengths = [(first.encoded.num_tokens, second.encoded.num_tokens) for first, second in pairs]
        matrix_bytes = sum(self._costs.matrix_bytes(length, plan) for length in lengths)
        sweep_bytes = max(self._costs.sweep_bytes(length, plan) for length in lengths)
        self._sizes.check("the response", matrix_bytes, "send fewer or shorter texts")
        budget.memory.grow(
            5 * matrix_bytes + budget.conversion.memory_bytes(matrix_bytes, 0, 0) + sweep_bytes
        )

    def _further_runs_cost(
        self, texts: Sequence[Text], plan: ExplanationPlan, pairs: Sequence[tuple[Text, Text]] = ()
    ) -> int:
        """Return the cost of all runs beyond the first one of each text, in tokens.

        Raises:
            TooExpensiveError: The cost exceeds the limit.
        """
        costs = {}
        if plan.needs_masked_runs:
            is_method = ExplainMethod.LEAVE_ONE_OUT in plan.methods
            runs = ((text.encoded.num_tokens, num_masked_runs(text)) for text in texts)
            field = _method_field(plan, ExplainMethod.LEAVE_ONE_OUT) if is_method else "matrix"
            costs[field] = sum(masked_runs_cost(length, num_runs) for length, num_runs in runs)
        if plan.needs_norms:
            costs[_method_field(plan, ExplainMethod.CONTRIBUTION_NORM)] = sum(
                sweeps_cost(text.encoded.num_tokens, plan.dimensions) for text in texts
            )
        if plan.needs_input_matrix:
            lengths = ((first.encoded.num_tokens, second.encoded.num_tokens) for first, second in pairs)
            costs["matrix"] = sum(input_matrix_cost(both, plan.dimensions) for both in lengths)
        if sum(costs.values()) > self._max_computed_tokens:
            raise errors.TooExpensiveError(costs, self._max_computed_tokens, _CHEAPER)
        return sum(costs.values())

    # --- Graph runs -------------------------------------------------------------------------------

    def _embed_items(self, inputs: Sequence[EncodedInput], plan: EmbedPlan, budget: Budget) -> list[Item]:
        hidden = self._model.outputs.hidden_state("embeddings")
        items = []
        for encoded in inputs:
            pooling = TokenPooling(plan.pooling, encoded.num_excluded)
            outputs = (RequestedOutput(hidden.name, hidden.layout, pooling),)
            items.append(Item(encoded.input_ids, outputs, encoded.token_type_ids, budget.deadline))
        return items

    def _encode_items(
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

    def _cut(self, inputs: Sequence[EncodedInput], plan: EncodePlan, budget: Budget) -> tuple[Pieces, int]:
        """Return the pieces of all texts, and the cost of their reductions in tokens."""
        piece_bytes = budget.memory.available_bytes // 2
        pieces = cut_into_pieces(
            inputs, plan, self._sizes, max_bytes=piece_bytes, conversion=budget.conversion
        )
        return pieces, self._reductions_cost(plan, pieces.graph_runs)

    def _logits_output(self) -> RequestedOutput:
        output = self._model.outputs.logits
        assert output is not None  # noqa: S101 - the validation rejects requests for other models
        return RequestedOutput(output.name, output.layout)

    def _score_items(self, inputs: Sequence[ScoredInput], budget: Budget) -> list[Item]:
        """Return the items of all parts. Runs in a worker thread if there are many."""
        outputs = (self._logits_output(),)
        return [
            Item(ids, outputs, types, budget.deadline)
            for scored in inputs
            for ids, types in (scored.pair.arrays(*part) for part in scored.ranges)
        ]

    async def _part_logits(
        self,
        request: ScoreRequest,
        indices: Sequence[int],
        inputs: Sequence[ScoredInput],
        budget: Budget,
        clock: Clock,
    ) -> FloatArray:
        """Return the logits (P, 1) of all parts of all documents."""
        items = await self.workers.run_if(
            request.size > MAX_INLINE_TOKENIZATION, self._score_items, inputs, budget
        )

        def name(part: int) -> str:
            of_parts = [index for index, each in zip(indices, inputs, strict=True) for _ in each.ranges]
            return document_field(request, of_parts[part])

        results = await self._runner.run(items, "logits", budget.client, clock, name)
        return logits_of(results)

    async def _explained_parts(
        self,
        request: ScoreRequest,
        indices: Sequence[int],
        inputs: Sequence[ScoredInput],
        budget: Budget,
        chosen: Mapping[int, int],
        call: Call,
    ) -> dict[int, Explanation]:
        """Return the explanations of one part of some inputs, by the place of the input.

        Args:
            request: Request.
            indices: Index of each input in the request.
            inputs: Tokenized inputs.
            budget: Resources of the call.
            chosen: Part to explain, by the place of its input in `inputs`.
            call: Call with the plan of the explanations.

        Raises:
            ResponseTooLargeError: The response would exceed the limit.
        """
        plan, encoder, message_bytes = call.plan, self._documents, 0
        assert encoder is not None  # noqa: S101 - the validation rejects the request
        parts = [inputs[row].explained(indices[row], part) for row, part in chosen.items()]

        def describe(portion: range) -> list[Described]:
            return [
                self._explained_text(*encoder.describe(request, parts[number], plan.prompt), plan)
                for number in portion
            ]

        def reserve(texts: list[Described]) -> None:
            nonlocal message_bytes
            message_bytes += self._reserve_explanations(texts, message_bytes, plan, budget)

        query = plan.prompt + (request.query or "")
        sources = TextSources([request.inputs[part.index] for part in parts], query, DESCRIBING_BYTES, budget)
        described = await self._in_portions(sources, describe, reserve)
        found = await self._run_graphs(described, [plan.direction] * len(described), call)
        fields = [document_field(request, part.index) for part in parts]
        explained = await self.workers.run(_explained, found, fields, plan, self._model)
        return dict(zip(chosen, explained, strict=True))

    async def _direction(
        self, targets: Sequence[Text], fields: Sequence[str], call: Call
    ) -> Float64Array | None:
        """Return the direction (E,) of a target. None for the embedding of each text itself.

        Raises:
            InvalidFieldsError: A text of the target has a zero embedding, or the two texts have the same one.
        """
        if not targets:
            return call.plan.direction
        vectors = await self._runs.vectors(targets, call)
        units = _directions(vectors, fields)
        if len(units) == 1:
            return units[0]
        difference = units[0] - units[1]
        if not difference.any():
            text = "has two texts with the same embedding, so their difference has no direction: change one"
            raise errors.InvalidFieldsError([errors.FieldViolation("contrast", text)])
        return difference

    async def _run_graphs(
        self,
        described: Sequence[Described],
        directions: Sequence[Float64Array | None],
        call: Call,
        vectors: Sequence[Vectors] | None = None,
    ) -> list[GraphResults]:
        """Run all graphs that the plan needs, except for `vectors` if they are given."""
        plan, runs = call.plan, self._runs
        texts = [text for text, _ in described]
        if vectors is None and not runs.needs_no_vectors(plan):
            vectors = await runs.vectors(texts, call, with_tokens=plan.needs_token_vectors)
        contributions = (
            await runs.contributions(texts, directions, call) if plan.needs_contributions else None
        )
        attention = await runs.attention(texts, call)
        masked = await runs.masked_embeddings(texts, call) if plan.needs_masked_runs else None
        norms: list[Float64Array | None] = [None] * len(texts)
        if plan.needs_norms:
            for index, (text, tokens) in enumerate(described):
                words = words_of(tokens) if plan.level is ExplainLevel.WORDS else []
                norms[index] = await runs.contribution_norms(text, words, call)
        return [
            GraphResults(
                text,
                tokens,
                directions[index],
                contributions[index] if contributions else None,
                vectors[index] if vectors else None,
                attention[index],
                masked[index] if masked else None,
                norms[index],
            )
            for index, (text, tokens) in enumerate(described)
        ]

    # --- In worker threads ------------------------------------------------------------------------

    def _encode(
        self,
        request: EmbedRequest | EncodeRequest | ClassifyRequest,
        portion: range,
        *,
        prompt: str,
        plan: EncodePlan | None,
    ) -> list[EncodedInput]:
        with_units = plan is not None and plan.needs_units
        encoded = self._encoder.encode(
            request.inputs, portion, prompt=prompt, truncate=request.truncate, with_units=with_units
        )
        if plan is not None:
            check_rows(plan.row_selections, portion.start, encoded)
        return encoded

    def _describe(
        self, request: EncodeRequest, portion: range, *, plan: EncodePlan
    ) -> list[tuple[EncodedInput, Tokens, int]]:
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
            described.append((text.without_record(), tokens, self._sizes.costs.tokens_bytes(tokens)))
        return described

    def _describe_texts(
        self,
        inputs: Sequence[Input],
        portion: range,
        *,
        plan: ExplanationPlan,
        fields: Sequence[str],
        prompt: str,
    ) -> list[Described]:
        try:
            encoded = self._encoder.encode(
                inputs, portion, prompt=prompt, truncate=plan.truncate, with_records=True
            )
        except (errors.InputTooLongError, errors.InvalidFieldsError) as error:
            raise (rename_error(error, fields) if fields else error) from None
        return [self._explained_text(text, self._encoder.describe(text), plan) for text in encoded]

    @staticmethod
    def _explained_text(encoded: EncodedInput, tokens: Tokens, plan: ExplanationPlan) -> Described:
        is_removable = tuple(source is not TokenSource.SPECIAL for source in tokens.sources)
        return Text(encoded.without_record(), weights_of(encoded, plan), is_removable), tokens

    def _stream_tokens(self, request: EncodeRequest, plan: EncodePlan, index: int) -> Tokens:
        """Return the tokens of a text of a stream. They are large, so they are only created when sent."""
        [(_, tokens, _)] = self._describe(request, range(index, index + 1), plan=plan)
        self._sizes.check_text_part(f"inputs[{index}]", tokens, plan)
        return tokens

    def _tokenize(
        self, request: TokenizeRequest, portion: range, prompt: str
    ) -> tuple[list[TokenizedText], int]:
        """Return the tokens of several texts, and their message size in bytes."""
        texts, size = [], 0
        for encoded in self._encoder.encode_whole(request.inputs, portion, prompt):
            tokens = self._encoder.describe(encoded)
            texts.append(TokenizedText(tokens, encoded.num_tokens > self.max_tokens))
            size += self._sizes.costs.tokens_bytes(tokens)
        return texts, size

    def _embeddings(self, results: Sequence[ItemResult], plan: EmbedPlan) -> npt.NDArray[Any]:
        """Return the embeddings (N, E) of pooled vectors.

        Raises:
            InvalidFieldsError: A value is beyond the range of the data type.
        InvalidResultError: A value is NaN or infinite.
        """
        vectors = finish(
            np.array([result.arrays[0] for result in results]),  # (N, D)
            self._dense,
            dimensions=plan.dimensions,
            normalize_first=plan.normalize_first,
            normalize_last=plan.normalize,
        )
        if self._dense:  # the engine has checked the pooled vectors
            check_finite(vectors)
        if plan.is_quantized:
            return quantize(vectors, plan.embedding_type, plan.ranges)
        check_range(vectors, plan.data_type)
        return vectors.astype(plan.data_type, copy=False)


def _input_name(index: int) -> str:
    return f"inputs[{index}]"


def _without_attention(
    encoded: EncodedInput, tokens: Tokens, result: ItemResult, plan: EncodePlan
) -> EncodedText:
    hidden = result.arrays[0] if plan.hidden_state else None
    return EncodedText(tokens, usage(encoded), hidden)


def _encoded_text(encoded: EncodedInput, tokens: Tokens, result: ItemResult, plan: EncodePlan) -> EncodedText:
    parts = AttentionParts(result, has_hidden_state=plan.hidden_state is not None)
    attention = tuple(parts.take(query, query.parts) for query in plan.queries)
    return replace(_without_attention(encoded, tokens, result, plan), attention=attention)


def _encoded_texts(
    inputs: Sequence[EncodedInput], tokens: Sequence[Tokens], results: Sequence[ItemResult], plan: EncodePlan
) -> list[EncodedText]:
    return [_encoded_text(*text, plan) for text in zip(inputs, tokens, results, strict=True)]


def _attention_parts(piece: Piece, result: ItemResult, plan: EncodePlan) -> Iterator[StreamAttention]:
    parts = AttentionParts(result, has_hidden_state=piece.has_text and plan.hidden_state is not None)
    for query, outputs in piece.parts:
        yield StreamAttention(piece.index, parts.take(query, [outputs]))


def _directions(vectors: Sequence[Vectors], fields: Sequence[str]) -> list[Float64Array]:
    return [direction_of(each.embedding, field) for each, field in zip(vectors, fields, strict=True)]


def _explained(
    found: Sequence[GraphResults], fields: Sequence[str], plan: ExplanationPlan, model: Model
) -> list[Explanation]:
    return [explanation(each, field, plan, model) for each, field in zip(found, fields, strict=True)]


def _compared(
    found: Sequence[GraphResults],
    fields: Sequence[str],
    plan: ExplanationPlan,
    model: Model,
    input_matrices: Sequence[Float64Array | None],
) -> list[Comparison]:
    explained = _explained(found, fields, plan, model)
    count = len(found) // 2
    return [
        Comparison(
            explained[index],
            explained[count + index],
            explained[index].target_value,
            matrix(found[index], found[count + index], plan, input_matrices[index]),
        )
        for index in range(count)
    ]


def _method_field(plan: ExplanationPlan, method: ExplainMethod) -> str:
    return f"methods[{plan.methods.index(method)}]"
