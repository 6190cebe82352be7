"""Requests: from the arguments of a method to messages. How many texts go into one is for splitting.py."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict, TypeVar

import numpy as np

from attnlens.v1.encoder_service_pb2 import (
    EmbedRequest,
    EncodeOutput,
    EncodeRequest,
    HeadReduction,
    Input,
    TokenIds,
)
from attnlens.v1.manifest_pb2 import Pooling
from attnlens.v1.tensor_pb2 import DataType
from attnlens_client.results import ModelInfo

Text: TypeAlias = str | Sequence[int]
PoolingName: TypeAlias = Literal["mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length"]
DataTypeName: TypeAlias = Literal["float32", "float16"]
HeadReductionName: TypeAlias = Literal["none", "mean"]
_Item = TypeVar("_Item")
_Value = TypeVar("_Value")

_POOLINGS = {name.removeprefix("POOLING_").lower(): value for name, value in Pooling.items() if value}
_MAX_INT32 = 2**31 - 1
_MISSING_TYPES = {"NAType", "NaTType"}  # pandas.NA and pandas.NaT
_DATA_TYPES = {"float32": DataType.DATA_TYPE_FLOAT32, "float16": DataType.DATA_TYPE_FLOAT16}
_HEAD_REDUCTIONS = {
    "none": HeadReduction.HEAD_REDUCTION_NONE,
    "mean": HeadReduction.HEAD_REDUCTION_MEAN,
}


class EmbedOptions(TypedDict, total=False):
    """What `embed` may be told, for whoever hands options on; everything can be left out.

    Attributes:
        pooling: how token vectors become one vector, before the model's dense layers. None: the model's own.
        normalize: scale each vector to length 1 at the end. None: as the model does.
        prompt_name: the name of one of the model's prompts, put before each text. None: the default one.
        prompt: the prompt itself instead of a name; "" for none, not even the default one.
        dimensions: keep the first components only, for models trained for it. None: all.
        truncate: cut a text that is too long, rather than raise InputTooLongError.
        dtype: the element type on the way and of the result.
        model: the model's name. Empty: the server's only one.
    """

    pooling: PoolingName | None
    normalize: bool | None
    dimensions: int | None
    prompt_name: str | None
    prompt: str | None
    truncate: bool
    dtype: DataTypeName
    model: str


class EncodeOptions(TypedDict, total=False):
    """What `encode` and the streams may be told, as `EmbedOptions`.

    Attributes:
        layers: the layers whose attention to return, in this order; -1 is the last. None: all.
        heads: the heads to return; -1 is the last. None: all.
        head_reduction: "mean" averages the chosen heads into an axis of length 1.
        hidden_states: return the token vectors of the last layer (default True).
        attentions: return the attention weights (default True).
        truncate: cut a text that is too long, rather than raise InputTooLongError.
        dtype: the element type on the way and of the result.
        model: the model's name. Empty: the server's only one.
    """

    layers: Sequence[int] | None
    heads: Sequence[int] | None
    head_reduction: HeadReductionName
    hidden_states: bool
    attentions: bool
    truncate: bool
    dtype: DataTypeName
    model: str


def listed(texts: Iterable[_Item]) -> list[_Item]:
    """Return `texts` as a list.

    Raises:
        TypeError: `texts` is itself one text, or what it would be iterated over are not its texts in order.
    """
    kind = type(texts).__name__
    if isinstance(texts, (str, bytes)):
        raise TypeError(f"texts is one {kind}: give a list of texts, for instance [text]")
    if isinstance(texts, Mapping):
        raise TypeError(f"texts is a {kind}: give its values, for instance list(texts.values())")
    if isinstance(texts, (set, frozenset)):
        raise TypeError(f"texts is a {kind}, which has no order: give a list, for instance sorted(texts)")
    if hasattr(texts, "columns"):  # of pandas, polars, pyarrow and others
        raise TypeError(f"texts is a {kind}: give one of its columns, for instance df['text']")
    if not isinstance(texts, Iterable):
        raise TypeError(f"texts is {kind}: give a list of texts")
    return list(texts)


def inputs(texts: Iterable[Text]) -> list[Input]:
    """Return one message for each text or sequence of token ids.

    Raises:
        TypeError: `texts` is one text, or an entry is neither a str nor a sequence of int.
        ValueError: an entry can't be sent, for instance half of a surrogate pair or an id over 31 bits.
    """
    return [_input(index, text) for index, text in enumerate(listed(texts))]


def strings(texts: Iterable[str]) -> list[str]:
    """Return `texts` as a list.

    Raises:
        TypeError: `texts` is one text, or an entry is no str.
        ValueError: an entry can't be sent: it has half of a surrogate pair.
    """
    listed_texts = listed(texts)
    for index, text in enumerate(listed_texts):
        if not isinstance(text, str):
            raise _wrong_entry(index, text, "a str")
        _input(index, text)
    return listed_texts


def _input(index: int, text: Text) -> Input:
    if isinstance(text, (bytes, bytearray, Mapping, set, frozenset)) or not isinstance(text, Iterable):
        raise _wrong_entry(index, text, "a str or a sequence of token ids")
    try:
        if isinstance(text, str):
            return Input(text=text)
        return Input(token_ids=TokenIds(ids=[operator.index(token) for token in text]))
    except TypeError as error:
        raise TypeError(f"texts[{index}] has an entry that is no token id: {error}") from error
    except ValueError as error:
        raise ValueError(f"texts[{index}] can't be sent: {error}") from error


def _wrong_entry(index: int, value: object, wanted: str) -> TypeError:
    is_missing = (
        value is None
        or (isinstance(value, (float, np.floating)) and np.isnan(value))
        or type(value).__name__ in _MISSING_TYPES
    )
    if is_missing:
        return TypeError(
            f"texts[{index}] is a missing value ({value!r}): leave it out, or give '' in its place"
        )
    return TypeError(f"texts[{index}] is {type(value).__name__}: give {wanted}")


def embed_request(
    *,
    pooling: PoolingName | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate: bool = False,
    dtype: DataTypeName = "float32",
    model: str = "",
) -> EmbedRequest:
    """Return the request without its inputs. See `EmbedOptions`.

    Raises:
        ValueError: an option has a value that no server knows.
    """
    if dimensions is not None and not 1 <= operator.index(dimensions) <= _MAX_INT32:
        raise ValueError(f"dimensions is {dimensions}: give 1 to {_MAX_INT32}, or None for all")
    if prompt_name is not None and prompt is not None:
        raise ValueError("prompt_name and prompt are both given: choose one")
    request = EmbedRequest(
        model=model,
        truncate=truncate,
        pooling=Pooling.POOLING_UNSPECIFIED if pooling is None else _chosen("pooling", pooling, _POOLINGS),
        normalize=normalize,
        dimensions=dimensions or 0,
        data_type=_data_type(dtype),
    )
    if prompt_name is not None:
        request.prompt_name = _sendable("prompt_name", prompt_name)
    if prompt is not None:
        request.prompt = _sendable("prompt", prompt)
    return request


def _sendable(name: str, text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{name} is {type(text).__name__}: give a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} can't be sent: {error}") from error
    return text


def prompt_bytes(request: EmbedRequest, model: ModelInfo) -> int:
    """Return how many bytes of UTF-8 the server puts before each text."""
    if request.HasField("prompt"):
        return len(request.prompt.encode())
    name = request.prompt_name if request.HasField("prompt_name") else model.default_prompt_name
    return len(model.prompts.get(name, "").encode())


def encode_request(
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    head_reduction: HeadReductionName = "none",
    hidden_states: bool = True,
    attentions: bool = True,
    truncate: bool = False,
    dtype: DataTypeName = "float32",
    model: str = "",
) -> EncodeRequest:
    """Return the request without its inputs. See `EncodeOptions`.

    Raises:
        TypeError: `layers` or `heads` is no list of whole numbers.
        ValueError: an option has a value that no server knows, or nothing is asked for.
    """
    outputs = [
        output
        for wanted, output in (
            (hidden_states, EncodeOutput.ENCODE_OUTPUT_LAST_HIDDEN_STATE),
            (attentions, EncodeOutput.ENCODE_OUTPUT_ATTENTIONS),
        )
        if wanted
    ]
    if not outputs:
        raise ValueError("hidden_states and attentions are both False: for tokens alone use tokenize")
    chosen_layers, chosen_heads = _numbers("layers", layers), _numbers("heads", heads)
    reduction = _chosen("head_reduction", head_reduction, _HEAD_REDUCTIONS)
    if not attentions and (chosen_layers or chosen_heads or head_reduction != "none"):
        raise ValueError("layers, heads and head_reduction choose attention weights: set attentions=True")
    return EncodeRequest(
        model=model,
        truncate=truncate,
        outputs=outputs,
        layers=chosen_layers,
        heads=chosen_heads,
        head_reduction=reduction if attentions else HeadReduction.HEAD_REDUCTION_UNSPECIFIED,
        data_type=_data_type(dtype),
    )


def _numbers(name: str, chosen: Sequence[int] | None) -> list[int]:
    """Return the numbers of layers or heads; none stand for all."""
    if chosen is None:
        return []
    try:
        numbers = [operator.index(each) for each in chosen]
    except TypeError as error:
        raise TypeError(f"{name} is {chosen!r}: give a list of whole numbers, or None for all") from error
    if not numbers:
        raise ValueError(f"{name} is empty: leave it out for all, or set attentions=False for none")
    if any(abs(each) > _MAX_INT32 for each in numbers):
        raise ValueError(f"{name} is {chosen!r}: no model has so many")
    return numbers


def _data_type(dtype: DataTypeName) -> DataType.ValueType:
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    return _chosen("dtype", name, _DATA_TYPES)


def _chosen(name: str, value: str, choices: dict[str, _Value]) -> _Value:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(choices)}")
    return choices[value]
