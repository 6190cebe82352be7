"""Replies: from messages to the classes of results.py, once they are known to be what was asked for.

What is wrong is a BadReplyError.

Letters: N texts, T tokens of a text, D hidden size, L' and H' the chosen layers and heads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import numpy as np

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client.core import models
from attnlens_client.core.checks import (
    Agreed,
    check_count,
    check_finite,
    check_presence,
    checked_array,
    checked_usage,
    wrong_reply,
)
from attnlens_client.results import Array, Embeddings, EncodedText, TokenizedText, Usage

_Response = TypeVar("_Response")

# The number of a call's first text, how many it has, and the response.
Reply: TypeAlias = tuple[int, int, _Response]


def embeddings(request: pb.EmbedRequest, replies: Sequence[Reply[pb.EmbedResponse]]) -> Embeddings:
    """Join the vectors of several calls, at least one, into one new array (N, D).

    Raises:
        BadReplyError: a reply is not what `request` asks for, or they don't fit together.
    """
    agreed = Agreed(model=request.model, width=request.dimensions)
    arrays: list[Array] = []
    usages: list[Usage] = []
    for first, count, response in replies:
        where = f"texts[{first}:{first + count}]"
        agreed.check("model", response.model, where)
        vectors = checked_array(
            response.embeddings, request.data_type, (count, None), f"embeddings of {where}"
        )
        agreed.check("width", vectors.shape[1], where)
        if not np.isfinite(vectors).all():
            index = first + int(np.isfinite(vectors).all(axis=1).argmin())
            raise wrong_reply(f"the embedding of texts[{index}] has a value that is no finite number", index)
        check_count(len(response.usages), count, f"usages for {where}")
        usages += [
            checked_usage(usage, index, may_truncate=request.truncate)
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
    agreed = Agreed(model=request.model)
    texts: list[TokenizedText] = []
    for first, count, response in replies:
        where = f"texts[{first}:{first + count}]"
        agreed.check("model", response.model, where)
        check_count(len(response.results), count, f"results for {where}")
        texts += [
            TokenizedText(models.tokens(result.tokens), result.exceeds_max_tokens)
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
        self._agreed = Agreed(model=request.model)

    def texts(self, first: int, count: int, response: pb.EncodeResponse) -> list[EncodedText]:
        """Read the reply to one call of `count` texts from number `first` on."""
        where = f"texts[{first}:{first + count}]"
        self.check_model(response.model, where)
        check_count(len(response.results), count, f"results for {where}")
        return [self._text(index, result) for index, result in enumerate(response.results, first)]

    def check_model(self, name: str, where: str) -> None:
        """Check that it is the one asked for, or the one that answered before."""
        self._agreed.check("model", name, where)

    def _text(self, index: int, message: pb.EncodedText) -> EncodedText:
        text = self.head(index, message)
        has_attention = message.HasField("attention")
        check_presence("attention weights", index, has=has_attention, wants=self.wants_attention)
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
        tokens = models.tokens(message.tokens)
        usage = checked_usage(message.usage, index, may_truncate=self._request.truncate)
        check_count(len(tokens), usage.num_tokens, f"tokens for texts[{index}]")
        has_hidden_state = message.HasField("last_hidden_state")
        check_presence("token vectors", index, has=has_hidden_state, wants=self._wants_hidden_state)
        hidden_states = None
        if has_hidden_state:
            what = f"token vectors of texts[{index}]"
            shape = (len(tokens), None)
            hidden_states = checked_array(message.last_hidden_state, self._request.data_type, shape, what)
            self._agreed.check("width", hidden_states.shape[1], f"texts[{index}]")
            check_finite(hidden_states, what, index)
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
            raise wrong_reply(f"the heads of texts[{index}] are {'not ' * is_mean}averaged", index)
        what = f"attention weights of texts[{index}]"
        shape = (len(message.layers), 1 if is_mean else len(message.heads), num_tokens, num_tokens)
        weights = checked_array(message.weights, self._request.data_type, shape, what)
        check_finite(weights, what, index)
        return weights

    def check_num_layers(self, number: int, index: int) -> None:
        """Check how many layers a text has."""
        self._check_num("layers", len(self._request.layers), number, index)

    def check_layer(self, place: int, layer: int, index: int) -> None:
        """Check the number of the layer in one place of those asked for."""
        self._check_number("layers", self._request.layers, place, layer, index)

    def _check_num(self, kind: str, num_asked: int, number: int, index: int) -> None:
        if num_asked:
            check_count(number, num_asked, f"{kind} for texts[{index}]")
        elif number < 1:
            raise wrong_reply(f"texts[{index}] has no {kind}", index)
        else:
            self._agreed.check(f"number_of_{kind}", number, f"texts[{index}]")

    def _check_number(self, kind: str, asked: Sequence[int], place: int, number: int, index: int) -> None:
        """Check a layer or a head: -1 asks for the last one, whose number shows how many there are."""
        expected = asked[place] if asked else place
        if expected < 0 <= number:
            self._agreed.check(f"number_of_{kind}", number - expected, f"texts[{index}]")
        elif number < 0 or number != expected:
            raise wrong_reply(f"texts[{index}] has {number} instead of {expected} among its {kind}", index)
