"""From the inputs of a request to token ids, within the model's limit."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnlens.v1.encoder_service_pb2 import Input
from attnlens_server.errors import FieldViolation, InputTooLongError, InvalidFieldsError
from attnlens_server.text import EncodedInput, TextEncoder
from attnlens_server.workers import Workers

# Inputs are encoded in portions of about this size, so that a large request neither keeps all workers from
# the others nor holds the tokenizer's records of all its texts, and is given up soon where its caller leaves.
PORTION_CHARS = 1 << 16

Visitor = Callable[[EncodedInput], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeOptions:
    """What is done with the inputs of a request.

    Attributes:
        truncate: cut what is too long; else it is refused.
        prefix: stands before the names of the inputs' fields in errors.
        prompt: goes before each text; the offsets are then those in the whole.
    """

    truncate: bool
    prefix: str = ""
    prompt: str = ""


class InputEncoder:
    """Tokenizes in worker threads; refuses or cuts what is too long."""

    def __init__(
        self, text_encoder: TextEncoder | None, max_tokens: int, workers: Workers, *, exclude_prompt: bool
    ) -> None:
        self._text_encoder = text_encoder
        self._max_tokens = max_tokens
        self._exclude_prompt = exclude_prompt
        self._workers = workers

    async def encode(
        self, inputs: Sequence[Input], options: EncodeOptions, visit: Visitor | None = None
    ) -> AsyncGenerator[list[EncodedInput]]:
        """Yield checked inputs as token ids, a portion at a time, without the tokenizer's records.

        Args:
            inputs: texts and token ids.
            options: what is done with them.
            visit: is called in a worker thread with each input, in order, its record kept.

        Raises:
            InputTooLongError: an input has too many tokens, and `truncate` is false.
            InvalidFieldsError: a text has no tokens, or none that count.
        """
        num_excluded = await self._num_excluded(inputs, options.prompt)
        for portion in portions([_num_chars(each) for each in inputs]):
            yield await self._workers.run(self._encode_portion, inputs, portion, options, num_excluded, visit)

    async def _num_excluded(self, inputs: Sequence[Input], prompt: str) -> int:
        """Return how many tokens at the beginning of a text with `prompt` are left out of the pooling."""
        has_text = any(each.HasField("text") for each in inputs)
        if not (prompt and has_text and self._exclude_prompt) or self._text_encoder is None:
            return 0
        return await self._workers.run(self._text_encoder.num_prompt_tokens, prompt)

    def _encode_portion(
        self,
        inputs: Sequence[Input],
        portion: range,
        options: EncodeOptions,
        num_excluded: int,
        visit: Visitor | None,
    ) -> list[EncodedInput]:
        texts = [options.prompt + inputs[index].text for index in portion if inputs[index].HasField("text")]
        from_text: Iterator[EncodedInput] = iter(())
        if texts and self._text_encoder is not None:  # without a tokenizer the checker has refused texts
            encoded_texts = self._text_encoder.encode(texts, with_offsets=visit is not None)
            from_text = (replace(each, num_excluded=num_excluded) for each in encoded_texts)
        result = []
        for index in portion:
            is_text = inputs[index].HasField("text")
            encoded = next(from_text) if is_text else self._encode_ids(inputs[index].token_ids.ids)
            self._check(encoded, f"{options.prefix}inputs[{index}]", options, is_text=is_text)
            if visit is not None:
                visit(encoded)
                encoded = encoded.without_record()
            result.append(encoded)
        return result

    def _check(self, encoded: EncodedInput, field: str, options: EncodeOptions, *, is_text: bool) -> None:
        if encoded.num_tokens_total > self._max_tokens and not options.truncate:
            raise InputTooLongError(
                field,
                encoded.num_tokens_total,
                self._max_tokens,
                has_prompt=bool(options.prompt) and is_text,
            )
        if encoded.num_tokens <= encoded.num_excluded:
            beside = " beside the prompt, which does not count" if encoded.num_excluded else ""
            is_full = encoded.num_tokens_total > self._max_tokens
            remedy = f"shorten the prompt to fit {self._max_tokens}" if is_full else "send some text"
            raise InvalidFieldsError([FieldViolation(f"{field}.text", f"has no tokens{beside}: {remedy}")])

    def _encode_ids(self, ids: Sequence[int]) -> EncodedInput:
        return EncodedInput(np.asarray(ids[: self._max_tokens], dtype=np.int64), len(ids))


def _num_chars(each: Input) -> int:
    """Return the size of an input: characters, or token ids."""
    return len(each.text) if each.HasField("text") else len(each.token_ids.ids)


def portions(sizes: Sequence[int]) -> Iterator[range]:
    """Cut inputs of these sizes into runs of about PORTION_CHARS; a longer input is one by itself."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > PORTION_CHARS:
            yield range(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))
