"""From the inputs of a request to token ids, within the model's limit."""

import asyncio
import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor

import numpy as np

from attnlens.v1.encoder_service_pb2 import Input
from attnlens_server.errors import FieldViolation, InputTooLongError, InvalidFieldsError
from attnlens_server.text import EncodedInput, TextEncoder

# Texts are tokenized in portions of about this size, so that a large request neither keeps all workers
# from the others nor holds the records of all its texts at once.
PORTION_CHARS = 1 << 16


class InputEncoder:
    """Tokenizes in `workers`; refuses or cuts what is too long."""

    def __init__(self, text_encoder: TextEncoder | None, max_tokens: int, workers: Executor) -> None:
        self._text_encoder = text_encoder
        self._max_tokens = max_tokens
        self._workers = workers

    async def encode(
        self, inputs: Sequence[Input], *, truncate: bool, with_offsets: bool, prefix: str = ""
    ) -> list[EncodedInput]:
        """Tokenize the texts among checked inputs; `prefix` stands before the names of their fields.

        Raises:
            InputTooLongError: an input has too many tokens, and `truncate` is false.
            InvalidFieldsError: a text has no tokens.
        """
        texts = [each.text for each in inputs if each.HasField("text")]
        from_text = iter(await self._encode_texts(texts, with_offsets=with_offsets))
        encoded = [
            next(from_text) if each.HasField("text") else self._encode_ids(each.token_ids.ids)
            for each in inputs
        ]
        for index, each in enumerate(encoded):
            field = f"{prefix}inputs[{index}]"
            if each.num_tokens_total > self._max_tokens and not truncate:
                raise InputTooLongError(field, each.num_tokens_total, self._max_tokens)
            if each.num_tokens == 0:
                raise InvalidFieldsError([FieldViolation(f"{field}.text", "has no tokens: send some text")])
        return encoded

    async def _encode_texts(self, texts: Sequence[str], *, with_offsets: bool) -> list[EncodedInput]:
        encoded: list[EncodedInput] = []
        if self._text_encoder is not None:  # where it is, the checker has refused texts
            for portion in portions(texts):
                encode = functools.partial(self._text_encoder.encode, portion, with_offsets=with_offsets)
                encoded += await asyncio.get_running_loop().run_in_executor(self._workers, encode)
        return encoded

    def _encode_ids(self, ids: Sequence[int]) -> EncodedInput:
        return EncodedInput(np.asarray(ids[: self._max_tokens], dtype=np.int64), len(ids))


def portions(texts: Sequence[str]) -> Iterator[list[str]]:
    """Cut a list of texts into runs of about PORTION_CHARS; a longer text is one by itself."""
    portion: list[str] = []
    size = 0
    for text in texts:
        if portion and size + len(text) > PORTION_CHARS:
            yield portion
            portion, size = [], 0
        portion.append(text)
        size += len(text)
    if portion:
        yield portion
