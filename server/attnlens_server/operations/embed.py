"""Embed: one vector for each text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens.embedding_types import EmbeddingType, quantize, ranges_problem
from attnlens.pooling import FloatArray, Pooling, finish
from attnlens_server.core.admission import Budget
from attnlens_server.core.reply_costs import TEXT_MEMORY_BYTES
from attnlens_server.core.usage import Clock, Timings, Usage, usage
from attnlens_server.engine import Item, ItemResult, RequestedOutput, TokenPooling
from attnlens_server.errors import FieldViolation, InvalidFieldsError, NotSupportedError
from attnlens_server.operations.inputs import check_dimensions
from attnlens_server.operations.operation import (
    MAX_INLINE_RESULT_BYTES,
    Operation,
    TruncatedRequest,
    input_name,
)
from attnlens_server.operations.values import FLOAT32, DataType, check_finite, check_range
from attnlens_server.text import EncodedInput


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest(TruncatedRequest):
    """Request for one vector per text. `dimensions` 0 means all. `ranges` are not yet validated."""

    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int = 0
    data_type: DataType = FLOAT32
    embedding_type: EmbeddingType = EmbeddingType.FLOAT
    ranges: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class EmbedPlan:
    """Validated EmbedRequest.

    Attributes:
        prompt: Text that precedes each input.
        pooling: Pooling of the token vectors.
        normalize_first: Whether to normalize before components are cut off, as the publisher does.
        dimensions: Number of components to keep.
        normalize: Whether to normalize at the end.
        data_type: Element type of the result, unless it is quantized.
        embedding_type: Quantization of the result.
        ranges: Ranges of the components (2, dimensions), if the quantization needs them.
    """

    prompt: str
    pooling: Pooling
    normalize_first: bool
    dimensions: int
    normalize: bool
    data_type: DataType
    embedding_type: EmbeddingType = EmbeddingType.FLOAT
    ranges: FloatArray | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the result is quantized."""
        return self.embedding_type is not EmbeddingType.FLOAT

    @property
    def row_bytes(self) -> int:
        """Size of an embedding in a response."""
        itemsize = 1 if self.is_quantized else self.data_type.itemsize
        return self.embedding_type.num_columns(self.dimensions) * itemsize


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """Embeddings (N, dimensions) in the requested data type, or quantized with `ranges` (2, dimensions)."""

    embeddings: npt.NDArray[Any]
    usages: list[Usage]
    timings: Timings
    ranges: FloatArray | None = None


