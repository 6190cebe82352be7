"""Conversion of arguments to request messages."""

import operator
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from attnlens.embedding_types import EmbeddingType
from attnlens.reductions import AttentionReduction, SqrtUint8, Statistics, Threshold, TopK
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.manifest_pb2 import OutputRole, Pooling
from attnlens.v1.tensor_pb2 import DataType
from attnlens_client.arguments import AttentionQuery, DataTypeName, PoolingName, Text, TokenIds
from attnlens_client.model_info import ModelInfo


def name_of(enum: EnumDescriptor, number: int) -> str:
    """Return the Python name of an enum value: "last_token" for POOLING_LAST_TOKEN.

    Values of newer servers are named by number.
    """
    return _names(enum).get(number) or f"unknown ({number})"


def values(enum: EnumDescriptor) -> dict[str, int]:
    """Return the numbers of an enum by Python name, without the unspecified value."""
    return {name: number for number, name in _names(enum).items() if number}


@cache
def _names(enum: EnumDescriptor) -> dict[int, str]:
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {
        number: value.name.removeprefix(prefix).lower() for number, value in enum.values_by_number.items()
    }


_MISSING_TYPES = {"NAType", "NaTType", "MaskedConstant"}  # pandas.NA, pandas.NaT and numpy.ma.masked
_DATA_TYPES = {"float32": DataType.DATA_TYPE_FLOAT32, "float16": DataType.DATA_TYPE_FLOAT16}


def messages(texts: Iterable[Text]) -> Iterator[pb.Input]:
    """Return an iterator that converts texts lazily.

    Columns of pandas, polars and pyarrow and NumPy arrays are accepted like lists.

    Raises:
        TypeError: `texts` is a single text, or not an ordered collection of texts. Raised by the iterator if
            an entry has the wrong type.
        ValueError: Raised by the iterator if an entry cannot be encoded, such as a lone surrogate or an id
            that does not fit in an int32.
    """
    kind = type(texts).__name__
    if isinstance(texts, (str, bytes, TokenIds)):
        raise TypeError(f"texts is one {kind}: use a list of texts, such as [text]")
    if isinstance(texts, Mapping):
        raise TypeError(f"texts is a {kind}: use its values, such as list(texts.values())")
    if isinstance(texts, (set, frozenset)):
        raise TypeError(f"texts is a {kind}, which has no order: use a list, such as sorted(texts)")
    # Tables of pandas, polars, pyarrow and others. The attribute of a lazy table itself would be computed.
    if hasattr(type(texts), "columns") or hasattr(type(texts), "column_names"):
        raise TypeError(f"texts is a {kind}: use one of its columns, such as df['text']")
    if isinstance(texts, AsyncIterable):
        raise TypeError(
            f"texts is {kind}, which is asynchronous: use a list, such as [text async for text in texts]"
        )
    if not isinstance(texts, Iterable):
        raise TypeError(f"texts is {kind}: use a list of texts")
    return (_input(index, text) for index, text in enumerate(texts))


def one_input(name: str, text: Text) -> pb.Input:
    """Convert one text. Errors contain the name of the argument.

    Raises:
        TypeError, ValueError: As for `messages`.
    """
    try:
        return _input(0, text)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("texts[0]", name, 1)) from error


def inputs(texts: Iterable[Text]) -> list[pb.Input]:
    """Convert all texts.

    Raises:
        TypeError, ValueError: As for `messages`.
    """
    return list(messages(texts))


def named_inputs(name: str, texts: Iterable[Text]) -> list[pb.Input]:
    """Convert all texts. Errors contain the name of the argument.

    Raises:
        TypeError, ValueError: As for `messages`.
    """
    try:
        return inputs(texts)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("texts", name, 1)) from error


def add_inputs(request: Message, texts: Sequence[pb.Input]) -> None:
    """Add texts to a request, or documents or pairs to a ScoreRequest."""
    if isinstance(request, pb.ScoreRequest):
        request.documents.extend(text.text for text in texts if text.HasField("text"))
        request.pairs.extend(text.text_pair for text in texts if text.HasField("text_pair"))
    else:
        cast("pb.EmbedRequest", request).inputs.extend(texts)  # or another request with `inputs`


