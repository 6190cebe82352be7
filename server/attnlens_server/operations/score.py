"""Score: the relevance of documents to a query, or of the second to the first text of pairs."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from attnlens.classifiers import ScoreActivation, scores_of
from attnlens.pooling import FloatArray
from attnlens_server.core.admission import Budget, Slots
from attnlens_server.core.loaded_model import LoadedModel
from attnlens_server.core.process import Process
from attnlens_server.core.reply_costs import (
    DESCRIBING_BYTES,
    TEXT_MEMORY_BYTES,
    TOKEN_ID_BYTES,
    TOKENIZING_BYTES,
)
from attnlens_server.core.usage import Clock, Timings, Usage
from attnlens_server.engine import Item
from attnlens_server.errors import (
    FieldViolation,
    InvalidFieldsError,
    NotSupportedError,
    PermissionDeniedError,
    TooExpensiveError,
)
from attnlens_server.operations.classify import classifier_of, logits_of, logits_output
from attnlens_server.operations.documents import (
    DocumentEncoder,
    ScoredInput,
    ScoreRequest,
    distinct,
    document_field,
)
from attnlens_server.operations.explaining import Described, ExplanationOperation, explained_texts
from attnlens_server.operations.explanations import (
    Call,
    Explanation,
    ExplanationPlan,
    ExplanationRequest,
)
from attnlens_server.operations.inputs import Prompt, Request
from attnlens_server.operations.operation import MAX_INLINE_TOKENIZATION, TextSources
from attnlens_server.operations.values import check_finite
from attnlens_server.text import PairEncoder

_NO_PROMPT = Prompt(text="")
_SCORE_ACTIVATIONS = (ScoreActivation.IDENTITY, ScoreActivation.SIGMOID)


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
class ScorePlan:
    """Validated ScoreRequest.

    Attributes:
        prompt: Text that precedes each query.
        activation: Function from logits to scores.
        explanation: Plan of the explanations of returned logits, or None.
    """

    prompt: str
    activation: ScoreActivation
    explanation: ExplanationPlan | None


class ScoreOperation(ExplanationOperation):
    """Returns the relevance of documents to a query, or of the second to the first text of pairs."""

    def __init__(self, process: Process, model: LoadedModel) -> None:
        super().__init__(process, model)
        classifier, text_encoder = model.spec.classifier, model.text_encoder
        can_score = classifier is not None and classifier.is_reranker and model.takes_pairs
        self._documents = (
            DocumentEncoder(PairEncoder(text_encoder), model.max_tokens)
            if can_score and text_encoder
            else None
        )

    async def __call__(self, request: ScoreRequest, budget: Budget) -> ScoreResult:
        """Return the relevance of documents to a query, or of the second to the first text of pairs.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        plan = await self._validated(request, self.plan)
        if plan.explanation is not None and "Explain" in budget.client.denied:
            raise PermissionDeniedError(
                "explanations of scores need the permission to call Explain: omit them, or ask the operator "
                "of the server to change its policy",
                metadata={"method": "Explain"},
            )
        firsts, rows = distinct(request.inputs)
        num_explained = min(request.top_n or len(firsts), len(firsts)) if plan.explanation else 0
        slots, clock = Slots(self._process.admission, budget.client), Clock(budget.metrics)
        try:
            slots.acquire({"logits": len(firsts), "contributions": num_explained})
            budget.charge_texts(len(request.inputs))
            result_bytes = len(rows) * self._costs.text_bytes
            self._costs.check("the response", result_bytes, "send fewer texts")
            budget.memory.grow(
                self._costs.serialization_copies * result_bytes
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

    def plan(self, request: ScoreRequest) -> ScorePlan:
        """Validate a Score request.

        Raises:
            NotSupportedError: The model is not a reranker, or does not support explanations.
            InvalidFieldsError: One or more fields are invalid.
        """
        classifier = classifier_of(self._spec, "Score")
        if not classifier.is_reranker:
            raise NotSupportedError(
                f"the model {self._spec.name!r} has {len(classifier.labels)} labels, but Score needs a "
                "reranker, which has one: use Classify"
            )
        if self._documents is None:
            raise NotSupportedError(
                f"the bundle of {self._spec.name!r} lacks a tokenizer for pairs of texts: use Classify with "
                "token_ids"
            )
        prompt, violations = self._score_texts(request)
        if request.top_n < 0:
            violations.append(FieldViolation("top_n", f"is {request.top_n}: use 1 or more, or 0 for all"))
        elif request.top_n and request.query is None:
            problem = "is set, but pairs are not sorted: omit it, or send one query with documents"
            violations.append(FieldViolation("top_n", problem))
        if (limit := request.max_tokens_per_document) < 0:
            problem = f"is {limit}: use 1 or more, or 0 for no limit"
            violations.append(FieldViolation("max_tokens_per_document", problem))
        activation = request.activation or classifier.activation
        if request.activation not in (None, *_SCORE_ACTIVATIONS):
            names = " or ".join(f"ACTIVATION_{each.name}" for each in _SCORE_ACTIVATIONS)
            problem = f"is ACTIVATION_{activation.name}: use {names}"
            violations.append(FieldViolation("activation", problem))
        if violations:
            raise InvalidFieldsError(violations)
        return ScorePlan(prompt, activation, self._explanation_plan(request, prompt))

    def _score_texts(self, request: ScoreRequest) -> tuple[str, list[FieldViolation]]:
        """Return the text of the prompt and the violations of the texts and of the protocol."""
        if request.query is None:
            prompt, found = self._inputs.validate(request)
            return prompt, _renamed(found, "pairs")
        query = Request(inputs=request.other_inputs, prompt=request.prompt, violations=request.violations)
        prompt, found = self._inputs.validate(query)
        violations = [
            replace(violation, field="query", input_index=None)
            if violation.field.startswith("inputs")
            else violation
            for violation in found
        ]
        if not request.query:
            violations.append(FieldViolation("query", "is empty: send some text"))
        _, found = self._inputs.validate(Request(inputs=request.inputs, prompt=_NO_PROMPT))
        return prompt, violations + _renamed(found, "documents")

    def _explanation_plan(self, request: ScoreRequest, prompt: str) -> ExplanationPlan | None:
        """Return the plan of the explanations that a Score request asks for, or None.

        Args:
            request: Request to a reranker.
            prompt: Text of its prompt.

        Raises:
            NotSupportedError: Explanations are disabled, or the bundle has no contributions graph.
        """
        if request.explanation_level is None:
            return None
        self._check_enabled()
        explained = ExplanationRequest(inputs=request.inputs, level=request.explanation_level)
        return self._make_plan(explained, prompt, "", direction=np.ones(1))

    async def _scored_inputs(
        self, request: ScoreRequest, plan: ScorePlan, firsts: Sequence[int], budget: Budget
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
            if num_extra_tokens > self._model.config.max_computed_tokens:
                costs = {"long_documents": num_extra_tokens}
                raise TooExpensiveError(
                    costs, self._model.config.max_computed_tokens, "truncate long documents"
                )
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

    def _items(self, inputs: Sequence[ScoredInput], budget: Budget) -> list[Item]:
        """Return the items of all parts. Runs in a worker thread if there are many."""
        outputs = (logits_output(self._spec),)
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
        items = await self._process.workers.run_if(
            request.size > MAX_INLINE_TOKENIZATION, self._items, inputs, budget
        )

        def name(part: int) -> str:
            of_parts = [index for index, each in zip(indices, inputs, strict=True) for _ in each.ranges]
            return document_field(request, of_parts[part])

        results = await self._model.runner.run(items, "logits", budget.client, clock, name)
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
        explained = await self._process.workers.run(explained_texts, found, fields, plan, self._spec)
        return dict(zip(chosen, explained, strict=True))


def _renamed(violations: Sequence[FieldViolation], name: str) -> list[FieldViolation]:
    """Replace `inputs` in the paths of `InputValidator`: `documents[1]` for `inputs[1].text`."""
    renamed = []
    for violation in violations:
        field = violation.field
        if violation.input_index is not None:
            field = f"{name}[{violation.input_index}]"
        elif field == "inputs":
            field = name
        renamed.append(replace(violation, field=field))
    return renamed


def scores(
    request: ScoreRequest,
    plan: ScorePlan,
    rows: Sequence[int],
    num_parts: Sequence[int],
    logits: FloatArray,
) -> list[Score]:
    """Return the scores of all inputs in the order of the response.

    Args:
        request: Request.
        plan: Plan of the request.
        rows: Number of the distinct input of each input.
        num_parts: Number of parts of each distinct input.
        logits: Logits of the parts of all distinct inputs, (P, 1).

    Raises:
        InvalidResultError: A logit is not finite.
    """
    starts = [0, *itertools.accumulate(num_parts[:-1])]
    best = list(_best_parts(logits[:, 0], starts, num_parts))
    fields = [""] * len(num_parts)
    for index in reversed(range(len(rows))):
        fields[rows[index]] = document_field(request, index)
    chosen = logits[np.add(starts, best)]  # (N, 1)
    check_finite(chosen, fields)
    activated = scores_of(chosen, plan.activation)[:, 0].tolist()
    values = chosen[:, 0].tolist()
    found = [
        Score(index, activated[row], values[row], num_parts[row], best[row]) for index, row in enumerate(rows)
    ]
    if request.query is None:
        return found
    found.sort(key=lambda score: -score.logit)  # stable, so equal logits stay in the order of the request
    return found[: request.top_n or None]


def _best_parts(logits: FloatArray, starts: Sequence[int], num_parts: Sequence[int]) -> Iterator[int]:
    for start, count in zip(starts, num_parts, strict=True):
        yield int(logits[start : start + count].argmax()) if count > 1 else 0  # the first NaN, if any
