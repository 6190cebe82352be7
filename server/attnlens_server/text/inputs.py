"""From the inputs of a request to token ids, within the model's limit."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnlens_server.errors import FieldViolation, InputTooLongError, InvalidFieldsError
from attnlens_server.text.tokenizer import TextEncoder, UntokenizableError
from attnlens_server.text.tokens import EncodedInput, Tokens, describe_ids, text_units

# Inputs are encoded in portions of about this size, so that a large request neither keeps all workers from
# the others nor holds the tokenizer's records of all its texts, and is given up soon where its caller leaves.
PORTION_CHARS = 1 << 16


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that the model reads as one input."""

    first: str
    second: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A tokenized input.

    Attributes:
        input_ids: used as they are.
        token_type_ids: the type of each token; empty: 0 for all.
    """

    input_ids: Sequence[int]
    token_type_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Input:
    """What to encode; exactly one is set. The fields are those of `attnlens.v1.Input`."""

    text: str | None = None
    text_pair: TextPair | None = None
    token_ids: TokenIds | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The text, or both of a pair; none where it is given as ids."""
        if self.text_pair is not None:
            return (self.text_pair.first, self.text_pair.second)
        return () if self.text is None else (self.text,)

    @property
    def size(self) -> int:
        """Characters and token ids."""
        num_ids = len(self.token_ids.input_ids) if self.token_ids else 0
        return num_ids + sum(len(text) for text in self.texts)

    @property
    def memory_bytes(self) -> int:
        """Memory of its texts or token ids."""
        numbers = (self.token_ids.input_ids, self.token_ids.token_type_ids) if self.token_ids else ()
        return sum(map(sys.getsizeof, (*self.texts, *numbers)))


class InputEncoder:
    """Turns checked inputs into token ids; refuses or cuts what is too long. Slow: for worker threads."""

    def __init__(self, text_encoder: TextEncoder | None, max_tokens: int, *, exclude_prompt: bool) -> None:
        self._text_encoder = text_encoder
        self._max_tokens = max_tokens
        self._exclude_prompt = exclude_prompt

    def encode(
        self,
        inputs: Sequence[Input],
        numbers: range,
        *,
        prompt: str,
        truncate: bool,
        with_records: bool = False,
        with_units: bool = False,
    ) -> list[EncodedInput]:
        """Encode the inputs with these numbers, those that are texts with records or units where asked for.

        Raises:
            InputTooLongError: an input has too many tokens, and `truncate` is false.
            InvalidFieldsError: a text has no tokens, or none that count.
        """
        texts = [(number, inputs[number].texts) for number in numbers if inputs[number].texts]
        from_text: Iterator[EncodedInput] = iter(())
        if texts and self._text_encoder is not None:  # without a tokenizer the checks have refused texts
            num_excluded = self._num_prompt_tokens(prompt) if prompt and self._exclude_prompt else 0
            encoded_texts = self._encode(texts, prompt, with_record=with_records or with_units)
            if with_units:
                encoded_texts = [_with_units(encoded, keeps_record=with_records) for encoded in encoded_texts]
            if num_excluded:
                encoded_texts = [replace(encoded, num_excluded=num_excluded) for encoded in encoded_texts]
            from_text = iter(encoded_texts)
        result = []
        for number in numbers:
            ids = inputs[number].token_ids
            encoded = next(from_text) if ids is None else self._from_ids(ids)
            self._check(encoded, inputs[number], number, truncate=truncate, has_prompt=bool(prompt))
            result.append(encoded)
        return result

    def encode_whole(self, inputs: Sequence[Input], numbers: range, prompt: str) -> list[EncodedInput]:
        """Encode the inputs with these numbers whatever their length, with records."""
        result = []
        for number in numbers:
            ids = inputs[number].token_ids
            if ids is not None:
                result.append(EncodedInput(np.asarray(ids.input_ids, dtype=np.int64), len(ids.input_ids)))
            elif self._text_encoder is not None:
                texts = [(number, inputs[number].texts)]
                result += self._encode(texts, prompt, with_record=True, truncate=False)
        return result

    def _encode(
        self,
        texts: Sequence[tuple[int, tuple[str, ...]]],
        prompt: str,
        *,
        with_record: bool,
        truncate: bool = True,
    ) -> list[EncodedInput]:
        """Tokenize texts, each with the index of its input.

        Raises:
            InvalidFieldsError: A text cannot be tokenized.
        """
        assert self._text_encoder is not None  # noqa: S101 - without it the checks have rejected texts
        try:
            return self._text_encoder.encode(
                [text for _, text in texts], prompt=prompt, with_record=with_record, truncate=truncate
            )
        except UntokenizableError as error:
            if len(texts) > 1 and not error.is_growth:  # find the text that fails
                return [
                    encoded
                    for text in texts
                    for encoded in self._encode([text], prompt, with_record=with_record, truncate=truncate)
                ]
            number, text = texts[0]
            field = f"inputs[{number}].{'text' if len(text) == 1 else 'text_pair'}"
            raise InvalidFieldsError([FieldViolation(field, str(error), number)]) from None

    def _num_prompt_tokens(self, prompt: str) -> int:
        assert self._text_encoder is not None  # noqa: S101 - as above
        try:
            return self._text_encoder.num_prompt_tokens(prompt)
        except UntokenizableError as error:
            raise InvalidFieldsError([FieldViolation("prompt", str(error))]) from None

    def describe(self, encoded: EncodedInput) -> Tokens:
        """Describe the tokens of an input that has its record, or was given as ids."""
        if self._text_encoder is None:
            return describe_ids(encoded.input_ids, lambda _: "")
        return self._text_encoder.describe(encoded)

    def _check(
        self, encoded: EncodedInput, given: Input, number: int, *, truncate: bool, has_prompt: bool
    ) -> None:
        field, is_text = f"inputs[{number}]", given.token_ids is None
        if encoded.num_tokens_total > self._max_tokens and not truncate:
            raise InputTooLongError(
                field,
                encoded.num_tokens_total,
                self._max_tokens,
                has_prompt=has_prompt and is_text,
                input_index=number,
            )
        if encoded.num_tokens <= encoded.num_excluded:
            beside = " beside the prompt, which does not count" if encoded.num_excluded else ""
            is_full = encoded.num_tokens_total > self._max_tokens
            remedy = f"shorten the prompt to fit {self._max_tokens}" if is_full else "send some text"
            name = "text_pair" if given.text_pair else "text"
            description = f"has no tokens{beside}: {remedy}"
            raise InvalidFieldsError([FieldViolation(f"{field}.{name}", description, number)])

    def _from_ids(self, ids: TokenIds) -> EncodedInput:
        is_left = self._text_encoder is not None and self._text_encoder.truncation_side == "left"
        part = slice(-self._max_tokens, None) if is_left else slice(self._max_tokens)
        kept, types = ids.input_ids[part], ids.token_type_ids[part]
        return EncodedInput(
            np.asarray(kept, dtype=np.int64),
            len(ids.input_ids),
            token_type_ids=np.asarray(types, dtype=np.int64) if types else None,
        )


def _with_units(encoded: EncodedInput, *, keeps_record: bool) -> EncodedInput:
    """Return an input that has its record with its units, and with or without the record."""
    units = text_units(encoded.record) if encoded.record else None
    return replace(encoded, units=units, record=encoded.record if keeps_record else None)


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
