"""Where in a text its tokens stand, the same way for every kind of tokenizer.

A place is a pair (start, end) of character offsets, 0 <= start <= end <= len(text), in the order of the
tokens. Four things are put right that tokenizers report differently or wrongly:

- White space around a word belongs to no token ("Ġthe" and "▁the" stand for "the"); a token of white space
  alone stands for that white space.
- A boundary mark that the tokenizer put before the text ("▁" before the first word) stands for nothing: its
  place is empty. The library reports the character behind it.
- A combining mark that the tokenizer dropped or composed with its letter belongs to that letter's token.
- A token that holds a part of a character's bytes stands for the whole character (the library's own way).
"""

import unicodedata
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import processors

_BOUNDARY_MARKS = "\u2581\u0120"  # SentencePiece's space, and a space in the alphabet of byte-level BPE

Place = tuple[int, int]


def keep_white_space(tokenizer: tokenizers.Tokenizer) -> None:
    """Let the tokenizer report white space with its token: what it trims itself may end before it starts."""
    processor: Any = tokenizer.post_processor
    is_sequence = isinstance(processor, processors.Sequence)
    for each in processor if is_sequence else [processor]:
        if isinstance(each, processors.ByteLevel | processors.RobertaProcessing):
            each.trim_offsets = False


def token_places(text: str, encoding: tokenizers.Encoding, *, is_cut: bool) -> list[Place]:
    """Return the place of each token of an encoding; (0, 0) for those that the text does not hold.

    Args:
        text: what was tokenized.
        encoding: by a tokenizer that went through `keep_white_space`.
        is_cut: whether tokens were cut off at the end.
    """
    # Each access to a list of the encoding builds the whole list.
    is_special, offsets, tokens = encoding.special_tokens_mask, encoding.offsets, encoding.tokens
    rows = [row for row, special in enumerate(is_special) if not special]
    reported = [offsets[row] for row in rows]
    # What follows the last token of a cut text is unknown: it may begin at once.
    last = max((end for _, end in reported), default=0) - 1 if is_cut else len(text)
    following = [*(start for start, _ in reported[1:]), last]
    places = [
        _place(text, tokens[row], place, next_start)
        for row, place, next_start in zip(rows, reported, following, strict=False)
    ]
    if not text.isascii():
        places = _with_marks(text, places, limit=last + 1 if is_cut else len(text))
    result = [(0, 0)] * len(is_special)
    for row, place in zip(rows, places, strict=True):
        result[row] = place
    return result


def _place(text: str, token: str, reported: Place, next_start: int) -> Place:
    start, end = reported
    held = text[start:end]
    if not held or held.isspace():
        return reported
    if end > next_start and not token.strip(_BOUNDARY_MARKS):
        return start, start
    return end - len(held.lstrip()), start + len(held.rstrip())


def _with_marks(text: str, places: Sequence[Place], limit: int) -> list[Place]:
    """Extend places over the combining marks (Unicode category M) behind them that start no other token."""
    taken = {start for start, end in places if end > start}
    result = []
    for start, end in places:
        stop = end
        while start < stop < limit and stop not in taken and unicodedata.category(text[stop])[0] == "M":
            stop += 1
        result.append((start, stop))
    return result
