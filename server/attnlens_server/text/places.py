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
    for step in processor if is_sequence else [processor]:
        if isinstance(step, processors.ByteLevel | processors.RobertaProcessing):
            step.trim_offsets = False


def token_places(text: str, tokens: Sequence[str], reported: Sequence[Place], *, is_cut: bool) -> list[Place]:
    """Return the places of the tokens of a text, special tokens left out.

    Args:
        text: what was tokenized.
        tokens: the tokenizer's spelling of each.
        reported: where a tokenizer that went through `keep_white_space` says that they stand.
        is_cut: whether tokens were cut off at the end.
    """
    # What follows the last token of a cut text is unknown: it may begin at once.
    last = max((end for _, end in reported), default=0) - 1 if is_cut else len(text)
    following = [*(start for start, _ in reported[1:]), last]
    places = [
        _place(text, token, place, next_start)
        for token, place, next_start in zip(tokens, reported, following, strict=False)
    ]
    return places if text.isascii() else _with_marks(text, places, limit=last + 1 if is_cut else len(text))


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
