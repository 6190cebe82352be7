"""Maps tokens to the text spans and words that the page displays."""

from collections.abc import Hashable, Iterable
from typing import Protocol

from attnlens_viewer.page import ViewedToken


class SourceToken(Protocol):
    """A token with its character offsets in a text. `attnlens_client.Token` implements it."""

    @property
    def text(self) -> str:
        """Token string as spelled by the tokenizer."""

    @property
    def source(self) -> str:
        """Name of the text that contains the token."""

    @property
    def char_start(self) -> int:
        """Start offset in the source, in characters."""

    @property
    def char_end(self) -> int:
        """End offset (exclusive)."""

    @property
    def word_index(self) -> int | None:
        """Index of the token's word in the source. None if the token is not part of a word."""

    @property
    def is_special(self) -> bool:
        """Whether the tokenizer added the token."""


def viewed_tokens(tokens: Iterable[SourceToken], texts: dict[str, str]) -> list[ViewedToken]:
    """Convert tokens for display.

    Args:
        tokens: Tokens in order.
        texts: Source texts by name. Tokens of any other source are displayed as spelled by the tokenizer.
    """
    viewed: list[ViewedToken] = []
    previous: SourceToken | None = None
    last_word: Hashable = None
    word = -1
    for token in tokens:
        own_word = None if token.word_index is None else (token.source, token.word_index)
        if own_word is None or own_word != last_word:
            word += 1
        last_word = own_word
        viewed.append(
            ViewedToken(
                text=token.text,
                shown=_shown_text(token, previous, texts.get(token.source, "")),
                word=word,
                is_special=token.is_special,
                is_joined=_is_joined(token, previous, texts.get(token.source, "")),
            )
        )
        previous = token
    return viewed


def _shown_text(token: SourceToken, previous: SourceToken | None, text: str) -> str:
    """Return the span that a token covers, or the token string if the span is empty or a repetition.

    If a character is split into several tokens, each token covers the whole character.
    """
    span = text[token.char_start : token.char_end].strip()
    is_repeated = (
        previous is not None
        and not previous.is_special
        and previous.source == token.source
        and (previous.char_start, previous.char_end) == (token.char_start, token.char_end)
    )
    return span if span and not is_repeated and not token.is_special else token.text


def _is_joined(token: SourceToken, previous: SourceToken | None, text: str) -> bool:
    if previous is None or token.is_special or previous.is_special or previous.source != token.source:
        return False
    between = text[min(previous.char_end, token.char_start) : token.char_start]
    starts_with_space = text[token.char_start : token.char_start + 1].isspace()
    return not between and not starts_with_space
