"""Tokens of an input: ids, spelling, source and offsets. Shapes: T tokens.

The span of a token is a pair (start, end) of character offsets, 0 <= start <= end <= len(text). Tokenizers
report offsets inconsistently, so they are normalized:

- A span does not include white space around a word: "Ġthe" and "▁the" have the span of "the". A token that
  consists of white space has the span of that white space.
- A boundary mark that the tokenizer inserted before the text, such as "▁" before the first word, has an empty
  span. The library reports the character after it.
- A combining mark that the tokenizer dropped or composed with its letter is part of the letter's span.
- A token for some of the bytes of a character has the span of the whole character, as in the library.
"""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import processors

from attnlens.chat_template import Frame
from attnlens.reductions import AttentionReduction, TextUnits

Span = tuple[int, int]
NO_SPAN: Span = (0, 0)
_BOUNDARY_MARKS = "\u2581\u0120"  # SentencePiece's space, and a space in the alphabet of byte-level BPE


class TokenSource(IntEnum):
    """Source of a token. The values are those of `attnlens.v1.TokenSource`."""

    SPECIAL = 1
    PROMPT = 2
    TEXT = 3
    SECOND_TEXT = 4
    IDS = 5


@dataclass(frozen=True, slots=True)
class Tokens:
    """The T tokens of an input, one sequence per property.

    Attributes:
        ids: Vocabulary ids.
        texts: Tokens as the tokenizer spells them.
        sources: Sources of the tokens.
        chars: Character spans in the source. (0, 0) for tokens without a span.
        bytes: UTF-8 byte spans in the source.
        words: Index of the word in its text. None for tokens that are not part of a word.
    """

    ids: Sequence[int]
    texts: Sequence[str]
    sources: Sequence[TokenSource]
    chars: Sequence[Span]
    bytes: Sequence[Span]
    words: Sequence[int | None]

    def select(self, rows: Sequence[int]) -> "Tokens":
        """Return the tokens with the given indices."""
        return Tokens(
            [self.ids[row] for row in rows],
            [self.texts[row] for row in rows],
            [self.sources[row] for row in rows],
            [self.chars[row] for row in rows],
            [self.bytes[row] for row in rows],
            [self.words[row] for row in rows],
        )


@dataclass(frozen=True, slots=True)
class Record:
    """Tokenizer output for a text or pair, from which tokens are described.

    Attributes:
        encoding: The library's encoding, with offsets.
        frame: Strings around the first text: its prompt, and those of a chat template.
        texts: The text, or both texts of a pair.
        lack_their_ends: For each text, whether its last tokens were truncated.
        num_replaced: Number of last tokens that are the end of a chat template, without offsets.
    """

    encoding: tokenizers.Encoding
    frame: Frame
    texts: tuple[str, ...]
    lack_their_ends: tuple[bool, ...]
    num_replaced: int = 0


@dataclass(frozen=True, slots=True)
class EncodedInput:
    """A tokenized input.

    Attributes:
        input_ids: (T,) int64, including special tokens.
        num_tokens_total: Number of tokens before truncation.
        token_type_ids: (T,) int64. None means zeros.
        num_excluded: Number of leading tokens to exclude from pooling.
        record: Tokenizer output. None if the request contained token ids or the output is not needed.
        units: Words and special tokens. None if the request contained token ids or units are not needed.
    """

    input_ids: npt.NDArray[np.int64]
    num_tokens_total: int
    token_type_ids: npt.NDArray[np.int64] | None = None
    num_excluded: int = 0
    record: Record | None = None
    units: TextUnits | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.input_ids)

    @property
    def shape(self) -> "TextShape":
        """The numbers on which the sizes of all results depend."""
        units = self.units
        if units is None:
            return TextShape(self.num_tokens, self.num_tokens, 0)
        num_words = int(units.words.max(initial=-1)) + 1
        return TextShape(self.num_tokens, num_words, int(np.count_nonzero(units.is_special)))

    def without_record(self) -> "EncodedInput":
        """Return a copy without the tokenizer output, which is far larger than the ids."""
        return replace(self, record=None)


class TextShape(NamedTuple):
    """Numbers of tokens of a text. Texts with equal numbers have results of equal size.

    Attributes:
        num_tokens: Number of tokens, T.
        num_words: Number of words. Each special token is a word of its own.
        num_special: Number of special tokens.
    """

    num_tokens: int
    num_words: int
    num_special: int

    def num_units(self, reduction: AttentionReduction | None) -> int:
        """Return the number of rows of the reduced attention matrix."""
        if reduction is None:
            return self.num_tokens
        count = self.num_words if reduction.level == "words" else self.num_tokens
        return count - self.num_special * (reduction.special_tokens == "drop")


def describe_ids(input_ids: npt.NDArray[np.int64], spell: Callable[[int], str]) -> Tokens:
    """Describe tokens that a request specifies by id. They have no span."""
    ids = input_ids.tolist()
    no_spans = [NO_SPAN] * len(ids)
    texts = [spell(token_id) for token_id in ids]
    return Tokens(ids, texts, [TokenSource.IDS] * len(ids), no_spans, no_spans, [None] * len(ids))


def text_units(record: Record) -> TextUnits:
    """Return the words and special tokens of a text or pair."""
    encoding = record.encoding
    is_special = [bool(special) for special in encoding.special_tokens_mask]
    if record.frame.is_template:
        is_special = [source is TokenSource.SPECIAL for source in describe(record).sources]
    is_second = [number == 1 for number in encoding.sequence_ids]
    return TextUnits.of(encoding.word_ids, is_special, is_second)


