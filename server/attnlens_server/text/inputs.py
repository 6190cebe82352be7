"""Converts the inputs of a request to token ids and enforces the length limit of the model."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnlens.chat_template import frame_of
from attnlens_server.errors import FieldViolation, InputTooLongError, InvalidFieldsError, NotSupportedError
from attnlens_server.text.tokenizer import TextEncoder, UntokenizableError
from attnlens_server.text.tokens import EncodedInput, Tokens, describe_ids, text_units

# Inputs are encoded in portions of about this size, so that a large request does not block all workers, does
# not keep the tokenizer output of all its texts in memory, and can be cancelled between portions.
PORTION_CHARS = 1 << 14
_NUMBER_BYTES = 28  # memory of an int, in addition to its reference in a list


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that form one input."""

    first: str
    second: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A tokenized input.

    Attributes:
        input_ids: Token ids, which are not modified.
        token_type_ids: Token types. If empty, all are 0.
    """

    input_ids: Sequence[int]
    token_type_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Input:
    """Input with exactly one of three fields, like `attnlens.v1.Input`."""

    text: str | None = None
    text_pair: TextPair | None = None
    token_ids: TokenIds | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The text, both texts of a pair, or () for token ids."""
        if self.text_pair is not None:
            return (self.text_pair.first, self.text_pair.second)
        return () if self.text is None else (self.text,)

    @property
    def size(self) -> int:
        """Number of characters or token ids."""
        num_ids = len(self.token_ids.input_ids) if self.token_ids else 0
        return num_ids + sum(map(len, self.texts))

    @property
    def memory_bytes(self) -> int:
        """Memory of the texts or token ids."""
        text_bytes = sum(map(sys.getsizeof, self.texts))
        if self.token_ids is None:
            return text_bytes
        sequences = (self.token_ids.input_ids, self.token_ids.token_type_ids)
        num_objects = sum(len(sequence) for sequence in sequences if isinstance(sequence, list))
        return text_bytes + sum(map(sys.getsizeof, sequences)) + _NUMBER_BYTES * num_objects