class EmbedOperation(Operation):
    """Returns one vector for each text."""

    async def __call__(self, request: EmbedRequest, budget: Budget) -> EmbedResult:
        """Return one vector for each text.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        plan = await self._validated(request, self.plan)
        num_texts, clock = len(request.inputs), Clock(budget.metrics)
        self._process.admission.acquire_slots("embeddings", num_texts, budget.client)
        try:
            budget.charge_texts(num_texts)
            result_bytes = self._result_bytes(num_texts, plan)
            vector_bytes = FLOAT32.itemsize * num_texts * plan.dimensions if plan.is_quantized else 0
            budget.memory.grow(
                self._costs.serialization_copies * result_bytes
                + budget.conversion.memory_bytes(result_bytes, 0, num_texts)
                + vector_bytes
                + num_texts * TEXT_MEMORY_BYTES
            )
            inputs = await self._token_ids(request, plan.prompt, budget, clock)
            items = self._items(inputs, plan, budget)
            results = await self._model.runner.run(items, "embeddings", budget.client, clock, input_name)
            is_slow = bool(self._model.dense) or result_bytes + vector_bytes > MAX_INLINE_RESULT_BYTES
            embeddings = await self._process.workers.run_if(is_slow, self._finish, results, plan)
        finally:
            self._process.admission.release_slots("embeddings", num_texts, budget.client)
        return EmbedResult(embeddings, [usage(encoded) for encoded in inputs], clock.timings, plan.ranges)

    def plan(self, request: EmbedRequest) -> EmbedPlan:
        """Validate an Embed request.

        Raises:
            InvalidFieldsError: One or more fields are invalid.
            NotSupportedError: The model is a classifier.
        """
        model = self._spec
        if model.classifier is not None:
            others = ("Score", "/rerank") if model.classifier.is_reranker else ("Classify", "/predict")
            remedy = "use {}, or {} over HTTP".format(*others)
            raise NotSupportedError(f"the model {model.name!r} has no embeddings: {remedy}")
        prompt, violations = self._inputs.validate(request)
        violations += check_dimensions(request.dimensions, model)
        is_published = not request.dimensions and request.normalize is None
        normalize = model.normalize if request.normalize is None else request.normalize
        plan = EmbedPlan(
            prompt=prompt,
            pooling=request.pooling or model.pooling,
            normalize_first=normalize and is_published,
            dimensions=request.dimensions or model.embedding_size,
            normalize=normalize and not is_published,
            data_type=request.data_type,
            embedding_type=request.embedding_type,
        )
        ranges = self._ranges(request, plan, violations)
        if violations:
            raise InvalidFieldsError(violations)
        return plan if ranges is None else replace(plan, ranges=ranges)

    def _ranges(
        self, request: EmbedRequest, plan: EmbedPlan, violations: list[FieldViolation]
    ) -> FloatArray | None:
        """Return the ranges for the quantization, or None if it needs none."""
        measured, problem = self._spec.embedding_ranges, None
        if not plan.embedding_type.needs_ranges:
            if request.ranges is not None:
                problem = (
                    f"is set, but embedding_type is {_type_name(plan)}, which does not use ranges: omit it"
                )
        elif request.ranges is not None:
            if defect := ranges_problem(request.ranges, plan.dimensions):
                problem = f"{defect}: send the minimum and maximum of each component"
        elif measured is not None and self._has_own_range(plan):
            return measured
        else:
            reason, remedy = (
                ("the bundle does not contain any", "export the model again")
                if measured is None
                else (
                    "those in the bundle only fit the model's own pooling, normalize and dimensions",
                    "omit these fields",
                )
            )
            problem = (
                f"is not set, but {_type_name(plan)} needs ranges, and {reason}: send ranges of shape "
                f"[2, {plan.dimensions}], or {remedy}"
            )
        if problem is not None and not any(each.field.startswith("ranges") for each in violations):
            violations.append(FieldViolation("ranges", problem))
        return request.ranges

    def _has_own_range(self, plan: EmbedPlan) -> bool:
        """Return whether embeddings have the range of those with default pooling, scale and dimensions."""
        model = self._spec
        is_truncated = model.embedding_size < model.max_dimensions
        return (
            plan.pooling is model.pooling
            and plan.dimensions == model.embedding_size
            and (plan.normalize_first or plan.normalize) is model.normalize
            # Default embeddings are scaled to length 1 before components are removed.
            and not (plan.normalize and is_truncated)
        )

    def _result_bytes(self, num_texts: int, plan: EmbedPlan) -> int:
        """Return the size of the reply.

        Raises:
            ResponseTooLargeError: The size exceeds the limit.
        """
        size = num_texts * (plan.row_bytes + self._costs.text_bytes)
        if plan.ranges is not None:
            size += plan.ranges.nbytes
        self._costs.check("the response", size, "send fewer texts")
        return size

    def _items(self, inputs: Sequence[EncodedInput], plan: EmbedPlan, budget: Budget) -> list[Item]:
        hidden = self._spec.outputs.hidden_state("embeddings")
        items = []
        for encoded in inputs:
            pooling = TokenPooling(plan.pooling, encoded.num_excluded)
            outputs = (RequestedOutput(hidden.name, hidden.layout, pooling),)
            items.append(Item(encoded.input_ids, outputs, encoded.token_type_ids, budget.deadline))
        return items

    def _finish(self, results: Sequence[ItemResult], plan: EmbedPlan) -> npt.NDArray[Any]:
        """Return the embeddings (N, E) of pooled vectors.

        Raises:
            InvalidFieldsError: A value is beyond the range of the data type.
            InvalidResultError: A value is NaN or infinite.
        """
        vectors = finish(
            np.array([result.arrays[0] for result in results]),  # (N, D)
            self._model.dense,
            dimensions=plan.dimensions,
            normalize_first=plan.normalize_first,
            normalize_last=plan.normalize,
        )
        if self._model.dense:  # the engine has checked the pooled vectors
            check_finite(vectors)
        if plan.is_quantized:
            return quantize(vectors, plan.embedding_type, plan.ranges)
        check_range(vectors, plan.data_type)
        return vectors.astype(plan.data_type, copy=False)


def _type_name(plan: EmbedPlan) -> str:
    return f"EMBEDDING_TYPE_{plan.embedding_type.name}"
