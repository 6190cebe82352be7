"""Conversion of request messages to the typed requests of `operations`.

Values that a message can hold but a typed request cannot, such as unknown enum numbers, become violations of
the request. The service reports them together with its own.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message

from attnlens.classifiers import ScoreActivation
from attnlens.embedding_types import EmbeddingType
from attnlens.explanations import ExplainLevel, ExplainMethod, PairMatrix
from attnlens.pooling import FloatArray, Pooling
from attnlens.reductions import (
    MAX_ROWS,
    AttentionReduction,
    Form,
    LayerChoice,
    Level,
    SpecialTokens,
    SqrtUint8,
    Statistics,
    Threshold,
    TopK,
)
from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1 import explanation_pb2, manifest_pb2
from attnlens.v1.tensor_pb2 import DataType as DataTypeNumber
from attnlens.v1.tensor_pb2 import Tensor
from attnlens_server.bundle import OutputRole
from attnlens_server.errors import FieldViolation
from attnlens_server.operations.attention import MAX_QUERIES, AttentionQuery, AttentionView
from attnlens_server.operations.classify import ClassifyRequest
from attnlens_server.operations.compare import CompareRequest
from attnlens_server.operations.documents import LongDocuments, ScoreRequest
from attnlens_server.operations.embed import EmbedRequest
from attnlens_server.operations.encode import EncodeRequest
from attnlens_server.operations.explain import ExplainRequest, ExplanationTarget, Label, LabelTarget
from attnlens_server.operations.inputs import Prompt
from attnlens_server.operations.tokenize import TokenizeRequest
from attnlens_server.operations.values import FLOAT16, FLOAT32, DataType
from attnlens_server.text import Input, TextPair, TokenIds

# Lists are cut one entry after their limit: enough for the validation to reject them, at little cost.
MAX_INDICES = 4096  # layers or heads of one query
MAX_METHODS = 2 * len(ExplainMethod)
COPY_CHUNK = 1 << 16  # elements per chunk

Violations = list[FieldViolation]
Member = TypeVar("Member", bound=IntEnum)
Choice = TypeVar("Choice")

_LEVELS: dict[int, Level] = {
    0: "tokens",
    pb.ATTENTION_LEVEL_TOKENS: "tokens",
    pb.ATTENTION_LEVEL_WORDS: "words",
}
_SPECIAL_TOKENS: dict[int, SpecialTokens] = {
    0: "keep",
    pb.SPECIAL_TOKENS_KEEP: "keep",
    pb.SPECIAL_TOKENS_DROP: "drop",
}
_LAYERS: dict[int, LayerChoice] = {
    0: "none",
    pb.LAYER_REDUCTION_NONE: "none",
    pb.LAYER_REDUCTION_MEAN: "mean",
    pb.LAYER_REDUCTION_ROLLOUT: "rollout",
}
_DATA_TYPES: dict[int, DataType] = {
    DataTypeNumber.DATA_TYPE_UNSPECIFIED: FLOAT32,
    DataTypeNumber.DATA_TYPE_FLOAT32: FLOAT32,
    DataTypeNumber.DATA_TYPE_FLOAT16: FLOAT16,
}


def embed_request(message: pb.EmbedRequest) -> EmbedRequest:
    """Convert an Embed request."""
    violations: Violations = []
    return EmbedRequest(
        model=message.model,
        model_version=message.model_version,
        inputs=_inputs(message.inputs),
        prompt=_prompt(message, "prompt"),
        truncate=message.truncate if message.HasField("truncate") else None,
        pooling=_pooling(message.pooling, violations),
        normalize=message.normalize if message.HasField("normalize") else None,
        dimensions=message.dimensions,
        data_type=_data_type(message.data_type, violations),
        embedding_type=_embedding_type(message, violations),
        ranges=_array(message.ranges, "ranges", violations) if message.HasField("ranges") else None,
        violations=violations,
    )


def encode_request(message: pb.EncodeRequest | pb.EncodeStreamRequest) -> EncodeRequest:
    """Convert an Encode or EncodeStream request, which have the same fields."""
    violations: Violations = []
    return EncodeRequest(
        model=message.model,
        model_version=message.model_version,
        inputs=_inputs(message.inputs),
        prompt=_prompt(message, "prompt"),
        truncate=message.truncate if message.HasField("truncate") else None,
        last_hidden_state=message.last_hidden_state,
        attention=_queries(message.attention, violations),
        data_type=_data_type(message.data_type, violations),
        violations=violations,
    )


def tokenize_request(message: pb.TokenizeRequest) -> TokenizeRequest:
    """Convert a Tokenize request."""
    return TokenizeRequest(
        model=message.model,
        model_version=message.model_version,
        inputs=_inputs(message.inputs),
        prompt=_prompt(message, "prompt"),
    )


def explain_request(message: pb.ExplainRequest) -> ExplainRequest:
    """Convert an Explain request."""
    violations: Violations = []
    return ExplainRequest(
        model=message.model,
        model_version=message.model_version,
        inputs=_inputs(message.inputs),
        truncate=message.truncate if message.HasField("truncate") else None,
        prompt=_prompt(message, "prompt"),
        pooling=_pooling(message.pooling, violations),
        dimensions=message.dimensions,
        target=_target(message, violations),
        target_prompt=_prompt(message, "target_prompt"),
        methods=_methods(message.methods, violations),
        level=_level(message.level, violations),
        head_contributions=message.head_contributions,
        violations=violations,
    )


def compare_request(message: pb.CompareRequest) -> CompareRequest:
    """Convert a Compare request."""
    violations: Violations = []
    return CompareRequest(
        model=message.model,
        model_version=message.model_version,
        inputs=[_input(pair.a) for pair in message.pairs],
        second_inputs=[_input(pair.b) for pair in message.pairs],
        truncate=message.truncate if message.HasField("truncate") else None,
        prompt=_prompt(message, "prompt_a"),
        prompt_b=_prompt(message, "prompt_b"),
        pooling=_pooling(message.pooling, violations),
        dimensions=message.dimensions,
        methods=_methods(message.methods, violations),
        level=_level(message.level, violations),
        head_contributions=message.head_contributions,
        matrix=_member(PairMatrix, message.matrix, "matrix", explanation_pb2.PairMatrix, violations),
        violations=violations,
    )


def score_request(message: pb.ScoreRequest) -> ScoreRequest:
    """Convert a Score request."""
    violations: Violations = []
    has_query = bool(message.query or message.documents)
    if message.pairs and has_query:
        problem = "is set in addition to query or documents: send one query with documents, or pairs"
        violations.append(FieldViolation("pairs", problem))
    inputs = [Input(text=document) for document in message.documents]
    if message.pairs and not has_query:
        inputs = [Input(text_pair=TextPair(pair.first, pair.second)) for pair in message.pairs]
    policy = _member(LongDocuments, message.long_documents, "long_documents", pb.LongDocuments, violations)
    return ScoreRequest(
        model=message.model,
        model_version=message.model_version,
        inputs=inputs,
        prompt=_prompt(message, "prompt"),
        query=None if message.pairs and not has_query else message.query,
        top_n=message.top_n,
        long_documents=policy or LongDocuments.TRUNCATE,
        max_tokens_per_document=message.max_tokens_per_document,
        activation=_activation(message.activation, violations),
        explanation_level=_level(message.explanation.level, violations, "explanation.level")
        if message.HasField("explanation")
        else None,
        violations=violations,
    )


def classify_request(message: pb.ClassifyRequest) -> ClassifyRequest:
    """Convert a Classify request."""
    violations: Violations = []
    return ClassifyRequest(
        model=message.model,
        model_version=message.model_version,
        inputs=_inputs(message.inputs),
        prompt=_prompt(message, "prompt"),
        truncate=message.truncate if message.HasField("truncate") else None,
        activation=_activation(message.activation, violations),
        violations=violations,
    )


def _activation(number: int, violations: Violations) -> ScoreActivation | None:
    return _member(ScoreActivation, number, "activation", manifest_pb2.Activation, violations)


def _inputs(messages: Iterable[pb.Input]) -> list[Input]:
    return [_input(message) for message in messages]


def _input(message: pb.Input) -> Input:
    match message.WhichOneof("content"):
        case "text":
            return Input(text=message.text)
        case "text_pair":
            return Input(text_pair=TextPair(message.text_pair.first, message.text_pair.second))
        case "token_ids":
            ids = message.token_ids
            return Input(token_ids=TokenIds(copy_numbers(ids.input_ids), copy_numbers(ids.token_type_ids)))
    return Input()


def copy_numbers(numbers: Sequence[int], typecode: str = "i") -> "array[int]":
    """Copy a field with integers. A view of the field would keep the whole message in memory.

    Slices of a repeated field are lists, which convert four times as fast as the field itself. Large fields
    are copied in chunks, since the conversion of one slice does not release the GIL.
    """
    copy: array[int] = array(typecode)
    for start in range(0, len(numbers), COPY_CHUNK):
        copy.extend(array(typecode, numbers[start : start + COPY_CHUNK]))
    return copy


def _prompt(request: Message, field: str) -> Prompt | None:
    if not request.HasField(field):
        return None
    prompt: pb.Prompt = getattr(request, field)
    match prompt.WhichOneof("choice"):
        case "name":
            return Prompt(name=prompt.name)
        case "text":
            return Prompt(text=prompt.text)
    return Prompt()


def _queries(messages: Sequence[pb.AttentionQuery], violations: Violations) -> list[AttentionQuery]:
    queries = []
    for index, message in enumerate(messages[: MAX_QUERIES + 1]):
        field = f"attention[{index}]"
        role = _member(OutputRole, message.role, f"{field}.role", manifest_pb2.OutputRole, violations)
        view = _member(AttentionView, message.view, f"{field}.view", pb.AttentionView, violations)
        reduction = _reduction(message, f"{field}.reduction", violations)
        is_rollout = reduction is not None and reduction.layers == "rollout"
        queries.append(
            AttentionQuery(
                role or OutputRole.ATTENTION_WEIGHTS,
                copy_numbers(message.layers[: MAX_INDICES + 1]),
                copy_numbers(message.heads[: MAX_INDICES + 1]),
                view or (AttentionView.HEAD_MEAN if is_rollout else AttentionView.FULL),
                reduction,
            )
        )
    return queries


def _reduction(query: pb.AttentionQuery, field: str, violations: Violations) -> AttentionReduction | None:
    if not query.HasField("reduction"):
        return None
    message = query.reduction
    return AttentionReduction(
        level=_choice(_LEVELS, message.level, f"{field}.level", pb.AttentionLevel, violations),
        special_tokens=_choice(
            _SPECIAL_TOKENS, message.special_tokens, f"{field}.special_tokens", pb.SpecialTokens, violations
        ),
        layers=_choice(_LAYERS, message.layers, f"{field}.layers", pb.LayerReduction, violations),
        rollout_residual=message.rollout_residual if message.HasField("rollout_residual") else None,
        mean_over_rows=message.mean_over_rows,
        rows=message.rows[: MAX_ROWS + 1],
        form=_form(message),
    )


def _form(message: pb.AttentionReduction) -> Form | None:
    match message.WhichOneof("form"):
        case "top_k":
            return TopK(message.top_k.k)
        case "threshold":
            return Threshold(message.threshold.threshold)
        case "statistics":
            statistics = message.statistics
            return Statistics(
                received=statistics.received, entropy=statistics.entropy, all_rows=statistics.all_rows
            )
        case "sqrt_uint8":
            return SqrtUint8()
    return None


def _pooling(number: int, violations: Violations) -> Pooling | None:
    return _member(Pooling, number, "pooling", manifest_pb2.Pooling, violations)


def _data_type(number: int, violations: Violations) -> DataType:
    return _choice(_DATA_TYPES, number, "data_type", DataTypeNumber, violations)


def _embedding_type(message: pb.EmbedRequest, violations: Violations) -> EmbeddingType:
    number = message.embedding_type
    chosen = _member(EmbeddingType, number, "embedding_type", pb.EmbeddingType, violations)
    embedding_type = chosen or EmbeddingType.FLOAT
    if embedding_type is not EmbeddingType.FLOAT and message.data_type:
        problem = f"is set, but embedding_type is {pb.EmbeddingType.Name(number)}: omit it"
        violations.append(FieldViolation("data_type", problem))
    return embedding_type


def _level(number: int, violations: Violations, field: str = "level") -> ExplainLevel:
    level = _member(ExplainLevel, number, field, explanation_pb2.ExplainLevel, violations)
    return level or ExplainLevel.TOKENS


def _methods(numbers: Sequence[int], violations: Violations) -> list[ExplainMethod]:
    methods = []
    for index, number in enumerate(numbers[:MAX_METHODS]):
        field = f"methods[{index}]"
        method = _member(ExplainMethod, number, field, explanation_pb2.ExplainMethod, violations)
        methods.append(method or ExplainMethod.CONTRIBUTIONS)
    return methods


def _target(message: pb.ExplainRequest, violations: Violations) -> ExplanationTarget:
    match message.WhichOneof("target"):
        case "direction":
            return ExplanationTarget(direction=_array(message.direction, "direction", violations))
        case "to":
            return ExplanationTarget(to=_input(message.to))
        case "contrast":
            contrast = message.contrast
            return ExplanationTarget(contrast=(_input(contrast.to), _input(contrast.rather_than)))
        case "own_embedding":
            return ExplanationTarget(own_embedding=True)
        case "label":
            target = message.label
            label = _label(target.label) if target.HasField("label") else None
            other = _label(target.rather_than) if target.HasField("rather_than") else None
            return ExplanationTarget(label=LabelTarget(label, other))
    return ExplanationTarget()


def _label(message: pb.Label) -> Label:
    match message.WhichOneof("label"):
        case "index":
            return Label(index=message.index)
        case "name":
            return Label(name=message.name)
    return Label()


def _array(tensor: Tensor, field: str, violations: Violations) -> FloatArray | None:
    if tensor.data_type not in (DataTypeNumber.DATA_TYPE_UNSPECIFIED, DataTypeNumber.DATA_TYPE_FLOAT32):
        violations.append(
            FieldViolation(f"{field}.data_type", f"is {tensor.data_type}: use DATA_TYPE_FLOAT32")
        )
        return None
    try:
        return np.asarray(from_tensor(tensor), dtype=np.float32)
    except ValueError as error:
        violations.append(FieldViolation(field, f"is not a valid tensor: {error}"))
        return None


def _choice(
    choices: Mapping[int, Choice],
    number: int,
    field: str,
    names: Any,  # noqa: ANN401 - a generated enum
    violations: Violations,
) -> Choice:
    """Return the choice with this number, or the default and a violation if there is none."""
    if number not in choices:
        known = ", ".join(names.Name(known) for known in choices if known)
        violations.append(FieldViolation(field, f"is {number}: use one of {known}"))
        return choices[0]
    return choices[number]


def _member(
    enum: type[Member],
    number: int,
    field: str,
    names: Any,  # noqa: ANN401 - a generated enum
    violations: Violations,
) -> Member | None:
    """Return the enum member with this number. None for 0 (unspecified), and with a violation if unknown."""
    if not number:
        return None
    try:
        return enum(number)
    except ValueError:
        known = ", ".join(names.Name(member) for member in enum)
        violations.append(FieldViolation(field, f"is {number}: use one of {known}"))
    return None
