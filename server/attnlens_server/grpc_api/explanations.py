"""Explain and Compare: from messages to jobs, and from results to messages."""

from collections.abc import Sequence

import numpy as np

from attnlens.explanations import ExplainLevel, ExplainMethod, PairMatrix
from attnlens.pooling import FloatArray, Pooling
from attnlens.tensors import fill_tensor, from_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1 import explanation_pb2, manifest_pb2
from attnlens.v1.tensor_pb2 import DataType, Tensor
from attnlens_server.errors import FieldViolation
from attnlens_server.grpc_api.requests import input_of, member, prompt_of
from attnlens_server.grpc_api.responses import Responses, fill_tokens, timings_message, usage_message
from attnlens_server.serving.explanations.jobs import CompareJob, ExplainJob, Towards
from attnlens_server.serving.explanations.results import (
    CompareResult,
    ExplainResult,
    Explanation,
    PairMatrixResult,
)

_MOST_METHODS = 2 * len(ExplainMethod)  # more are refused, since each may be asked for once


def explain_job(request: pb.ExplainRequest) -> ExplainJob:
    """Translate a request."""
    found: list[FieldViolation] = []
    return ExplainJob(
        model=request.model,
        inputs=[input_of(message) for message in request.inputs],
        truncate=request.truncate,
        prompt=prompt_of(request, "prompt"),
        pooling=_pooling(request.pooling, found),
        dimensions=request.dimensions,
        target=_target(request, found),
        target_prompt=prompt_of(request, "target_prompt"),
        methods=_methods(request.methods, found),
        level=_level(request.level, found),
        head_contributions=request.head_contributions,
        violations=found,
    )


def compare_job(request: pb.CompareRequest) -> CompareJob:
    """Translate a request."""
    found: list[FieldViolation] = []
    return CompareJob(
        model=request.model,
        inputs=[input_of(pair.a) for pair in request.pairs],
        seconds=[input_of(pair.b) for pair in request.pairs],
        truncate=request.truncate,
        prompt=prompt_of(request, "prompt_a"),
        prompt_b=prompt_of(request, "prompt_b"),
        pooling=_pooling(request.pooling, found),
        dimensions=request.dimensions,
        methods=_methods(request.methods, found),
        level=_level(request.level, found),
        head_contributions=request.head_contributions,
        matrix=member(PairMatrix, request.matrix, "matrix", explanation_pb2.PairMatrix, found),
        violations=found,
    )


def _pooling(number: int, found: list[FieldViolation]) -> Pooling | None:
    return member(Pooling, number, "pooling", manifest_pb2.Pooling, found)


def _level(number: int, found: list[FieldViolation]) -> ExplainLevel:
    level = member(ExplainLevel, number, "level", explanation_pb2.ExplainLevel, found)
    return level or ExplainLevel.TOKENS


def _methods(numbers: Sequence[int], found: list[FieldViolation]) -> list[ExplainMethod]:
    methods = []
    for index, number in enumerate(numbers[:_MOST_METHODS]):
        field = f"methods[{index}]"
        method = member(ExplainMethod, number, field, explanation_pb2.ExplainMethod, found)
        methods.append(method or ExplainMethod.CONTRIBUTIONS)
    return methods


def _target(request: pb.ExplainRequest, found: list[FieldViolation]) -> Towards:
    match request.WhichOneof("target"):
        case "direction":
            return Towards(direction=_direction(request.direction, found))
        case "to":
            return Towards(to=input_of(request.to))
        case "contrast":
            contrast = request.contrast
            return Towards(contrast=(input_of(contrast.to), input_of(contrast.rather_than)))
    return Towards()


def _direction(tensor: Tensor, found: list[FieldViolation]) -> FloatArray | None:
    """Return the numbers of a direction; what is wrong is added to `found`."""
    if tensor.data_type not in (DataType.DATA_TYPE_UNSPECIFIED, DataType.DATA_TYPE_FLOAT32):
        found.append(FieldViolation("direction.data_type", f"is {tensor.data_type}: use DATA_TYPE_FLOAT32"))
        return None
    try:
        return np.asarray(from_tensor(tensor), dtype=np.float32)
    except ValueError as error:
        found.append(FieldViolation("direction", f"is no tensor: {error}"))
        return None


def explain_response(responses: Responses, result: ExplainResult) -> bytes:
    """Pack the texts of a request."""
    message = pb.ExplainResponse(
        model=responses.model,
        model_version=responses.version,
        timings=timings_message(result.timings),
        computation=responses.fp32_computation,
    )
    for text in result.texts:
        _fill(message.results.add(), text)
    return message.SerializeToString()


def compare_response(responses: Responses, result: CompareResult) -> bytes:
    """Pack the pairs of a request."""
    message = pb.CompareResponse(
        model=responses.model,
        model_version=responses.version,
        timings=timings_message(result.timings),
        computation=responses.fp32_computation,
    )
    for pair in result.pairs:
        packed = message.results.add(similarity=pair.similarity)
        _fill(packed.a, pair.a)
        _fill(packed.b, pair.b)
        if pair.matrix is not None:
            _fill_matrix(packed, pair.matrix)
    return message.SerializeToString()


def _fill_matrix(message: pb.Comparison, matrix: PairMatrixResult) -> None:
    fill_tensor(message.matrix, matrix.values, DataType.DATA_TYPE_FLOAT32)
    if matrix.baseline_row is not None and matrix.baseline_column is not None:
        fill_tensor(message.baseline_row, matrix.baseline_row, DataType.DATA_TYPE_FLOAT32)
        fill_tensor(message.baseline_column, matrix.baseline_column, DataType.DATA_TYPE_FLOAT32)
    if matrix.baseline is not None:
        message.baseline = matrix.baseline


def _fill(message: pb.Explanation, text: Explanation) -> None:
    fill_tokens(message.tokens, text.tokens)
    message.usage.CopyFrom(usage_message(text.usage))
    message.unit_ids.extend(text.unit_ids)
    message.target_value = text.target_value
    for scores in text.scores:
        packed = message.scores.add(
            method=explanation_pb2.ExplainMethod.ValueType(scores.method),
            baseline=scores.baseline,
            sum=scores.sum,
            expected_sum=scores.expected_sum,
            faithfulness=scores.faithfulness,
        )
        fill_tensor(packed.values, scores.values, DataType.DATA_TYPE_FLOAT32)
    if text.head_contributions is not None:
        fill_tensor(message.head_contributions, text.head_contributions, DataType.DATA_TYPE_FLOAT32)
