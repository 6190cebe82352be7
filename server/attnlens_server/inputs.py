"""From the inputs of a request to token ids, within the model's limit."""

import asyncio
import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np

from attnlens.v1.encoder_service_pb2 import Input
from attnlens_server.errors import FieldViolation, InputTooLongError, InvalidFieldsError
from attnlens_server.text import EncodedInput, TextEncoder

# Texts are tokenized in portions of about this size, so that a large request neither keeps all workers
# from the others nor holds the records of all its texts at once.
PORTION_CHARS = 1 << 16


class InputEncoder:
    """Tokenizes in `workers`; refuses or cuts what is too long."""

    def __init__(
        self, text_encoder: TextEncoder | None, max_tokens: int, workers: Executor, *, exclude_prompt: bool
    ) -> None:
        self._text_encoder = text_encoder
        self._max_tokens = max_tokens
        self._exclude_prompt = exclude_prompt
        self._workers = workers

    async def encode(
        self,
        inputs: Sequence[Input],
        *,
        truncate: bool,
        with_offsets: bool,
        prefix: str = "",
        prompt: str = "",
    ) -> list[EncodedInput]:
        """Tokenize the texts among checked inputs.

        Args:
            inputs: texts and token ids.
            truncate: cut what is too long.
            with_offsets: keep the tokenizer's record of each text.
            prefix: stands before the names of the inputs' fields in errors.
            prompt: goes before each text; the offsets are then those in the whole.

        Raises:
            InputTooLongError: an input has too many tokens, and `truncate` is false.
            InvalidFieldsError: a text has no tokens, or none that count.
        """
        texts = [prompt + each.text for each in inputs if each.HasField("text")]
        num_excluded = await self._num_excluded(prompt) if texts else 0
        from_text = (
            replace(each, num_excluded=num_excluded)
            for each in await self._encode_texts(texts, with_offsets=with_offsets)
        )
        encoded = [
            next(from_text) if each.HasField("text") else self._encode_ids(each.token_ids.ids)
            for each in inputs
        ]
        for index, each in enumerate(encoded):
            field = f"{prefix}inputs[{index}]"
            if each.num_tokens_total > self._max_tokens and not truncate:
                raise InputTooLongError(
                    field,
                    each.num_tokens_total,
                    self._max_tokens,
                    has_prompt=bool(prompt) and inputs[index].HasField("text"),
                )
            if each.num_tokens <= each.num_excluded:
                beside = " beside the prompt, which does not count" if each.num_excluded else ""
                is_full = each.num_tokens_total > self._max_tokens
                remedy = f"shorten the prompt to fit {self._max_tokens}" if is_full else "send some text"
                description = f"has no tokens{beside}: {remedy}"
                raise InvalidFieldsError([FieldViolation(f"{field}.text", description)])
        return encoded

    async def _num_excluded(self, prompt: str) -> int:
        """Return how many tokens at the beginning of a text with `prompt` are left out of the pooling."""
        if not prompt or not self._exclude_prompt or self._text_encoder is None:
            return 0
        count = functools.partial(self._text_encoder.num_prompt_tokens, prompt)
        return await asyncio.get_running_loop().run_in_executor(self._workers, count)

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