def inputs_name(request: Message) -> str:
    """Return the name of the argument with the texts of a request."""
    if isinstance(request, pb.ScoreRequest):
        return "documents" if request.query else "pairs"
    return "texts"


def num_inputs(request: Message) -> int:
    """Return the number of texts, documents or pairs of a request."""
    if isinstance(request, pb.ScoreRequest):
        return len(request.documents) + len(request.pairs)
    return len(cast("pb.EmbedRequest", request).inputs)


def _input(index: int, text: Any) -> pb.Input:  # noqa: ANN401 - any entry of an iterable
    if hasattr(text, "as_py"):  # a scalar of pyarrow
        text = text.as_py()
    try:
        match text:
            case str():
                return pb.Input(text=text)
            case (str(first), str(second)) if isinstance(text, tuple):
                return pb.Input(text_pair=pb.TextPair(first=first, second=second))
            case TokenIds():
                input_ids = _whole_numbers(index, text.input_ids)
                token_type_ids = _whole_numbers(index, text.token_type_ids)
                return pb.Input(token_ids=pb.TokenIds(input_ids=input_ids, token_type_ids=token_type_ids))
        is_other = isinstance(text, (bytes, bytearray, Mapping, set, frozenset)) or _is_missing(text)
        if is_other or not isinstance(text, Iterable):
            raise _wrong_entry(index, text)
        return pb.Input(token_ids=pb.TokenIds(input_ids=_whole_numbers(index, text)))
    except ValueError as error:
        raise ValueError(f"texts[{index}] cannot be encoded: {error}") from error


def _whole_numbers(index: int, numbers: Iterable[Any]) -> list[int]:
    ids: list[int] = []
    for number in numbers:
        if isinstance(number, str):
            raise TypeError(
                f"texts[{index}] has {number!r}, which is not a token id: for a pair of texts use a tuple "
                "(first, second)"
            )
        try:
            ids.append(operator.index(number))
        except TypeError as error:
            raise TypeError(f"texts[{index}] has an invalid token id: {error}") from error
    return ids


def _is_missing(value: object) -> bool:
    is_nan = isinstance(value, (float, np.floating)) and np.isnan(value)
    return value is None or bool(is_nan) or type(value).__name__ in _MISSING_TYPES


def _wrong_entry(index: int, value: object) -> TypeError:
    if _is_missing(value):
        return TypeError(f"texts[{index}] is a missing value ({value!r}): remove it, or replace it by ''")
    return TypeError(
        f"texts[{index}] is {type(value).__name__}: use a str, a pair of them or a sequence of token ids"
    )


def num_bytes(text: pb.Input) -> int:
    """Return the size of a text or pair in UTF-8, in bytes. 0 for token ids."""
    pair = text.text_pair
    return len(text.text.encode()) + len(pair.first.encode()) + len(pair.second.encode())


def prompt(prompt_name: str | None, text: str | None) -> pb.Prompt | None:
    """Return the prompt of a request, or None if neither argument is set.

    Raises:
        TypeError: An argument is not a str.
        ValueError: An argument cannot be encoded, or both are set.
    """
    if prompt_name is not None and text is not None:
        raise ValueError("prompt_name and prompt are both set: choose one")
    if prompt_name is not None:
        return pb.Prompt(name=_encodable("prompt_name", prompt_name))
    return None if text is None else pb.Prompt(text=_encodable("prompt", text))


def _encodable(name: str, text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{name} is {type(text).__name__}: use a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} cannot be encoded: {error}") from error
    return text


def prompt_bytes(
    request: pb.EmbedRequest
    | pb.EncodeRequest
    | pb.TokenizeRequest
    | pb.ExplainRequest
    | pb.ScoreRequest
    | pb.ClassifyRequest,
    model: ModelInfo,
) -> int:
    """Return the size of the prompt that precedes each text, in bytes. 0 for documents of a query."""
    if isinstance(request, pb.ScoreRequest) and request.query:
        return 0
    if request.prompt.HasField("text"):
        return len(request.prompt.text.encode())
    name = request.prompt.name if request.prompt.HasField("name") else model.default_prompt_name
    return len(model.prompts.get(name, "").encode())


