"""Explain: how much each token of a text contributes to its embedding, a similarity or a logit."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from attnlens.explanations import Float64Array
from attnlens.pooling import FloatArray
from attnlens_server import errors
from attnlens_server.bundle import Classifier
from attnlens_server.core.admission import Budget
from attnlens_server.core.reply_costs import DESCRIBING_BYTES
from attnlens_server.core.usage import Clock, Timings
from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.operations.explaining import (
    Described,
    ExplanationOperation,
    directions_of,
    explained_texts,
)
from attnlens_server.operations.explanations import (
    Call,
    Explanation,
    ExplanationPlan,
    ExplanationRequest,
    Text,
)
from attnlens_server.operations.inputs import MAX_NAME_CHARS, MAX_NAMES, Prompt, Request, rename
from attnlens_server.operations.operation import TextSources
from attnlens_server.text import Input


@dataclass(frozen=True, slots=True)
class Label:
    """Label of a classifier, by index or by name. If both are None, it was not specified."""

    index: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class LabelTarget:
    """Label whose logit is explained, None for that of a reranker, minus the logit of `rather_than`."""

    label: Label | None = None
    rather_than: Label | None = None


@dataclass(frozen=True, slots=True)
class ExplanationTarget:
    """Direction that contributions refer to. If nothing is set, each text's own embedding or the logit.

    Attributes:
        own_embedding: Whether each text's own embedding was set.
        label: Label of a classifier.
        direction: Vector, whose shape is not yet validated.
        to: Text whose embedding is the direction.
        contrast: Two texts. The direction is the difference between their embeddings, first minus second.
    """

    own_embedding: bool = False
    label: LabelTarget | None = None
    direction: FloatArray | None = None
    to: Input | None = None
    contrast: tuple[Input, Input] | None = None

    @property
    def inputs(self) -> dict[str, Input]:
        """Texts by field path."""
        if self.contrast is not None:
            return {"contrast.to": self.contrast[0], "contrast.rather_than": self.contrast[1]}
        return {} if self.to is None else {"to": self.to}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRequest(ExplanationRequest):
    """Request for the contribution of each token to its text's embedding or to a similarity."""

    target: ExplanationTarget = ExplanationTarget()
    target_prompt: Prompt | None = None

    @property
    def other_inputs(self) -> Sequence[Input]:
        """Texts of the target."""
        return tuple(self.target.inputs.values())


@dataclass(frozen=True, slots=True)
class ExplainResult:
    """Result of Explain."""

    texts: list[Explanation]
    timings: Timings