def describe(record: Record) -> Tokens:
    """Describe the tokens of a text or pair. Spans refer to the token's own source."""
    # Each access to a property of the encoding builds a new list.
    encoding, spellings, reported = record.encoding, record.encoding.tokens, record.encoding.offsets
    special, first, second = TokenSource.SPECIAL, TokenSource.TEXT, TokenSource.SECOND_TEXT
    sources = [special if is_special else first for is_special in encoding.special_tokens_mask]
    if len(record.texts) > 1:
        for row, number in enumerate(encoding.sequence_ids):
            if number == 1 and sources[row] is first:
                sources[row] = second
    sources[len(sources) - record.num_replaced :] = [special] * record.num_replaced
    chars, bytes_ = ([NO_SPAN] * len(sources) for _ in range(2))
    frame = record.frame
    wholes = (frame.around(record.texts[0]), *record.texts[1:])
    for text, source, is_cut in zip(wholes, (first, second), record.lack_their_ends, strict=False):
        rows = [row for row, of_row in enumerate(sources) if of_row is source]
        spans = token_spans(
            text, [spellings[row] for row in rows], [reported[row] for row in rows], is_cut=is_cut
        )
        for row, span, in_bytes in zip(rows, spans, _in_bytes(text, spans), strict=True):
            chars[row], bytes_[row] = span, in_bytes
    if frame.before or frame.after_text:
        _separate(frame, record.texts[0], sources, chars, bytes_)
    words = encoding.word_ids
    if frame.is_template:
        words = [None if source is special else word for source, word in zip(sources, words, strict=True)]
    return Tokens(encoding.ids, spellings, sources, chars, bytes_, words)


def _in_bytes(text: str, spans: list[Span]) -> list[Span]:
    if text.isascii():
        return spans
    offsets = utf8_offsets(text)
    return [(offsets[start], offsets[end]) for start, end in spans]


def _separate(
    frame: Frame, text: str, sources: list[TokenSource], chars: list[Span], bytes_: list[Span]
) -> None:
    """Assign tokens to the prompt and the chat template, and make spans relative to the token's own source.

    A token that begins in the prompt or the template and ends in the text belongs to the text, and its span
    begins at 0. Tokens of the template have no span.
    """
    parts = (frame.before_prompt, frame.prompt, frame.before_text, text)
    ends = zip(accumulate(map(len, parts)), accumulate(len(part.encode()) for part in parts), strict=True)
    prompt_start, prompt_end, text_start, text_end = ends  # each in characters and bytes
    for row, source in enumerate(sources):
        if source is not TokenSource.TEXT:
            continue
        start, end = chars[row]
        is_before_end = not frame.after_text or (text and start < text_end[0])
        if is_before_end and (start >= text_start[0] or end > text_start[0]):
            first, last = text_start, text_end
        elif frame.prompt and start < prompt_end[0] and (start >= prompt_start[0] or end > prompt_start[0]):
            sources[row] = TokenSource.PROMPT
            first, last = prompt_start, prompt_end
        else:
            sources[row] = TokenSource.SPECIAL
            chars[row] = bytes_[row] = NO_SPAN
            continue
        chars[row], bytes_[row] = (
            (max(span[0] - first[unit], 0), min(span[1], last[unit]) - first[unit])
            for unit, span in enumerate((chars[row], bytes_[row]))
        )


def utf8_offsets(text: str) -> Sequence[int]:
    """Return, for each character offset from 0 to len(text), the byte offset in the UTF-8 text."""
    if text.isascii():
        return range(len(text) + 1)
    code_points: npt.NDArray[Any] = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + sum(code_points >= first for first in (0x80, 0x800, 0x10000))  # RFC 3629, section 3
    offsets: list[int] = np.concatenate(([0], np.cumsum(widths))).tolist()
    return offsets


def keep_white_space(tokenizer: tokenizers.Tokenizer) -> None:
    """Disable trimming of white space by the tokenizer, which can return spans that end before they start."""
    processor: Any = tokenizer.post_processor
    is_sequence = isinstance(processor, processors.Sequence)
    for step in processor if is_sequence else [processor]:
        if isinstance(step, processors.ByteLevel | processors.RobertaProcessing):
            step.trim_offsets = False


def token_spans(text: str, tokens: Sequence[str], reported: Sequence[Span], *, is_cut: bool) -> list[Span]:
    """Return the spans of the tokens of a text, excluding special tokens.

    Args:
        text: Tokenized text.
        tokens: Tokens as the tokenizer spells them.
        reported: Spans from a tokenizer that `keep_white_space` was applied to.
        is_cut: Whether tokens at the end were truncated.
    """
    # The span after the last token of a truncated text is unknown and may follow immediately.
    last = max((end for _, end in reported), default=0) - 1 if is_cut else len(text)
    following = [*(start for start, _ in reported[1:]), last]
    spans = [
        _span(text, token, span, next_start)
        for token, span, next_start in zip(tokens, reported, following, strict=False)
    ]
    return spans if text.isascii() else _with_marks(text, spans, limit=last + 1 if is_cut else len(text))


def _span(text: str, token: str, reported: Span, next_start: int) -> Span:
    start, end = reported
    covered = text[start:end]
    if not covered or covered.isspace():
        return reported
    if end > next_start and not token.strip(_BOUNDARY_MARKS):
        return start, start
    return end - len(covered.lstrip()), start + len(covered.rstrip())


def _with_marks(text: str, spans: Sequence[Span], limit: int) -> list[Span]:
    """Extend spans over following combining marks (Unicode category M) that do not start another token."""
    taken = {start for start, end in spans if end > start}
    result = []
    for start, end in spans:
        stop = end
        while start < stop < limit and stop not in taken and unicodedata.category(text[stop])[0] == "M":
            stop += 1
        result.append((start, stop))
    return result
