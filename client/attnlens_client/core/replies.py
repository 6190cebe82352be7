"""Conversion of validated replies to results."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import numpy as np

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client.arguments import AttentionQuery
from attnlens_client.core.attention import QueryReader
from attnlens_client.core.checks import (
    Consistency,
    check_count,
    check_finite,
    check_presence,
    checked_array,
    checked_usage,
    invalid_text,
    precision_of,
)
from attnlens_client.core.requests import name_of
from attnlens_client.results import Array, Embeddings, EncodedText, Token, TokenizedText, Usage

_Response = TypeVar("_Response")

_MAX_INT32 = 2**31 - 1

# Index of the first text of a call, number of its texts, and the response.
Reply: TypeAlias = tuple[int, int, _Response]


def embed_consistency(request: pb.EmbedRequest) -> Consistency:
    """Return the consistency checks for all replies of Embed."""
    return Consistency(model=request.model, width=request.dimensions)


def embeddings(
    request: pb.EmbedRequest, consistency: Consistency, replies: Sequence[Reply[pb.EmbedResponse]]
) -> Embeddings:
    """Concatenate the embeddings of one or more calls into a new array (N, D).

    Raises:
        BadReplyError: A reply is invalid or inconsistent.
    """
    arrays: list[Array] = []
    usages: list[Usage] = []
    for first, count, response in replies:
        where = f"texts[{first}:{first + count}]"
        consistency.check_model(response.model, response.model_version, where)
        consistency.check_computation(response.computation, where)
        vectors = checked_array(
            response.embeddings, request.data_type, (count, None), f"embeddings of {where}"
        )
        consistency.check("width", vectors.shape[1], where)
        is_finite = np.isfinite(vectors).all(axis=1)
        if not is_finite.all():
            index = first + int(is_finite.argmin())
            raise invalid_text(index, "has an embedding with a value that is not finite")
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
    """Concatenate the tokens of all calls.

    Raises:
        BadReplyError: A reply is invalid or inconsistent.
    """
    consistency = Consistency(model=request.model)
    texts: list[TokenizedText] = []
    for first, count, response in replies:
        where = f"texts[{first}:{first + count}]"
        consistency.check_model(response.model, response.model_version, where)
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
    """Reads all replies of one `encode` or `encode_stream`. Arrays are views of the messages' bytes.

    Args:
        request: Request without inputs.
        inputs: Texts of all calls.
        queries: Attention queries of the request.
    """

    def __init__(
        self, request: pb.EncodeRequest, inputs: Sequence[pb.Input], queries: Sequence[AttentionQuery]
    ) -> None:
        self._inputs = inputs
        self.consistency = Consistency(model=request.model)
        self.queries = [
            QueryReader(number, query, request.data_type, self.consistency)
            for number, query in enumerate(queries)
        ]
        self._request = request

    def texts(self, replies: Iterable[Reply[pb.EncodeResponse]]) -> list[EncodedText]:
        """Concatenate the results of all calls.

        Raises:
            BadReplyError: A reply is invalid or inconsistent.
        """
        texts: list[EncodedText] = []
        for first, count, response in replies:
            where = f"texts[{first}:{first + count}]"
            self.consistency.check_model(response.model, response.model_version, where)
            self.consistency.check_computation(response.computation, where)
            check_count(len(response.results), count, f"results for {where}")
            texts += [
                self._text(index, result, response) for index, result in enumerate(response.results, first)
            ]
        return texts

    def _text(self, index: int, message: pb.EncodedText, response: pb.EncodeResponse) -> EncodedText:
        text = self.without_attention(index, message, response)
        if len(message.attention) != len(self.queries):
            raise invalid_text(
                index, f"has {len(message.attention)} attention results, expected {len(self.queries)}"
            )
        attention = []
        for query, result in zip(self.queries, message.attention, strict=True):
            query.check_layers(index, result.layers)
            attention.append(query.read(index, text.tokens, result))
        return replace(text, attention=tuple(attention))

    def without_attention(
        self, index: int, message: pb.EncodedText, response: pb.EncodeResponse | pb.EncodeStreamResponse
    ) -> EncodedText:
        """Return a text without its attention."""
        tokens = tokens_of(message.tokens, index, self._inputs[index])
        usage = checked_usage(message.usage, index, may_truncate=self._request.truncate)
        if len(tokens) != usage.num_tokens:
            raise invalid_text(index, f"has {len(tokens)} tokens, expected {usage.num_tokens}")
        has_hidden_state = message.HasField("last_hidden_state")
        check_presence(
            "token vectors", index, is_present=has_hidden_state, is_requested=self._request.last_hidden_state
        )
        last_hidden_state = None
        if has_hidden_state:
            name, shape = f"token vectors of texts[{index}]", (len(tokens), None)
            last_hidden_state = checked_array(message.last_hidden_state, self._request.data_type, shape, name)
            self.consistency.check("width", last_hidden_state.shape[1], f"texts[{index}]")
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


def tokens_of(messages: Iterable[pb.Token], index: int, text: pb.Input) -> tuple[Token, ...]:
    """Convert the tokens of a text and check their offsets.

    Args:
        messages: The tokens.
        index: Index of the text, for errors.
        text: The text. Offsets must be within it.
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
    _check_offsets(tokens, index, text)
    return tokens


def _check_offsets(tokens: Iterable[Token], index: int, given: pb.Input) -> None:
    if given.HasField("text_pair"):
        texts = {"text": given.text_pair.first, "second_text": given.text_pair.second}
    else:
        texts = {"text": given.text}
    ends = {source: (len(text), len(text.encode())) for source, text in texts.items()}
    unknown = (_MAX_INT32, _MAX_INT32)  # prompts that are only known to the server
    for token in tokens:
        char_limit, byte_limit = ends.get(token.source, unknown)
        if not (
            0 <= token.char_start <= token.char_end <= char_limit
            and 0 <= token.byte_start <= token.byte_end <= byte_limit
        ):
            raise invalid_text(
                index,
                f"has a token with offsets out of range: characters {token.char_start} to {token.char_end}, "
                f"bytes {token.byte_start} to {token.byte_end} of its {token.source}",
            )
