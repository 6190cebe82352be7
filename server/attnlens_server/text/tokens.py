"""An input as tokens, and what is told of them. T tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from attnlens.reductions import AttentionReduction, TextUnits, Units
from attnlens_server.text.places import Place, token_places

NOWHERE: Place = (0, 0)


class TokenSource(IntEnum):
    """Where a token comes from. The numbers are those of `attnlens.v1.TokenSource`."""

    SPECIAL = 1
    PROMPT = 2
    TEXT = 3
    SECOND_TEXT = 4
    IDS = 5


@dataclass(frozen=True, slots=True)
class Tokens:
    """The T tokens of an input, a column each.

    Attributes:
        ids: in the vocabulary.
        texts: the tokenizer's own spelling of each.
        sources: where each comes from.
        chars: first character of each and one past the last, in its source; zeros where there is none.
        bytes: the same in bytes of UTF-8.
        words: the number of the word in its text; None: it belongs to none.
    """

    ids: Sequence[int]
    texts: Sequence[str]
    sources: Sequence[TokenSource]
    chars: Sequence[Place]
    bytes: Sequence[Place]
    words: Sequence[int | None]


@dataclass(frozen=True, slots=True)
class Record:
    """What a tokenizer has made of a text or pair.

    Attributes:
        encoding: the tokenizer's own record, with offsets.
        prompt: what was put before the first text.
        texts: the text, or both of a pair.
        lack_their_ends: For each text, whether tokens at its end were cut off.
    """

    encoding: tokenizers.Encoding
    prompt: str
    texts: tuple[str, ...]
    lack_their_ends: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class EncodedInput:
    """An input as token ids.

    Attributes:
        input_ids: (T,) int64, special tokens included.
        num_tokens_total: T before truncation.
        token_type_ids: (T,) int64; None: zeros.
        num_excluded: how many tokens at the beginning are left out of the pooling.
        record: what the tokenizer has made of it; None where the request gave ids, or where it was not kept.
        units: its words and special tokens; None where the request gave ids, or where nobody asked.
    """

    input_ids: npt.NDArray[np.int64]
    num_tokens_total: int
    token_type_ids: npt.NDArray[np.int64] | None = None
    num_excluded: int = 0
    record: Record | None = None
    units: TextUnits | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    def num_units(self, reduction: AttentionReduction | None) -> int:
        """U: how many rows a reduction leaves of its T."""
        if reduction is None or not reduction.has_units:
            return self.num_tokens
        return Units.of(reduction, self.units, self.num_tokens).num_units

    def without_record(self) -> "EncodedInput":
        """Return the same without the tokenizer's record, which is far larger than the ids."""
        return replace(self, record=None)


def describe_ids(input_ids: npt.NDArray[np.int64], spell: Callable[[int], str]) -> Tokens:
    """Describe tokens that a request has given by their ids: they stand nowhere."""
    ids = input_ids.tolist()
    nowhere = [NOWHERE] * len(ids)
    texts = [spell(token_id) for token_id in ids]
    return Tokens(ids, texts, [TokenSource.IDS] * len(ids), nowhere, nowhere, [None] * len(ids))


def text_units(record: Record) -> TextUnits:
    """Return the words and special tokens of a text or pair."""
    encoding = record.encoding
    is_special = [bool(special) for special in encoding.special_tokens_mask]
    is_second = [number == 1 for number in encoding.sequence_ids]
    return TextUnits.of(encoding.word_ids, is_special, is_second)


def describe(record: Record) -> Tokens:
    """Describe the tokens of a text or pair, each with its place in its own source."""
    # Each access to a list of the encoding builds the whole list.
    encoding, spellings, reported = record.encoding, record.encoding.tokens, record.encoding.offsets
    special, first, second = TokenSource.SPECIAL, TokenSource.TEXT, TokenSource.SECOND_TEXT
    sources = [special if is_special else first for is_special in encoding.special_tokens_mask]
    if len(record.texts) > 1:
        for row, number in enumerate(encoding.sequence_ids):
            if number == 1 and sources[row] is first:
                sources[row] = second
    chars, bytes_ = ([NOWHERE] * len(sources) for _ in range(2))
    wholes = (record.prompt + record.texts[0], *record.texts[1:])
    for text, source, is_cut in zip(wholes, (first, second), record.lack_their_ends, strict=False):
        rows = [row for row, of_row in enumerate(sources) if of_row is source]
        places = token_places(
            text, [spellings[row] for row in rows], [reported[row] for row in rows], is_cut=is_cut
        )
        for row, place, in_bytes in zip(rows, places, _in_bytes(text, places), strict=True):
            chars[row], bytes_[row] = place, in_bytes
    if record.prompt:
        _take_out_prompt(record.prompt, sources, chars, bytes_)
    return Tokens(encoding.ids, spellings, sources, chars, bytes_, encoding.word_ids)


def _in_bytes(text: str, places: list[Place]) -> list[Place]:
    if text.isascii():
        return places
    offsets = utf8_offsets(text)
    return [(offsets[start], offsets[end]) for start, end in places]


def _take_out_prompt(
    prompt: str, sources: list[TokenSource], chars: list[Place], bytes_: list[Place]
) -> None:
    """Mark the tokens of a prompt, and let the places of the text behind it begin with the text.

    A token that begins in the prompt and ends in the text is the text's, and stands at its beginning.
    """
    num_chars, num_bytes = len(prompt), len(prompt.encode())
    for row, source in enumerate(sources):
        if source is TokenSource.TEXT:
            start, end = chars[row]
            if start < num_chars and end <= num_chars:
                sources[row] = TokenSource.PROMPT
            else:
                chars[row] = max(start - num_chars, 0), end - num_chars
                start, end = bytes_[row]
                bytes_[row] = max(start - num_bytes, 0), end - num_bytes


def utf8_offsets(text: str) -> Sequence[int]:
    """Return, for each character offset from 0 to len(text), the byte offset in the UTF-8 text."""
    if text.isascii():
        return range(len(text) + 1)
    code_points: npt.NDArray[Any] = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + sum(code_points >= first for first in (0x80, 0x800, 0x10000))  # RFC 3629, section 3
    offsets: list[int] = np.concatenate(([0], np.cumsum(widths))).tolist()
    return offsets