def listed_queries(
    attention: AttentionQuery | Sequence[AttentionQuery] | None,
) -> tuple[AttentionQuery, ...]:
    """Return the queries as a tuple.

    Raises:
        TypeError: `attention` is neither a query nor a list of queries.
    """
    if attention is None:
        return ()
    if isinstance(attention, AttentionQuery):
        return (attention,)
    is_list = isinstance(attention, Sequence) and not isinstance(attention, str)
    if not is_list or not all(isinstance(query, AttentionQuery) for query in attention):
        raise TypeError(f"attention is {attention!r}: use an AttentionQuery, a list of them, or None")
    return tuple(attention)


def query_message(query: AttentionQuery) -> pb.AttentionQuery:
    """Convert a query."""
    return pb.AttentionQuery(
        role=choose("role", query.role, values(OutputRole.DESCRIPTOR)),
        layers=query.layers,
        heads=query.heads,
        view=choose("view", query.view, values(pb.AttentionView.DESCRIPTOR)),
        reduction=None if query.reduction is None else _reduction_message(query.reduction),
    )


def _reduction_message(reduction: AttentionReduction) -> pb.AttentionReduction:
    message = pb.AttentionReduction(
        level=choose("level", reduction.level, values(pb.AttentionLevel.DESCRIPTOR)),
        special_tokens=choose(
            "special_tokens", reduction.special_tokens, values(pb.SpecialTokens.DESCRIPTOR)
        ),
        layers=choose("layers", reduction.layers, values(pb.LayerReduction.DESCRIPTOR)),
        rollout_residual=reduction.rollout_residual,
        mean_over_rows=reduction.mean_over_rows,
        rows=reduction.rows,
    )
    match reduction.form:
        case TopK(k):
            message.top_k.k = k
        case Threshold(threshold):
            message.threshold.threshold = threshold
        case Statistics() as form:
            message.statistics.received, message.statistics.entropy = form.received, form.entropy
            message.statistics.all_rows = form.all_rows
        case SqrtUint8():
            message.sqrt_uint8.SetInParent()
    return message


def pooling_value(pooling: PoolingName | None) -> Pooling.ValueType:
    """Return the number of a pooling. None selects the model's pooling."""
    if pooling is None:
        return Pooling.POOLING_UNSPECIFIED
    value: Pooling.ValueType = choose("pooling", pooling, values(Pooling.DESCRIPTOR))
    return value


def data_type(dtype: DataTypeName) -> DataType.ValueType:
    """Return the number of a data type."""
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    value: DataType.ValueType = choose("dtype", name, _DATA_TYPES)
    return value


def embedding_type(request: pb.EmbedRequest) -> EmbeddingType:
    """Return the type of the embeddings of a response."""
    return EmbeddingType(request.embedding_type or EmbeddingType.FLOAT)


def embedding_data_type(request: pb.EmbedRequest) -> DataType.ValueType:
    """Return the data type of the embeddings of a response."""
    match embedding_type(request):
        case EmbeddingType.INT8 | EmbeddingType.BINARY:
            return DataType.DATA_TYPE_INT8
        case EmbeddingType.UINT8 | EmbeddingType.UBINARY:
            return DataType.DATA_TYPE_UINT8
    return request.data_type


def num_columns(request: pb.EmbedRequest, embedding_size: int) -> int:
    """Return the length of an embedding in a response. `embedding_size` is the model's default."""
    return embedding_type(request).num_columns(request.dimensions or embedding_size)


def choose(name: str, value: str, choices: Mapping[str, int]) -> Any:  # noqa: ANN401 - an enum type
    """Return the number of a choice.

    Raises:
        ValueError: There is no such choice.
    """
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: use one of {', '.join(choices)}")
    return choices[value]
