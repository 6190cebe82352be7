"""Replies: from messages to the classes of results.py, once they are known to be what was asked for.

What is wrong is a BadReplyError.

Letters: N texts, T tokens of a text, D hidden size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import numpy as np

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client.arguments import AttentionQuery
from attnlens_client.core.attention import QueryReader
from attnlens_client.core.checks import (
    Agreed,
    check_count,
    check_finite,
    check_presence,
    checked_array,
    checked_usage,
    precision_of,
    wrong_text,
)
from attnlens_client.core.enums import name_of
from attnlens_client.results import Array, Embeddings, EncodedText, Token, TokenizedText, Usage

_Response = TypeVar("_Response")

_MAX_INT32 = 2**31 - 1

# The number of a call's first text, how many it has, and the response.
Reply: TypeAlias = tuple[int, int, _Response]


def agreed_on(request: pb.EmbedRequest) -> Agreed:
    """Return what all replies to a request must have in common."""
    return Agreed(model=request.model, width=request.dimensions)


def embeddings(
    request: pb.EmbedRequest, agreed: Agreed, replies: Sequence[Reply[pb.EmbedResponse]]
) -> Embeddings:
    """Join the vectors of several calls, at least one, into one new array (N, D).

    Raises:
        BadReplyError: a reply is not what `request` asks for, or they don't fit together.
    """
    arrays: list[Array] = []
    usages: list[Usage] = []
    for first, count, response in replies:
        where = f"texts[{first}:{first + count}]"
        agreed.check_model(response.model, response.model_version, where)
        agreed.check_computation(response.computation, where)
        vectors = checked_array(
            response.embeddings, request.data_type, (count, None), f"embeddings of {where}"
        )
        agreed.check("width", vectors.shape[1], where)
        is_finite = np.isfinite(vectors).all(axis=1)
        if not is_finite.all():
            index = first + int(is_finite.argmin())
            raise wrong_text(index, "has an embedding with a value that is no finite number")
        check_count(len(response.usages), count, f"usages for {where}")
        usages += [
            checked_usage(usage, index, may_truncate=request.truncate)
            for index, usage in enumerate(response.usages, first)
        ]
        arrays.append(vectors)
    _, _, last = replies[-1]
    return Embeddings(
        np.concatenate(arrays),
        tuple(usages),
        last.model,
        last.model_version,
        last.computation.engine,
        precision_of(last.computation),
    )


def tokenized_texts(
    request: pb.TokenizeRequest,
    inputs: Sequence[pb.Input],
    replies: Iterable[Reply[pb.TokenizeResponse]],
) -> list[TokenizedText]:
    """Join the tokens of several calls. `inputs` are the texts of all of them.

    Raises:
        BadReplyError: as `embeddings`.
    """
    agreed = Agreed(model=request.model)
    texts: list[TokenizedText] = []
    for first, count, response in replies:
        where = f"texts[{first}:{first + count}]"
        agreed.check_model(response.model, response.model_version, where)
        check_count(len(response.results), count, f"results for {where}")
        texts += [
            TokenizedText(
                tokens_of(result.tokens, index, inputs[index]),
                result.exceeds_max_tokens,
                response.model,
                response.model_version,
            )
            for index, result in enumerate(response.results, first)
        ]
    return texts


class EncodeReader:
    """Reads all replies of one `encode` or `encode_stream`. The arrays are views of the messages' bytes.

    Args:
        request: what was asked for; its inputs don't matter.
        inputs: Texts of all calls.
        queries: those of `request`.
    """

    def __init__(
        self, request: pb.EncodeRequest, inputs: Sequence[pb.Input], queries: Sequence[AttentionQuery]
    ) -> None:
        self._inputs = inputs
        self.agreed = Agreed(model=request.model)
        self.queries = [
            QueryReader(number, query, request.data_type, self.agreed) for number, query in enumerate(queries)
        ]
        self._request = request

    def texts(self, replies: Iterable[Reply[pb.EncodeResponse]]) -> list[EncodedText]:
        """Join the results of several calls.

        Raises:
            BadReplyError: as `embeddings`.
        """
        texts: list[EncodedText] = []
        for first, count, response in replies:
            where = f"texts[{first}:{first + count}]"
            self.agreed.check_model(response.model, response.model_version, where)
            self.agreed.check_computation(response.computation, where)
            check_count(len(response.results), count, f"results for {where}")
            texts += [
                self._text(index, result, response) for index, result in enumerate(response.results, first)
            ]
        return texts

    def _text(self, index: int, message: pb.EncodedText, response: pb.EncodeResponse) -> EncodedText:
        text = self.without_attention(index, message, response)
        if len(message.attention) != len(self.queries):
            raise wrong_text(
                index, f"has {len(message.attention)} instead of {len(self.queries)} results of queries"
            )
        attention = []
        for query, result in zip(self.queries, message.attention, strict=True):
            query.check_layers(index, result.layers)
            attention.append(query.read(index, text.tokens, result))
        return replace(text, attention=tuple(attention))

    def without_attention(
        self, index: int, message: pb.EncodedText, response: pb.EncodeResponse | pb.EncodeStreamResponse
    ) -> EncodedText:
        """Read a text, except for its attention."""
        tokens = tokens_of(message.tokens, index, self._inputs[index])
        usage = checked_usage(message.usage, index, may_truncate=self._request.truncate)
        if len(tokens) != usage.num_tokens:
            raise wrong_text(index, f"has {len(tokens)} instead of {usage.num_tokens} tokens")
        has_hidden_state = message.HasField("last_hidden_state")
        check_presence("token vectors", index, has=has_hidden_state, wants=self._request.last_hidden_state)
        last_hidden_state = None
        if has_hidden_state:
            what = f"token vectors of texts[{index}]"
            shape = (len(tokens), None)
            last_hidden_state = checked_array(message.last_hidden_state, self._request.data_type, shape, what)
            self.agreed.check("width", last_hidden_state.shape[1], f"texts[{index}]")
            check_finite(last_hidden_state, "token vectors", index)
        return EncodedText(
            tokens=tokens,
            last_hidden_state=last_hidden_state,
            attention=(),
            num_tokens=usage.num_tokens,
            num_tokens_total=usage.num_tokens_total,
            truncated=usage.truncated,
            model=response.model,
            model_version=response.model_version,
            engine=response.computation.engine,
            precision=precision_of(response.computation),
        )


def tokens_of(messages: Iterable[pb.Token], index: int, given: pb.Input) -> tuple[Token, ...]:
    """Read the tokens of a text.

    Args:
        messages: The tokens.
        index: Index of the text, for errors.
        given: The text. Offsets into it must be within it.
    """
    tokens = tuple(
        Token(
            id=token.id,
            text=token.text,
            source=name_of(pb.TokenSource.DESCRIPTOR, token.source),
            byte_start=token.byte_start,
            byte_end=token.byte_end,
            char_start=token.char_start,
            char_end=token.char_end,
            word_index=token.word_index if token.HasField("word_index") else None,
        )
        for token in messages
    )
    _check_offsets(tokens, index, given)
    return tokens


def _check_offsets(tokens: Iterable[Token], index: int, given: pb.Input) -> None:
    if given.HasField("text_pair"):
        texts = {"text": given.text_pair.first, "second_text": given.text_pair.second}
    else:
        texts = {"text": given.text}
    ends = {source: (len(text), len(text.encode())) for source, text in texts.items()}
    unknown = (_MAX_INT32, _MAX_INT32)  # of a prompt that the server has under a name
    for token in tokens:
        char_limit, byte_limit = ends.get(token.source, unknown)
        if not (
            0 <= token.char_start <= token.char_end <= char_limit
            and 0 <= token.byte_start <= token.byte_end <= byte_limit
        ):
            raise wrong_text(
                index,
                f"has a token at characters {token.char_start} to {token.char_end} and bytes "
                f"{token.byte_start} to {token.byte_end} of its {token.source}, out of range",
            )
