"""An input as tokens, and what is told of them. T tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from attnlens_server.text.places import Place, token_places

Integers = npt.NDArray[np.int32]


class TokenSource(IntEnum):
    """Where a token comes from. The numbers are those of `attnlens.v1.TokenSource`."""

    SPECIAL = 1
    PROMPT = 2
    TEXT = 3
    SECOND_TEXT = 4
    IDS = 5


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of an input, a column each.

    Attributes:
        ids: (T,) int64.
        texts: the tokenizer's own spelling of each.
        sources: (T,) int32, numbers of `TokenSource`.
        chars: (T, 2) int32, first character and one past the last, in the source; zeros where there is none.
        bytes: (T, 2) int32, the same in bytes of UTF-8.
        words: (T,) int32, the number of the word in its text; -1: it belongs to none.
    """

    ids: npt.NDArray[np.int64]
    texts: Sequence[str]
    sources: Integers
    chars: Integers
    bytes: Integers
    words: Integers


@dataclass(frozen=True, slots=True)
class Record:
    """What a tokenizer has made of a text or pair.

    Attributes:
        encoding: the tokenizer's own record, with offsets.
        prompt: what was put before the first text.
        texts: the text, or both of a pair.
        are_cut: for each text, whether tokens were cut off at its end.
    """

    encoding: tokenizers.Encoding
    prompt: str
    texts: tuple[str, ...]
    are_cut: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class EncodedInput:
    """An input as token ids.

    Attributes:
        input_ids: (T,) int64, special tokens included.
        num_tokens_total: T before truncation.
        token_type_ids: (T,) int64; None: zeros.
        num_excluded: how many tokens at the beginning are left out of the pooling.
        record: what the tokenizer has made of it; None where the request gave ids, or where it was not kept.
    """

    input_ids: npt.NDArray[np.int64]
    num_tokens_total: int
    token_type_ids: npt.NDArray[np.int64] | None = None
    num_excluded: int = 0
    record: Record | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    def without_record(self) -> "EncodedInput":
        """Return the same without the tokenizer's record, which is far larger than the ids."""
        return replace(self, record=None)


def describe_ids(input_ids: npt.NDArray[np.int64], spell: Callable[[int], str]) -> Tokens:
    """Describe tokens that a request has given by their ids: they stand nowhere."""
    count = len(input_ids)
    return Tokens(
        input_ids,
        [spell(token_id) for token_id in input_ids.tolist()],
        np.full(count, TokenSource.IDS, np.int32),
        np.zeros((count, 2), np.int32),
        np.zeros((count, 2), np.int32),
        np.full(count, -1, np.int32),
    )


def describe(record: Record) -> Tokens:
    """Describe the tokens of a text or pair, each with its place in its own source."""
    encoding = record.encoding
    # Each access to a list of the encoding builds the whole list.
    is_special = np.array(encoding.special_tokens_mask, bool)
    sources = np.where(is_special, np.int32(TokenSource.SPECIAL), np.int32(TokenSource.TEXT))
    chars, bytes_ = (np.zeros((len(sources), 2), np.int32) for _ in range(2))
    if len(record.texts) > 1:
        sources[np.array([number == 1 for number in encoding.sequence_ids]) & ~is_special] = (
            TokenSource.SECOND_TEXT
        )
        rows = np.flatnonzero(sources == TokenSource.SECOND_TEXT)
        second = record.texts[1]
        chars[rows] = _places(second, encoding, rows, is_cut=record.are_cut[1])
        bytes_[rows] = utf8_offsets(second)[chars[rows]]
    rows = np.flatnonzero(sources == TokenSource.TEXT)
    whole, start = record.prompt + record.texts[0], len(record.prompt)
    places = _places(whole, encoding, rows, is_cut=record.are_cut[0])
    offsets = utf8_offsets(whole)
    in_prompt = (places[:, 0] < start) & (places[:, 1] <= start)
    sources[rows[in_prompt]] = TokenSource.PROMPT
    first = np.where(in_prompt, 0, start)[:, np.newaxis]  # where the source of each token begins
    # A token that begins in the prompt and ends in the text stands at the beginning of the text.
    chars[rows] = np.maximum(places - first, 0)
    bytes_[rows] = np.maximum(offsets[places] - offsets[first], 0)
    words = [-1 if number is None else number for number in encoding.word_ids]
    return Tokens(
        np.array(encoding.ids, np.int64), encoding.tokens, sources, chars, bytes_, np.array(words, np.int32)
    )


def _places(text: str, encoding: tokenizers.Encoding, rows: npt.NDArray[Any], *, is_cut: bool) -> Integers:
    """Return the places (rows, 2) of the tokens in these rows of an encoding."""
    offsets, tokens = encoding.offsets, encoding.tokens
    reported: list[Place] = [offsets[row] for row in rows]
    places = token_places(text, [tokens[row] for row in rows], reported, is_cut=is_cut)
    return np.array(places, np.int32).reshape(-1, 2)


def utf8_offsets(text: str) -> Integers:
    """Return, for each character offset from 0 to len(text), the byte offset in the UTF-8 text."""
    if text.isascii():
        return np.arange(len(text) + 1, dtype=np.int32)
    code_points: npt.NDArray[Any] = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + sum(code_points >= first for first in (0x80, 0x800, 0x10000))  # RFC 3629, section 3
    return np.concatenate(([0], np.cumsum(widths))).astype(np.int32)
