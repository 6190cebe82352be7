"""Requests: from the arguments of a method to messages. How many texts go into one is for splitting.py."""

import operator
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from attnlens.reductions import AttentionReduction, SqrtUint8, Statistics, Threshold, TopK
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.manifest_pb2 import OutputRole, Pooling
from attnlens.v1.tensor_pb2 import DataType
from attnlens_client.arguments import AttentionQuery, DataTypeName, PoolingName, Text, TokenIds
from attnlens_client.core import enums
from attnlens_client.model_info import ModelInfo

_MISSING_TYPES = {"NAType", "NaTType", "MaskedConstant"}  # pandas.NA, pandas.NaT and numpy.ma.masked
_DATA_TYPES = {"float32": DataType.DATA_TYPE_FLOAT32, "float16": DataType.DATA_TYPE_FLOAT16}


def messages(texts: Iterable[Text]) -> Iterator[pb.Input]:
    """Yield one message for each text, pair or sequence of token ids, read as they are asked for.

    A column of pandas, polars or pyarrow and an array of numpy are texts like a list of them.

    Raises:
        TypeError: at once, where `texts` is itself one text, or what it would be iterated over are not its
            texts in order; later, where an entry is none of these.
        ValueError: later: an entry can't be sent, for instance half of a surrogate pair or an id over 31
            bits.
    """
    kind = type(texts).__name__
    if isinstance(texts, (str, bytes, TokenIds)):
        raise TypeError(f"texts is one {kind}: give a list of texts, for instance [text]")
    if isinstance(texts, Mapping):
        raise TypeError(f"texts is a {kind}: give its values, for instance list(texts.values())")
    if isinstance(texts, (set, frozenset)):
        raise TypeError(f"texts is a {kind}, which has no order: give a list, for instance sorted(texts)")
    # Tables of pandas, polars, pyarrow and others. Asked of the class: a lazy one would compute them.
    if hasattr(type(texts), "columns") or hasattr(type(texts), "column_names"):
        raise TypeError(f"texts is a {kind}: give one of its columns, for instance df['text']")
    if isinstance(texts, AsyncIterable):
        raise TypeError(
            f"texts is {kind}, which is asynchronous: give a list, [text async for text in texts]"
        )
    if not isinstance(texts, Iterable):
        raise TypeError(f"texts is {kind}: give a list of texts")
    return (_input(index, text) for index, text in enumerate(texts))


def one_input(name: str, text: Text) -> pb.Input:
    """Return the message of one text, pair or sequence of token ids.

    Raises:
        TypeError, ValueError: as `inputs`, with the argument's name.
    """
    try:
        return _input(0, text)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("texts[0]", name, 1)) from error


def inputs(texts: Iterable[Text]) -> list[pb.Input]:
    """Return one message for each text, pair or sequence of token ids.

    Raises:
        TypeError, ValueError: as `messages`.
    """
    return list(messages(texts))


def _input(index: int, text: Any) -> pb.Input:  # noqa: ANN401 - whatever an iterable holds
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
        is_no_list = isinstance(text, (bytes, bytearray, Mapping, set, frozenset)) or _is_missing(text)
        if is_no_list or not isinstance(text, Iterable):
            raise _wrong_entry(index, text)
        return pb.Input(token_ids=pb.TokenIds(input_ids=_whole_numbers(index, text)))
    except ValueError as error:
        raise ValueError(f"texts[{index}] can't be sent: {error}") from error


def _whole_numbers(index: int, numbers: Iterable[Any]) -> list[int]:
    found: list[int] = []
    for number in numbers:
        if isinstance(number, str):
            raise TypeError(
                f"texts[{index}] has an entry that is no token id, {number!r}: for a pair of texts give a "
                "tuple (first, second)"
            )
        try:
            found.append(operator.index(number))
        except TypeError as error:
            raise TypeError(f"texts[{index}] has an entry that is no token id: {error}") from error
    return found


def _is_missing(value: object) -> bool:
    is_nan = isinstance(value, (float, np.floating)) and np.isnan(value)
    return value is None or bool(is_nan) or type(value).__name__ in _MISSING_TYPES


def _wrong_entry(index: int, value: object) -> TypeError:
    if _is_missing(value):
        return TypeError(
            f"texts[{index}] is a missing value ({value!r}): leave it out, or give '' in its place"
        )
    return TypeError(
        f"texts[{index}] is {type(value).__name__}: give a str, a pair of them or a sequence of token ids"
    )


