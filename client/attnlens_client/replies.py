"""Replies: from messages to the classes of results.py, once they are known to be what was asked for.

Nothing in a reply is believed: another program may answer at the address, something on the way may have
changed the reply, and the model may be replaced between two calls. What is wrong is a BadReplyError.

Letters: N texts, T tokens of a text, D hidden size, L' and H' the chosen layers and heads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import numpy as np

from attnlens.tensors import from_tensor, numpy_dtype
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.tensor_pb2 import DataType, Tensor
from attnlens_client import parsing
from attnlens_client.errors import BadReplyError
from attnlens_client.results import (
    Array,
    Embeddings,
    EncodedText,
    HeadPart,
    LayerPart,
    ModelInfo,
    TokenizedText,
    Usage,
)

_Response = TypeVar("_Response")

# The number of a call's first text, how many it has, and the response.
Reply: TypeAlias = tuple[int, int, _Response]

_MAX_MESSAGE_CHARS = 500


def _wrong(what: str, text_index: int | None = None) -> BadReplyError:
    return BadReplyError(f"the reply is wrong: {what[:_MAX_MESSAGE_CHARS]}", text_index=text_index)


class _Agreed:
    """What all replies of one method have in common: what was asked for, else what the first one has."""

    def __init__(self, **asked: str | int) -> None:
        self._values: dict[str, str | int] = {name: value for name, value in asked.items() if value}

    def check(self, name: str, value: str | int, where: str) -> None:
        known = self._values.setdefault(name, value)
        if value != known:
            raise _wrong(f"the {name.replace('_', ' ')} of {where} is {value!r} instead of {known!r}")


def embeddings(request: pb.EmbedRequest, replies: Sequence[Reply[pb.EmbedResponse]]) -> Embeddings:
    """Join the vectors of several calls, at least one, into one new array (N, D).

    Raises:
        BadReplyError: a reply is not what `request` asks for, or they don't fit together.
    """
    agreed = _Agreed(model=request.model, width=request.dimensions)
    arrays: list[Array] = []
    usages: list[Usage] = []
    for first, count, response in replies:
        where = f"texts[{first}:{first + count}]"
        agreed.check("model", response.model, where)
        vectors = _array(response.embeddings, request.data_type, (count, None), f"embeddings of {where}")
        agreed.check("width", vectors.shape[1], where)
        if not np.isfinite(vectors).all():
            index = first + int(np.isfinite(vectors).all(axis=1).argmin())
            raise _wrong(f"the embedding of texts[{index}] has a value that is no finite number", index)
        _check_count(len(response.usages), count, f"usages for {where}")
        usages += [
            _usage(usage, index, may_truncate=request.truncate)
            for index, usage in enumerate(response.usages, first)
        ]
        arrays.append(vectors)
    return Embeddings(np.concatenate(arrays), tuple(usages))


def tokenized_texts(
    request: pb.TokenizeRequest, replies: Iterable[Reply[pb.TokenizeResponse]]
) -> list[TokenizedText]:
    """Join the tokens of several calls.

    Raises:
        BadReplyError: as `embeddings`.
    """
    agreed = _Agreed(model=request.model)
    texts: list[TokenizedText] = []
    for first, count, response in replies:
        where = f"texts[{first}:{first + count}]"
        agreed.check("model", response.model, where)
        _check_count(len(response.results), count, f"results for {where}")
        texts += [
            TokenizedText(parsing.tokens(result.tokens), result.exceeds_max_tokens)
            for result in response.results
        ]
    return texts


def encoded_texts(
    request: pb.EncodeRequest, replies: Iterable[Reply[pb.EncodeResponse]]
) -> list[EncodedText]:
    """Join the results of several calls.

    Raises:
        BadReplyError: as `embeddings`.
    """
    reader = EncodeReader(request)
    return [text for first, count, response in replies for text in reader.texts(first, count, response)]


class EncodeReader:
    """Reads all replies of one `encode` or `stream`. The arrays are views of the messages' bytes.

    Args:
        request: what was asked for; its inputs don't matter.
    """

    def __init__(self, request: pb.EncodeRequest) -> None:
        self.wants_attention = pb.ENCODE_OUTPUT_ATTENTIONS in request.outputs
        self._wants_hidden_state = pb.ENCODE_OUTPUT_LAST_HIDDEN_STATE in request.outputs
        self._request = request
        self._agreed = _Agreed(model=request.model)

    def texts(self, first: int, count: int, response: pb.EncodeResponse) -> list[EncodedText]:
        """Read the reply to one call of `count` texts from number `first` on."""
        where = f"texts[{first}:{first + count}]"
        self.check_model(response.model, where)
        _check_count(len(response.results), count, f"results for {where}")
        return [self._text(index, result) for index, result in enumerate(response.results, first)]

    @property
    def num_layers_asked(self) -> int | None:
        """How many layers were asked for. None: all."""
        return len(self._request.layers) or None

    def check_model(self, name: str, where: str) -> None:
        """Check that it is the one asked for, or the one that answered before."""
        self._agreed.check("model", name, where)

    def _text(self, index: int, message: pb.EncodedText) -> EncodedText:
        text = self.head(index, message)
        has_attention = message.HasField("attention")
        _check_presence("attention weights", index, has=has_attention, wants=self.wants_attention)
        if not self.wants_attention:
            return text
        layers = tuple(message.attention.layers)
        self.check_num_layers(len(layers), index)
        for place, layer in enumerate(layers):
            self.check_layer(place, layer, index)
        weights = self.weights(index, message.attention, text.num_tokens)
        return replace(text, attentions=weights, layers=layers, heads=tuple(message.attention.heads))

    def head(self, index: int, message: pb.EncodedText) -> EncodedText:
        """Read everything of a text but its attention weights."""
        tokens = parsing.tokens(message.tokens)
        usage = _usage(message.usage, index, may_truncate=self._request.truncate)
        _check_count(len(tokens), usage.num_tokens, f"tokens for texts[{index}]")
        has_hidden_state = message.HasField("last_hidden_state")
        _check_presence("token vectors", index, has=has_hidden_state, wants=self._wants_hidden_state)
        hidden_states = None
        if has_hidden_state:
            what = f"token vectors of texts[{index}]"
            shape = (len(tokens), None)
            hidden_states = _array(message.last_hidden_state, self._request.data_type, shape, what)
            self._agreed.check("width", hidden_states.shape[1], f"texts[{index}]")
            _check_finite(hidden_states, what, index)
        return EncodedText(
            tokens=tokens,
            hidden_states=hidden_states,
            attentions=None,
            layers=(),
            heads=(),
            num_tokens=usage.num_tokens,
            num_tokens_total=usage.num_tokens_total,
            truncated=usage.truncated,
        )

    def weights(self, index: int, message: pb.Attention, num_tokens: int) -> Array:
        """Read the attention weights of some layers, (L', H', T, T), whose numbers have been checked."""
        asked = self._request.heads
        self._check_num("heads", len(asked), len(message.heads), index)
        for place, head in enumerate(message.heads):
            self._check_number("heads", asked, place, head, index)
        is_mean = self._request.head_reduction == pb.HEAD_REDUCTION_MEAN
        if (message.head_reduction == pb.HEAD_REDUCTION_MEAN) != is_mean:
            raise _wrong(f"the heads of texts[{index}] are {'not ' * is_mean}averaged", index)
        what = f"attention weights of texts[{index}]"
        shape = (len(message.layers), 1 if is_mean else len(message.heads), num_tokens, num_tokens)
        weights = _array(message.weights, self._request.data_type, shape, what)
        _check_finite(weights, what, index)
        return weights

    def check_num_layers(self, number: int, index: int) -> None:
        """Check how many layers a text has."""
        self._check_num("layers", len(self._request.layers), number, index)

    def check_layer(self, place: int, layer: int, index: int) -> None:
        """Check the number of the layer in one place of those asked for."""
        self._check_number("layers", self._request.layers, place, layer, index)

    def _check_num(self, kind: str, num_asked: int, number: int, index: int) -> None:
        if num_asked:
            _check_count(number, num_asked, f"{kind} for texts[{index}]")
        elif number < 1:
            raise _wrong(f"texts[{index}] has no {kind}", index)
        else:
            self._agreed.check(f"number_of_{kind}", number, f"texts[{index}]")

    def _check_number(self, kind: str, asked: Sequence[int], place: int, number: int, index: int) -> None:
        """Check a layer or a head: -1 asks for the last one, whose number shows how many there are."""
        expected = asked[place] if asked else place
        if expected < 0 <= number:
            self._agreed.check(f"number_of_{kind}", number - expected, f"texts[{index}]")
        elif number < 0 or number != expected:
            raise _wrong(f"texts[{index}] has {number} instead of {expected} among its {kind}", index)


class StreamReader:
    """Reads the messages of one streaming call: text by text, a head and then its layers.

    Args:
        texts: the reader of the whole method.
        first, count: the number of the call's first text, and how many it has.
    """

    def __init__(self, texts: EncodeReader, first: int, count: int) -> None:
        self._texts = texts
        self._first, self._end = first, first + count
        self._index = first - 1  # the text whose parts come
        self._num_tokens = 0
        self._num_received = 0  # layers of it
        self._num_layers: int | None = 0  # None: the server does not say how many will come

    def part(self, response: pb.EncodeStreamResponse) -> HeadPart | LayerPart:
        """Read one message.

        Raises:
            BadReplyError: it is not what was asked for, or does not follow the one before.
        """
        index = self._first + response.input_index
        self._texts.check_model(response.model, f"texts[{index}]")
        if response.HasField("head"):
            self._end_text()
            if index != self._index + 1 or index >= self._end:
                raise _wrong(f"the stream has texts[{index}] where texts[{self._index + 1}] is due")
            text = self._texts.head(index, response.head)
            _check_presence("attention weights", index, has=response.head.HasField("attention"), wants=False)
            self._index, self._num_tokens, self._num_received = index, text.num_tokens, 0
            self._num_layers = self._announced(response.num_attention_parts)
            return HeadPart(index, text, self._num_layers)
        layers, heads = tuple(response.attention.layers), tuple(response.attention.heads)
        if index != self._index or self._num_received == self._num_layers:
            raise _wrong(f"the stream has layers {layers} of texts[{index}] out of order")
        _check_count(len(layers), 1, f"layers in one part of texts[{index}]")
        self._texts.check_layer(self._num_received, layers[0], index)
        self._num_received += 1
        [weights] = self._texts.weights(index, response.attention, self._num_tokens)  # (H', T, T)
        return LayerPart(index, layers[0], heads, weights)

    def finish(self) -> None:
        """Check that everything has come, once the stream has ended.

        Raises:
            BadReplyError: a text is missing, or a part of the last one.
        """
        self._end_text()
        if self._index + 1 != self._end:
            done = self._index + 1 - self._first
            raise _wrong(f"the stream ends after {done} of {self._end - self._first} texts")

    def _announced(self, num_layers: int) -> int | None:
        """Return how many layers follow a head."""
        if not self._texts.wants_attention:
            _check_count(num_layers, 0, f"layers for texts[{self._index}]")
        elif num_layers:
            self._texts.check_num_layers(num_layers, self._index)
        else:
            return self._texts.num_layers_asked  # older servers do not say it
        return num_layers

    def _end_text(self) -> None:
        if self._num_layers is None:
            self._texts.check_num_layers(self._num_received, self._index)
        else:
            _check_count(self._num_received, self._num_layers, f"layers for texts[{self._index}]")


class Assembler:
    """Puts the parts of a stream together again, one text at a time."""

    def __init__(self) -> None:
        self._head: HeadPart | None = None
        self._layers: list[LayerPart] = []

    def add(self, part: HeadPart | LayerPart) -> list[EncodedText]:
        """Take the next part and return the texts that are complete now, mostly none or one."""
        complete = []
        if isinstance(part, HeadPart):
            complete = self.finish()
            self._head = part
        else:
            self._layers.append(part)
        if self._head is not None and len(self._layers) == self._head.num_layers:
            complete += self.finish()
        return complete

    def finish(self) -> list[EncodedText]:
        """Return the text whose parts have come, if there is one."""
        head, layers = self._head, self._layers
        self._head, self._layers = None, []
        if head is None:
            return []
        if not layers:
            return [head.text]
        numbers, weights = tuple(layer.layer for layer in layers), _stacked(layers)
        return [replace(head.text, attentions=weights, layers=numbers, heads=layers[0].heads)]


def _stacked(layers: list[LayerPart]) -> Array:
    weights = np.stack([layer.weights for layer in layers])  # (L', H', T, T)
    weights.flags.writeable = False  # like the arrays of `encode`
    return weights


def model(name: str, message: pb.Model) -> ModelInfo:
    """Read the model that was asked for by `name`; "" is any.

    Raises:
        BadReplyError: it is another one, or its sizes and limits can't be.
    """
    if name not in ("", message.name):
        raise _wrong(f"the model is {message.name!r} instead of {name!r}")
    info = parsing.model_info(message)
    for size in ("hidden_size", "num_layers", "num_heads", "embedding_size", "max_tokens"):
        if getattr(info, size) < 1:
            raise _wrong(f"the {size} of the model {info.name!r} is {getattr(info, size)}")
    for limit in message.limits.DESCRIPTOR.fields:
        if getattr(message.limits, limit.name) < 0:
            raise _wrong(f"the limit {limit.name} is {getattr(message.limits, limit.name)}")
    return info


def _check_count(number: int, expected: int, what: str) -> None:
    if number != expected:
        raise _wrong(f"there are {number} instead of {expected} {what}")


def _check_presence(what: str, index: int, *, has: bool, wants: bool) -> None:
    if has != wants:
        raise _wrong(f"texts[{index}] comes {'with' if has else 'without'} {what}", index)


def _usage(message: pb.Usage, index: int, *, may_truncate: bool) -> Usage:
    usage = Usage(message.num_tokens, message.num_tokens_total, message.truncated)
    is_cut = usage.num_tokens < usage.num_tokens_total
    if not 0 <= usage.num_tokens <= usage.num_tokens_total or usage.truncated != is_cut:
        raise _wrong(f"texts[{index}] can't have {usage}", index)
    if usage.truncated and not may_truncate:
        raise _wrong(f"texts[{index}] was truncated, which was not asked for", index)
    return usage


def _array(tensor: Tensor, data_type: DataType.ValueType, shape: tuple[int | None, ...], what: str) -> Array:
    """Return the tensor as an array of `shape`, where None is any length. Nothing is allocated."""
    given = tuple(tensor.shape[: len(shape) + 1])
    fits = len(given) == len(shape) and all(
        expected in (None, length) for length, expected in zip(given, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise _wrong(f"the {what} have the shape {given} instead of ({wanted})")
    try:
        array = from_tensor(tensor)
    except ValueError as error:
        raise _wrong(f"the {what}: {error}") from error
    if array.dtype != numpy_dtype(data_type):
        raise _wrong(f"the {what} are {array.dtype} instead of {numpy_dtype(data_type)}")
    return array


def _check_finite(array: Array, what: str, index: int) -> None:
    if not np.isfinite(array).all():
        raise _wrong(f"the {what} have a value that is no finite number", index)
