"""Requests: from the arguments of a method to messages. How many texts go into one is for splitting.py."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from attnlens.v1.encoder_service_pb2 import EmbedRequest, HeadReduction, Input, TokenIds
from attnlens.v1.manifest_pb2 import Pooling
from attnlens.v1.tensor_pb2 import DataType
from attnlens_client.results import ModelInfo

Text: TypeAlias = str | Sequence[int]
PoolingName: TypeAlias = Literal["mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length"]
DataTypeName: TypeAlias = Literal["float32", "float16"]
HeadReductionName: TypeAlias = Literal["none", "mean"]
_Item = TypeVar("_Item")
_Value = TypeVar("_Value")

POOLINGS = {name.removeprefix("POOLING_").lower(): value for name, value in Pooling.items() if value}
MAX_INT32 = 2**31 - 1
_MISSING_TYPES = {"NAType", "NaTType"}  # pandas.NA and pandas.NaT
_DATA_TYPES = {"float32": DataType.DATA_TYPE_FLOAT32, "float16": DataType.DATA_TYPE_FLOAT16}
HEAD_REDUCTIONS = {
    "none": HeadReduction.HEAD_REDUCTION_NONE,
    "mean": HeadReduction.HEAD_REDUCTION_MEAN,
}


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


def sendable(name: str, text: str) -> str:
    """Return `text`, the argument called `name`.

    Raises:
        TypeError: it is no str.
        ValueError: it can't be sent.
    """
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


def chosen_numbers(name: str, chosen: Sequence[int] | None) -> list[int]:
    """Return the numbers of layers or heads; none stand for all."""
    if chosen is None:
        return []
    try:
        numbers = [operator.index(number) for number in chosen]
    except TypeError as error:
        raise TypeError(f"{name} is {chosen!r}: give a list of whole numbers, or None for all") from error
    if not numbers:
        raise ValueError(f"{name} is empty: leave it out for all, or set attentions=False for none")
    if any(abs(number) > MAX_INT32 for number in numbers):
        raise ValueError(f"{name} is {chosen!r}: no model has so many")
    return numbers


def data_type(dtype: DataTypeName) -> DataType.ValueType:
    """Return the element type for its name."""
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    return chosen("dtype", name, _DATA_TYPES)


def chosen(name: str, value: str, choices: Mapping[str, _Value]) -> _Value:
    """Return what `value`, the argument called `name`, stands for.

    Raises:
        ValueError: it is none of `choices`.
    """
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(choices)}")
    return choices[value]