class ExplainOperation(ExplanationOperation):
    """Returns the contribution of each token of each text to its embedding, a similarity or a logit."""

    async def __call__(self, request: ExplainRequest, budget: Budget) -> ExplainResult:
        """Return the contribution of each token of each text to its embedding or similarity.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        plan = await self._validated(request, self.plan)
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
            explained = await self._process.workers.run(explained_texts, found, fields, plan, self._spec)
        return ExplainResult(explained, clock.timings)

    def plan(self, request: ExplainRequest) -> ExplanationPlan:
        """Validate an Explain request.

        Raises:
            InvalidFieldsError: One or more fields are invalid.
            NotSupportedError: Explanations are disabled, or the model does not support a method.
        """
        self._check_enabled()
        if self._spec.classifier is not None:
            return self._explain_logit(request, self._spec.classifier)
        prompt, violations = self._inputs.validate(request)
        target_prompt = ""
        if request.target.label is not None:
            problem = f"is set, but {self._spec.name!r} is not a classifier: omit it"
            violations.append(FieldViolation("label", problem))
        if texts := request.target.inputs:
            target = Request(inputs=tuple(texts.values()), prompt=request.target_prompt)
            target_prompt, found = self._inputs.validate(target)
            violations += rename(found, tuple(texts), {"prompt": "target_prompt"})
        elif request.target_prompt is not None:
            problem = "is set, but the target has no text: omit it"
            violations.append(FieldViolation("target_prompt", problem))
        violations += self._check_common(request)
        direction = None
        if request.target.direction is not None:
            direction = np.asarray(request.target.direction, dtype=np.float64)
            violations += _check_direction(direction, request.dimensions or self._spec.embedding_size)
        if violations:
            raise InvalidFieldsError(violations)
        return self._make_plan(request, prompt, target_prompt, direction=direction)

    def _explain_logit(self, request: ExplainRequest, classifier: Classifier) -> ExplanationPlan:
        """Validate an Explain request for a classifier.

        Raises:
            InvalidFieldsError, NotSupportedError: See `explain`.
        """
        prompt, violations = self._inputs.validate(request)
        target = request.target
        not_of_classifiers = {
            "pooling": request.pooling is not None,
            "dimensions": bool(request.dimensions),
            "own_embedding": target.own_embedding,
            "direction": target.direction is not None,
            "to": target.to is not None,
            "contrast": target.contrast is not None,
            "target_prompt": request.target_prompt is not None,
        }
        problem = f"is set, but {self._spec.name!r} is a classifier without embeddings: omit it"
        misplaced = [FieldViolation(field, problem) for field, is_set in not_of_classifiers.items() if is_set]
        violations += [*misplaced, *self._check_common(request)]
        direction, found = _label_direction(target.label or LabelTarget(), classifier)
        if target.label or not misplaced:
            violations += found
        if violations:
            raise InvalidFieldsError(violations)
        return self._make_plan(request, prompt, "", direction=direction)

    async def _target_texts(
        self, targets: dict[str, Input], plan: ExplanationPlan, budget: Budget
    ) -> list[Text]:
        """Return the texts of a target, given by their fields."""
        if not targets:
            return []
        inputs, fields = tuple(targets.values()), tuple(targets)

        def reserve(texts: list[Described]) -> None:
            budget.count_tokens(sum(text.encoded.num_tokens for text, _ in texts))
            budget.memory.grow(sum(self._explanation_costs.memory_bytes(tokens, plan) for _, tokens in texts))

        tokenize = partial(self._describe_texts, inputs, plan=plan, fields=fields, prompt=plan.other_prompt)
        surroundings = self._encoder.surroundings(plan.other_prompt)
        sources = TextSources(inputs, surroundings, DESCRIBING_BYTES, budget)
        return [text for text, _ in await self._in_portions(sources, tokenize, reserve)]

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
        units = directions_of(vectors, fields)
        if len(units) == 1:
            return units[0]
        difference = units[0] - units[1]
        if not difference.any():
            text = "has two texts with the same embedding, so their difference has no direction: change one"
            raise InvalidFieldsError([errors.FieldViolation("contrast", text)])
        return difference


def _label_direction(
    target: LabelTarget, classifier: Classifier
) -> tuple[Float64Array, list[FieldViolation]]:
    """Return the factors of the logits (C,) in a target, and violations."""
    given = {"label": target.label or (Label(index=0) if classifier.is_reranker else Label())}
    if target.rather_than is not None:
        given["rather_than"] = target.rather_than
    direction, violations = np.zeros(len(classifier.labels)), []
    for (field, label), factor in zip(given.items(), (1.0, -1.0), strict=False):
        index = _label_index(label, classifier.labels)
        if isinstance(index, str):
            violations.append(FieldViolation(f"label.{field}", index))
        elif direction[index]:
            problem = f"is {classifier.labels[index]!r}, as label.label: use another label, or omit it"
            violations.append(FieldViolation(f"label.{field}", problem))
        else:
            direction[index] = factor
    return direction, violations


def _label_index(label: Label, labels: Sequence[str]) -> int | str:
    """Return the index of a label, or what is wrong."""
    if label.index is not None:
        if 0 <= label.index < len(labels):
            return label.index
        return f"is {label.index}: use 0 to {len(labels) - 1}"
    known = ", ".join(map(repr, labels[:MAX_NAMES]))
    known += f" and {len(labels) - MAX_NAMES} more" if len(labels) > MAX_NAMES else ""
    if label.name is None:
        return f"is not set: use one of {known}"
    name = repr(label.name[:MAX_NAME_CHARS])
    match labels.count(label.name):
        case 0:
            return f"is {name}: use one of {known}"
        case 1:
            return labels.index(label.name)
        case count:
            return f"is {name}, the name of {count} labels: use its index"


def _check_direction(direction: Float64Array, dimensions: int) -> Iterator[FieldViolation]:
    if direction.shape != (dimensions,):
        problem = f"has the shape {list(direction.shape)}: use [{dimensions}], the shape of the embedding"
    elif not np.isfinite(direction).all():
        problem = "contains NaN or infinity: send finite numbers"
    elif not direction.any():
        problem = "is zero: send a nonzero vector"
    else:
        return
    yield FieldViolation("direction", problem)