def num_bytes(text: pb.Input) -> int:
    """Return the bytes of UTF-8 in a text or pair; 0 for token ids."""
    pair = text.text_pair
    return len(text.text.encode()) + len(pair.first.encode()) + len(pair.second.encode())


def prompt(prompt_name: str | None, text: str | None) -> pb.Prompt | None:
    """Return the prompt of a request. None: it says nothing.

    Raises:
        TypeError: an argument is no str.
        ValueError: it can't be sent, or both are given.
    """
    if prompt_name is not None and text is not None:
        raise ValueError("prompt_name and prompt are both given: choose one")
    if prompt_name is not None:
        return pb.Prompt(name=_sendable("prompt_name", prompt_name))
    return None if text is None else pb.Prompt(text=_sendable("prompt", text))


def _sendable(name: str, text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{name} is {type(text).__name__}: give a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} can't be sent: {error}") from error
    return text


def prompt_bytes(
    request: pb.EmbedRequest | pb.EncodeRequest | pb.TokenizeRequest | pb.ExplainRequest, model: ModelInfo
) -> int:
    """Return how many bytes of UTF-8 the server puts before each text."""
    if request.prompt.HasField("text"):
        return len(request.prompt.text.encode())
    name = request.prompt.name if request.prompt.HasField("name") else model.default_prompt_name
    return len(model.prompts.get(name, "").encode())


def listed_queries(
    attention: AttentionQuery | Sequence[AttentionQuery] | None,
) -> tuple[AttentionQuery, ...]:
    """Return the queries of a request.

    Raises:
        TypeError: `attention` is neither a query nor a list of them.
    """
    if attention is None:
        return ()
    if isinstance(attention, AttentionQuery):
        return (attention,)
    is_list = isinstance(attention, Sequence) and not isinstance(attention, str)
    if not is_list or not all(isinstance(query, AttentionQuery) for query in attention):
        raise TypeError(f"attention is {attention!r}: give an AttentionQuery, a list of them, or None")
    return tuple(attention)


def query_message(query: AttentionQuery) -> pb.AttentionQuery:
    """Return the message of a query."""
    return pb.AttentionQuery(
        role=_chosen("role", query.role, enums.values(OutputRole.DESCRIPTOR)),
        layers=query.layers,
        heads=query.heads,
        view=_chosen("view", query.view, enums.values(pb.AttentionView.DESCRIPTOR)),
        reduction=None if query.reduction is None else _reduction_message(query.reduction),
    )


def _reduction_message(reduction: AttentionReduction) -> pb.AttentionReduction:
    message = pb.AttentionReduction(
        level=_chosen("level", reduction.level, enums.values(pb.AttentionLevel.DESCRIPTOR)),
        special_tokens=_chosen(
            "special_tokens", reduction.special_tokens, enums.values(pb.SpecialTokens.DESCRIPTOR)
        ),
        layers=_chosen("layers", reduction.layers, enums.values(pb.LayerReduction.DESCRIPTOR)),
        rollout_residual=reduction.rollout_residual,
        mean_over_rows=reduction.mean_over_rows,
        rows=reduction.rows,
    )
    match reduction.form:
        case TopK(k):
            message.top_k.k = k
        case Threshold(threshold):
            message.threshold.threshold = threshold
        case Statistics() as asked:
            message.statistics.received, message.statistics.entropy = asked.received, asked.entropy
            message.statistics.all_rows = asked.all_rows
        case SqrtUint8():
            message.sqrt_uint8.SetInParent()
    return message


def pooling_value(pooling: PoolingName | None) -> Pooling.ValueType:
    """Return the pooling for its name. None: the model's own."""
    if pooling is None:
        return Pooling.POOLING_UNSPECIFIED
    value: Pooling.ValueType = _chosen("pooling", pooling, enums.values(Pooling.DESCRIPTOR))
    return value


def data_type(dtype: DataTypeName) -> DataType.ValueType:
    """Return the element type for its name."""
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    value: DataType.ValueType = _chosen("dtype", name, _DATA_TYPES)
    return value


def _chosen(name: str, value: str, choices: Mapping[str, int]) -> Any:  # noqa: ANN401 - a type of enum
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(choices)}")
    return choices[value]