class InputEncoder:
    """Converts validated inputs to token ids, and rejects or truncates long ones. Runs in worker threads."""

    def __init__(
        self,
        text_encoder: TextEncoder | None,
        max_tokens: int,
        *,
        exclude_prompt: bool,
        auto_truncate: bool = False,
    ) -> None:
        self._text_encoder = text_encoder
        self._auto_truncate = auto_truncate
        self._max_tokens = max_tokens
        self._exclude_prompt = exclude_prompt

    @property
    def truncation_side(self) -> str:
        """Side of a long text that truncation removes, "left" or "right"."""
        return self._text_encoder.truncation_side if self._text_encoder else "right"

    def surroundings(self, prompt: str) -> str:
        """Return all strings that are tokenized with each text: its prompt and the chat template."""
        return frame_of(self._text_encoder.template if self._text_encoder else None, prompt).around("")

    def encode(
        self,
        inputs: Sequence[Input],
        indices: range,
        *,
        prompt: str,
        truncate: bool | None,
        with_records: bool = False,
        with_units: bool = False,
    ) -> list[EncodedInput]:
        """Encode the inputs with the given indices.

        Args:
            inputs: All inputs of the request.
            indices: Indices of the inputs to encode.
            prompt: Prompt to prepend to texts.
            truncate: Whether to truncate inputs that are too long. If None, the default of the server.
            with_records: Whether to keep the tokenizer output of texts, which `describe` needs.
            with_units: Whether to group the tokens of texts into words.

        Raises:
            InputTooLongError: An input has too many tokens, and is not truncated.
            InvalidFieldsError: A text has no tokens, or only tokens that pooling excludes.
        """
        texts = [(index, inputs[index].texts) for index in indices if inputs[index].texts]
        from_text: Iterator[EncodedInput] = iter(())
        if texts and self._text_encoder is not None:  # validation rejects texts if there is no tokenizer
            num_excluded = self._num_prompt_tokens(prompt) if prompt and self._exclude_prompt else 0
            encoded_texts = self._encode(texts, prompt, with_record=with_records or with_units)
            if with_units:
                encoded_texts = [_with_units(encoded, keeps_record=with_records) for encoded in encoded_texts]
            if num_excluded:
                encoded_texts = [replace(encoded, num_excluded=num_excluded) for encoded in encoded_texts]
            from_text = iter(encoded_texts)
        result = []
        truncates = self._auto_truncate if truncate is None else truncate
        for index in indices:
            ids = inputs[index].token_ids
            encoded = next(from_text) if ids is None else self._from_ids(ids)
            self._check(encoded, inputs[index], index, truncate=truncates, has_prompt=bool(prompt))
            result.append(encoded)
        return result

    def encode_whole(self, inputs: Sequence[Input], indices: range, prompt: str) -> list[EncodedInput]:
        """Encode the inputs with the given indices without a length limit, with records."""
        result = []
        for index in indices:
            ids = inputs[index].token_ids
            if ids is not None:
                result.append(EncodedInput(np.asarray(ids.input_ids, dtype=np.int64), len(ids.input_ids)))
            elif self._text_encoder is not None:
                texts = [(index, inputs[index].texts)]
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
        assert self._text_encoder is not None  # noqa: S101 - without a tokenizer, validation has rejected texts
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
            index, text = texts[0]
            field = f"inputs[{index}].{'text' if len(text) == 1 else 'text_pair'}"
            raise InvalidFieldsError([FieldViolation(field, str(error), index)]) from None

    def _num_prompt_tokens(self, prompt: str) -> int:
        assert self._text_encoder is not None  # noqa: S101 - as above
        try:
            return self._text_encoder.num_prompt_tokens(prompt)
        except UntokenizableError as error:
            raise InvalidFieldsError([FieldViolation("prompt", str(error))]) from None

    def decode(self, inputs: Sequence[Input], indices: range, *, skip_special_tokens: bool) -> list[str]:
        """Return the texts of the inputs with the given indices, which consist of token ids.

        Raises:
            NotSupportedError: The model has no tokenizer.
        """
        if self._text_encoder is None:
            raise NotSupportedError("the model has no tokenizer: decode the token ids in the client")
        sequences = [ids.input_ids for index in indices if (ids := inputs[index].token_ids) is not None]
        return [self._text_encoder.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def describe(self, encoded: EncodedInput) -> Tokens:
        """Describe the tokens of an input, which must have a record unless it consists of token ids."""
        if self._text_encoder is None:
            return describe_ids(encoded.input_ids, lambda _: "")
        return self._text_encoder.describe(encoded)

    def _check(
        self, encoded: EncodedInput, original: Input, index: int, *, truncate: bool, has_prompt: bool
    ) -> None:
        field, is_text = f"inputs[{index}]", original.token_ids is None
        if encoded.num_tokens_total > self._max_tokens and not truncate:
            raise InputTooLongError(
                field,
                encoded.num_tokens_total,
                self._max_tokens,
                has_prompt=has_prompt and is_text,
                input_index=index,
            )
        if encoded.num_tokens <= encoded.num_excluded:
            excluded = " except those of the prompt, which pooling excludes" if encoded.num_excluded else ""
            is_full = encoded.num_tokens_total > self._max_tokens
            remedy = f"shorten the prompt to fit {self._max_tokens}" if is_full else "send some text"
            name = "text_pair" if original.text_pair else "text"
            description = f"has no tokens{excluded}: {remedy}"
            raise InvalidFieldsError([FieldViolation(f"{field}.{name}", description, index)])

    def _from_ids(self, ids: TokenIds) -> EncodedInput:
        is_left = self.truncation_side == "left"
        part = slice(-self._max_tokens, None) if is_left else slice(self._max_tokens)
        kept, types = ids.input_ids[part], ids.token_type_ids[part]
        return EncodedInput(
            np.asarray(kept, dtype=np.int64),
            len(ids.input_ids),
            token_type_ids=np.asarray(types, dtype=np.int64) if types else None,
        )


def _with_units(encoded: EncodedInput, *, keeps_record: bool) -> EncodedInput:
    """Add units to an input with a record. Drop the record if `keeps_record` is False."""
    units = text_units(encoded.record) if encoded.record else None
    return replace(encoded, units=units, record=encoded.record if keeps_record else None)


def portions(sizes: Sequence[int]) -> Iterator[range]:
    """Split inputs of the given sizes into ranges of about PORTION_CHARS. Longer inputs are separate."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > PORTION_CHARS:
            yield range(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))
