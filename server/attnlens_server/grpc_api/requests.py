"""From messages to jobs. Of checks only those that need the messages: numbers that no enum here has."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar

from google.protobuf.message import Message

from attnlens.pooling import Pooling
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
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1 import manifest_pb2
from attnlens.v1.tensor_pb2 import DataType as DataTypeNumber
from attnlens_server.bundle import OutputRole
from attnlens_server.errors import FieldViolation
from attnlens_server.serving.checks import MAX_QUERIES
from attnlens_server.serving.jobs import (
    FLOAT16,
    FLOAT32,
    AttentionQuery,
    AttentionView,
    DataType,
    EmbedJob,
    EncodeJob,
    Prompt,
    TokenizeJob,
)
from attnlens_server.text import Input, TextPair, TokenIds

MAX_INDICES = 4096  # of layers or heads in one query: no model has more, and longer lists are rejected
COPY_CHUNK = 1 << 16

Member = TypeVar("Member", bound=IntEnum)
Choice = TypeVar("Choice", bound=str)

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


def embed_job(request: pb.EmbedRequest) -> EmbedJob:
    """Translate a request."""
    found: list[FieldViolation] = []
    return EmbedJob(
        model=request.model,
        inputs=_inputs(request.inputs),
        prompt=prompt_of(request),
        truncate=request.truncate,
        pooling=member(Pooling, request.pooling, "pooling", manifest_pb2.Pooling, found),
        normalize=request.normalize if request.HasField("normalize") else None,
        dimensions=request.dimensions,
        data_type=_data_type(request.data_type, found),
        violations=found,
    )


def encode_job(request: pb.EncodeRequest | pb.EncodeStreamRequest) -> EncodeJob:
    """Translate a request; both kinds have the same fields."""
    found: list[FieldViolation] = []
    return EncodeJob(
        model=request.model,
        inputs=_inputs(request.inputs),
        prompt=prompt_of(request),
        truncate=request.truncate,
        last_hidden_state=request.last_hidden_state,
        attention=_queries(request.attention, found),
        data_type=_data_type(request.data_type, found),
        violations=found,
    )


def tokenize_job(request: pb.TokenizeRequest) -> TokenizeJob:
    """Translate a request."""
    return TokenizeJob(model=request.model, inputs=_inputs(request.inputs), prompt=prompt_of(request))


def _inputs(messages: Iterable[pb.Input]) -> list[Input]:
    return [input_of(message) for message in messages]


def input_of(message: pb.Input) -> Input:
    """Translate an input."""
    match message.WhichOneof("content"):
        case "text":
            return Input(text=message.text)
        case "text_pair":
            return Input(text_pair=TextPair(message.text_pair.first, message.text_pair.second))
        case "token_ids":
            ids = message.token_ids
            return Input(token_ids=TokenIds(_copied(ids.input_ids), _copied(ids.token_type_ids)))
    return Input()


def _copied(numbers: Sequence[int]) -> Sequence[int]:
    """Copy an int32 field, because a view of it would keep the whole request in memory.

    A slice is a list, which converts four times as fast. Millions of numbers are copied in chunks: one slice
    of them would keep every other thread waiting.
    """
    copy = array("i")
    for start in range(0, len(numbers), COPY_CHUNK):
        copy.extend(array("i", numbers[start : start + COPY_CHUNK]))
    return copy


def prompt_of(request: Message, field: str = "prompt") -> Prompt | None:
    """Translate the prompt in a field of a request; None: it is not set."""
    if not request.HasField(field):
        return None
    prompt: pb.Prompt = getattr(request, field)
    match prompt.WhichOneof("choice"):
        case "name":
            return Prompt(name=prompt.name)
        case "text":
            return Prompt(text=prompt.text)
    return Prompt()


def _queries(messages: Sequence[pb.AttentionQuery], found: list[FieldViolation]) -> list[AttentionQuery]:
    queries = []
    for index, message in enumerate(messages[: MAX_QUERIES + 1]):  # more are refused
        field = f"attention[{index}]"
        role = member(OutputRole, message.role, f"{field}.role", manifest_pb2.OutputRole, found)
        view = member(AttentionView, message.view, f"{field}.view", pb.AttentionView, found)
        reduction = _reduction(message, f"{field}.reduction", found)
        is_rollout = reduction is not None and reduction.layers == "rollout"
        queries.append(
            AttentionQuery(
                role or OutputRole.ATTENTION_WEIGHTS,
                _copied(message.layers[: MAX_INDICES + 1]),
                _copied(message.heads[: MAX_INDICES + 1]),
                view or (AttentionView.HEAD_MEAN if is_rollout else AttentionView.FULL),
                reduction,
            )
        )
    return queries


def _reduction(
    query: pb.AttentionQuery, field: str, found: list[FieldViolation]
) -> AttentionReduction | None:
    if not query.HasField("reduction"):
        return None
    message = query.reduction
    return AttentionReduction(
        level=_choice(_LEVELS, message.level, f"{field}.level", pb.AttentionLevel, found),
        special_tokens=_choice(
            _SPECIAL_TOKENS, message.special_tokens, f"{field}.special_tokens", pb.SpecialTokens, found
        ),
        layers=_choice(_LAYERS, message.layers, f"{field}.layers", pb.LayerReduction, found),
        rollout_residual=message.rollout_residual if message.HasField("rollout_residual") else None,
        mean_over_rows=message.mean_over_rows,
        rows=message.rows[: MAX_ROWS + 1],  # more are refused
        form=_form(message),
    )


def _form(message: pb.AttentionReduction) -> Form | None:
    match message.WhichOneof("form"):
        case "top_k":
            return TopK(message.top_k.k)
        case "threshold":
            return Threshold(message.threshold.threshold)
        case "statistics":
            asked = message.statistics
            return Statistics(received=asked.received, entropy=asked.entropy, all_rows=asked.all_rows)
        case "sqrt_uint8":
            return SqrtUint8()
    return None


def _choice(
    choices: Mapping[int, Choice],
    number: int,
    field: str,
    names: Any,  # noqa: ANN401 - a generated enum
    found: list[FieldViolation],
) -> Choice:
    """Return the choice for a number; the default one where it is unknown, which is added to `found`."""
    if number not in choices:
        known = ", ".join(names.Name(known) for known in choices if known)
        found.append(FieldViolation(field, f"is {number}: use one of {known}"))
        return choices[0]
    return choices[number]


def member(
    enum: type[Member],
    number: int,
    field: str,
    names: Any,  # noqa: ANN401 - a generated enum
    found: list[FieldViolation],
) -> Member | None:
    """Return a member by its number; None where it is unspecified, or unknown, which is added to `found`."""
    if not number:
        return None
    try:
        return enum(number)
    except ValueError:
        known = ", ".join(names.Name(member) for member in enum)
        found.append(FieldViolation(field, f"is {number}: use one of {known}"))
    return None


def _data_type(number: int, found: list[FieldViolation]) -> DataType:
    if number not in _DATA_TYPES:
        text = f"is {number}: use DATA_TYPE_FLOAT32 or DATA_TYPE_FLOAT16"
        found.append(FieldViolation("data_type", text))
    return _DATA_TYPES.get(number, FLOAT32)
