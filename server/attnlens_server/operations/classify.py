"""Classify: the logits and scores of each text.

Shapes: N texts, C labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnlens.classifiers import ScoreActivation, scores_of
from attnlens.pooling import FloatArray
from attnlens_server.bundle import Classifier, Model
from attnlens_server.core.admission import Budget
from attnlens_server.core.reply_costs import TEXT_MEMORY_BYTES
from attnlens_server.core.usage import Clock, Timings, Usage, usage
from attnlens_server.engine import Item, ItemResult, RequestedOutput
from attnlens_server.errors import InvalidFieldsError, NotSupportedError
from attnlens_server.operations.operation import Operation, TruncatedRequest, input_name
from attnlens_server.operations.values import FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyRequest(TruncatedRequest):
    """Request for the logits of each text. `activation` None means that of the classifier."""

    activation: ScoreActivation | None = None


@dataclass(frozen=True, slots=True)
class ClassifyPlan:
    """Validated ClassifyRequest.

    Attributes:
        prompt: Text that precedes each input.
        activation: Function from logits to scores.
    """

    prompt: str
    activation: ScoreActivation


@dataclass(frozen=True, slots=True)
class ClassifyResult:
    """Result of Classify: logits and scores (N, C) in fp32."""

    labels: tuple[str, ...]
    logits: FloatArray
    scores: FloatArray
    activation: ScoreActivation
    usages: list[Usage]
    timings: Timings


class ClassifyOperation(Operation):
    """Returns the logits and scores of each text."""

    async def __call__(self, request: ClassifyRequest, budget: Budget) -> ClassifyResult:
        """Return the logits and scores of each text.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        plan = await self._validated(request, self.plan)
        assert self._spec.classifier is not None  # noqa: S101 - ensured by the validation
        labels, num_texts = self._spec.classifier.labels, len(request.inputs)
        clock = Clock(budget.metrics)
        with self._process.admission.slots("logits", num_texts, budget.client):
            budget.charge_texts(num_texts)
            result_bytes = num_texts * (2 * FLOAT32.itemsize * len(labels) + self._costs.text_bytes)
            result_bytes += len("".join(labels).encode()) + self._costs.text_bytes * len(labels)
            self._costs.check("the response", result_bytes, "send fewer texts")
            budget.memory.grow(
                (1 + self._costs.serialization_copies) * result_bytes
                + budget.conversion.memory_bytes(result_bytes, 0, num_texts)
                + num_texts * TEXT_MEMORY_BYTES
            )
            inputs = await self._token_ids(request, plan.prompt, budget, clock)
            outputs = (logits_output(self._spec),)
            items = [
                Item(encoded.input_ids, outputs, encoded.token_type_ids, budget.deadline)
                for encoded in inputs
            ]
            results = await self._model.runner.run(items, "logits", budget.client, clock, input_name)
        logits = logits_of(results)  # (N, C)
        return ClassifyResult(
            labels,
            logits,
            scores_of(logits, plan.activation).astype(np.float32),
            plan.activation,
            [usage(encoded) for encoded in inputs],
            clock.timings,
        )

    def plan(self, request: ClassifyRequest) -> ClassifyPlan:
        """Validate a Classify request.

        Raises:
            NotSupportedError: The model is not a classifier.
            InvalidFieldsError: One or more fields are invalid.
        """
        classifier = classifier_of(self._spec, "Classify")
        prompt, violations = self._inputs.validate(request)
        if violations:
            raise InvalidFieldsError(violations)
        return ClassifyPlan(prompt, request.activation or classifier.activation)


def classifier_of(model: Model, method: str) -> Classifier:
    """Return the classifier of a model.

    Raises:
        NotSupportedError: The model is none.
    """
    if model.classifier is None:
        raise NotSupportedError(
            f"the model {model.name!r} is not a classifier, which {method} needs: use Embed, or serve a "
            "classifier or reranker"
        )
    return model.classifier


def logits_output(model: Model) -> RequestedOutput:
    """Return the output with the logits of a classifier."""
    output = model.outputs.logits
    assert output is not None  # noqa: S101 - the validation rejects requests for other models
    return RequestedOutput(output.name, output.layout)


def logits_of(results: Sequence[ItemResult]) -> FloatArray:
    """Return the logits (N, C) of all items."""
    return np.stack([result.arrays[0] for result in results])
