"""The way of a job: check, tokenize, measure, run, make scores. What is slow is done by workers."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from attnlens.costs import input_matrix_cost, masked_runs_cost, sweeps_cost
from attnlens.explanations import ExplainLevel, ExplainMethod, Float64Array
from attnlens_server.bundle import Bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine
from attnlens_server.errors import (
    FieldViolation,
    InputTooLongError,
    InvalidFieldsError,
    TooExpensiveError,
)
from attnlens_server.serving.admission import Admission, Budget, Slots
from attnlens_server.serving.explanations.checks import (
    CONTRIBUTION_NORM,
    LEAVE_ONE_OUT,
    ExplanationChecks,
    ExplanationPlan,
)
from attnlens_server.serving.explanations.costs import ExplanationCosts
from attnlens_server.serving.explanations.fields import rename_error
from attnlens_server.serving.explanations.input_matrix import input_matrix
from attnlens_server.serving.explanations.jobs import CompareJob, ExplainJob, ExplanationJob
from attnlens_server.serving.explanations.results import CompareResult, Comparison, ExplainResult, Explanation
from attnlens_server.serving.explanations.runs import Call, Runs, Text, Vectors, weights_of
from attnlens_server.serving.explanations.scores import Found, direction_of, explanation, matrix, words_of
from attnlens_server.serving.runner import ItemRunner
from attnlens_server.serving.sizes import ReplySizes
from attnlens_server.serving.spent import Timings
from attnlens_server.serving.workers import Workers
from attnlens_server.text import EncodedInput, Input, InputEncoder, Tokens, TokenSource, portions

SomeJob = TypeVar("SomeJob", bound=ExplanationJob)

_CHEAPER = "ask for fewer dimensions, or leave out leave-one-out, contribution norms and the matrix"
SMALL_JOB = 1 << 16  # characters and ids that are checked on the event loop

Described = tuple[Text, Tokens]


class ExplanationService:
    """Explains embeddings of one bundle.

    Attributes:
        checks: says what can be asked for.
    """

    def __init__(
        self,
        bundle: Bundle,
        config: ServerConfig,
        engine: Engine,
        runner: ItemRunner,
        *,
        checks: ExplanationChecks,
        encoder: InputEncoder,
        admission: Admission,
        workers: Workers,
        sizes: ReplySizes,
    ) -> None:
        self.checks = checks
        self._model = bundle.model
        self._encoder = encoder
        self._admission = admission
        self._workers = workers
        self._sizes = sizes
        self._max_computed_tokens = config.max_computed_tokens
        self._runs = Runs(bundle, engine, runner, workers)
        num_layers, num_heads = bundle.model.contributions.heads if bundle.model.contributions else (0, 0)
        self._costs = ExplanationCosts(
            sizes.costs,
            bundle.model.hidden_size,
            bundle.model.max_dimensions,
            num_layers * num_heads,
            bundle.model.num_layers,
        )

    async def explain(self, job: ExplainJob, budget: Budget) -> ExplainResult:
        """Say what each token of each text did.

        Raises:
            RequestError: what `errors` lists.
        """
        plan = await self._checked(job, self.checks.explain)
        others = job.target.inputs
        with self._slots(plan, len(job.inputs), len(others)) as slots:
            started = time.monotonic()
            described = await self._described(job.inputs, plan, budget)
            self._check_cost([text for text, _ in described], plan)
            towards = await self._texts(tuple(others.values()), tuple(others), plan, budget)
            tokenize_s = time.monotonic() - started
            call = Call(plan, budget.deadline, slots)
            direction = await self._direction(towards, tuple(others), call)
            found = await self._found(described, [direction] * len(described), call)
            names = [f"inputs[{number}]" for number in range(len(found))]
            texts = await self._workers.run(self._explanations, found, names, plan)
        took = Timings(tokenize_s, call.clock.queue_s, call.clock.compute_s)
        return ExplainResult(texts, budget.spent.add(took))

    async def compare(self, job: CompareJob, budget: Budget) -> CompareResult:
        """Say what each token of each two texts did for their similarity.

        Raises:
            RequestError: what `errors` lists.
        """
        plan = await self._checked(job, self.checks.compare)
        count = len(job.inputs)
        with self._slots(plan, 2 * count, 2 * count) as slots:
            started = time.monotonic()
            names = [f"pairs[{number}].{side}" for side in "ab" for number in range(count)]
            described = await self._described(job.inputs, plan, budget, names[:count])
            described += await self._described(
                job.seconds, plan, budget, names[count:], prompt=plan.other_prompt
            )
            lengths = [text.encoded.num_tokens for text, _ in described]
            sizes = list(zip(lengths[:count], lengths[count:], strict=True))
            matrices = [self._costs.matrix_bytes(size, plan) for size in sizes]
            self._reserve(
                sum(matrices),
                5 * sum(matrices) + max(self._costs.sweep_bytes(size, plan) for size in sizes),
                budget,
            )
            texts = [text for text, _ in described]
            pairs = list(zip(texts[:count], texts[count:], strict=True))
            self._check_cost(texts, plan, pairs)
            tokenize_s = time.monotonic() - started
            call = Call(plan, budget.deadline, slots)
            vectors = await self._runs.vectors(texts, call, with_tokens=plan.needs_token_vectors)
            own = [direction_of(each.embedding, name) for each, name in zip(vectors, names, strict=True)]
            found = await self._found(described, own[count:] + own[:count], call, vectors)
            of_inputs = [
                await input_matrix(first, second, self._runs, call) if plan.needs_input_matrix else None
                for first, second in pairs
            ]
            compared = await self._workers.run(self._comparisons, found, names, plan, of_inputs)
        took = Timings(tokenize_s, call.clock.queue_s, call.clock.compute_s)
        return CompareResult(compared, budget.spent.add(took))

    # --- from jobs to token ids -------------------------------------------------------------------

    async def _checked(self, job: SomeJob, check: Callable[[SomeJob], ExplanationPlan]) -> ExplanationPlan:
        """Check a job: a large one in a worker thread."""
        return await self._workers.run_if(job.size > SMALL_JOB, check, job)

    @contextmanager
    def _slots(self, plan: ExplanationPlan, num_texts: int, num_vectors: int) -> Iterator[Slots]:
        """Acquire the queue slots for the first runs of a call. `Runs` releases them as it proceeds."""
        slots = Slots(self._admission)
        try:
            slots.acquire(self._runs.first_slots(plan, num_texts, num_vectors))
            yield slots
        finally:
            slots.release()

    async def _described(
        self,
        inputs: Sequence[Input],
        plan: ExplanationPlan,
        budget: Budget,
        names: Sequence[str] = (),
        *,
        prompt: str | None = None,
    ) -> list[Described]:
        """Return texts with their tokens.

        Raises:
            ResponseTooLargeError: as soon as it is known that the response would be.
        """
        described: list[Described] = []
        message_bytes = 0
        for portion in portions([given.size for given in inputs]):
            texts = await self._workers.run(
                self._describe, inputs, portion, plan, names, plan.prompt if prompt is None else prompt
            )
            added = sum(self._costs.message_bytes(tokens, plan) for _, tokens in texts)
            message_bytes += added
            budget.spent.num_tokens += sum(text.encoded.num_tokens for text, _ in texts)
            memory_bytes = sum(self._costs.memory_bytes(tokens, plan) for _, tokens in texts)
            self._reserve(message_bytes, memory_bytes + self._sizes.costs.making_copies * added, budget)
            described += texts
        return described

    def _reserve(self, message_bytes: int, memory_bytes: int, budget: Budget) -> None:
        self._sizes.check("the response", message_bytes, "send fewer or shorter texts")
        budget.memory.grow(memory_bytes)

    async def _texts(
        self, inputs: Sequence[Input], names: Sequence[str], plan: ExplanationPlan, budget: Budget
    ) -> list[Text]:
        """Return the texts of a target."""
        if not inputs:
            return []
        described = await self._workers.run(
            self._describe, inputs, range(len(inputs)), plan, names, plan.other_prompt
        )
        budget.spent.num_tokens += sum(text.encoded.num_tokens for text, _ in described)
        budget.memory.grow(sum(self._costs.memory_bytes(tokens, plan) for _, tokens in described))
        return [text for text, _ in described]

    def _check_cost(
        self, texts: Sequence[Text], plan: ExplanationPlan, pairs: Sequence[tuple[Text, Text]] = ()
    ) -> None:
        """Compare the cost of the further runs of a call with the limit.

        Raises:
            TooExpensiveError: The cost is over the limit.
        """
        costs = {}
        if plan.needs_masked_runs:
            runs = ((text.encoded.num_tokens, self._runs.num_masked_runs(text, plan)) for text in texts)
            field = _method_field(plan, LEAVE_ONE_OUT) if LEAVE_ONE_OUT in plan.methods else "matrix"
            costs[field] = sum(masked_runs_cost(length, num_runs) for length, num_runs in runs)
        if plan.needs_norms:
            costs[_method_field(plan, CONTRIBUTION_NORM)] = sum(
                sweeps_cost(text.encoded.num_tokens, plan.dimensions) for text in texts
            )
        if plan.needs_input_matrix:
            lengths = ((first.encoded.num_tokens, second.encoded.num_tokens) for first, second in pairs)
            costs["matrix"] = sum(input_matrix_cost(both, plan.dimensions) for both in lengths)
        if sum(costs.values()) > self._max_computed_tokens:
            raise TooExpensiveError(costs, self._max_computed_tokens, _CHEAPER)

    # --- the graphs -------------------------------------------------------------------------------

    async def _direction(
        self, towards: Sequence[Text], names: Sequence[str], call: Call
    ) -> Float64Array | None:
        """Return d (E,); None: that of each text itself.

        Raises:
            InvalidFieldsError: a text of the target, or their difference, has no direction.
        """
        if not towards:
            return call.plan.direction
        vectors = await self._runs.vectors(towards, call)
        units = [direction_of(each.embedding, name) for each, name in zip(vectors, names, strict=True)]
        if len(units) == 1:
            return units[0]
        difference = units[0] - units[1]
        if not difference.any():
            text = "has two texts of the same embedding, between which there is no direction: send other ones"
            raise InvalidFieldsError([FieldViolation("contrast", text)])
        return difference

    async def _found(
        self,
        described: Sequence[Described],
        directions: Sequence[Float64Array | None],
        call: Call,
        vectors: Sequence[Vectors] | None = None,
    ) -> list[Found]:
        """Run all that the plan needs of the texts. `vectors` are there already in a comparison."""
        plan, runs = call.plan, self._runs
        texts = [text for text, _ in described]
        if vectors is None and not runs.takes_no_vectors(plan):
            vectors = await runs.vectors(texts, call, with_tokens=plan.needs_token_vectors)
        contributions = (
            await runs.contributions(texts, directions, call) if plan.needs_contributions else None
        )
        attention = await runs.attention(texts, call)
        left_out = await runs.left_out(texts, call) if plan.needs_masked_runs else None
        norms: list[Float64Array | None] = [None] * len(texts)
        if plan.needs_norms:
            for number, (text, tokens) in enumerate(described):
                words = words_of(tokens) if plan.level is ExplainLevel.WORDS else []
                norms[number] = await runs.contribution_norms(text, words, call)
        return [
            Found(
                text,
                tokens,
                directions[number],
                contributions[number] if contributions else None,
                vectors[number] if vectors else None,
                attention[number],
                left_out[number] if left_out else None,
                norms[number],
            )
            for number, (text, tokens) in enumerate(described)
        ]

    # --- in worker threads ------------------------------------------------------------------------

    def _describe(
        self,
        inputs: Sequence[Input],
        portion: range,
        plan: ExplanationPlan,
        names: Sequence[str],
        prompt: str,
    ) -> list[Described]:
        """Return some texts as token ids, without records, and their tokens."""
        try:
            encoded = self._encoder.encode(
                inputs, portion, prompt=prompt, truncate=plan.truncate, with_records=True
            )
        except (InputTooLongError, InvalidFieldsError) as error:
            raise (rename_error(error, names) if names else error) from None
        return [self._described_text(text, plan) for text in encoded]

    def _described_text(self, encoded: EncodedInput, plan: ExplanationPlan) -> Described:
        tokens = self._encoder.describe(encoded)
        can_be_left_out = tuple(source is not TokenSource.SPECIAL for source in tokens.sources)
        return Text(encoded.without_record(), weights_of(encoded, plan), can_be_left_out), tokens

    def _explanations(
        self, found: Sequence[Found], names: Sequence[str], plan: ExplanationPlan
    ) -> list[Explanation]:
        return [explanation(each, name, plan, self._model) for each, name in zip(found, names, strict=True)]

    def _comparisons(
        self,
        found: Sequence[Found],
        names: Sequence[str],
        plan: ExplanationPlan,
        of_inputs: Sequence[Float64Array | None],
    ) -> list[Comparison]:
        explained = self._explanations(found, names, plan)
        count = len(found) // 2
        return [
            Comparison(
                explained[number],
                explained[count + number],
                explained[number].target_value,
                matrix(found[number], found[count + number], plan, of_inputs[number]),
            )
            for number in range(count)
        ]


def _method_field(plan: ExplanationPlan, method: ExplainMethod) -> str:
    return f"methods[{plan.methods.index(method)}]"
