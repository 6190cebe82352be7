"""Which piece of the text a token stands for, and which tokens make a word."""

from collections.abc import Hashable, Iterable
from typing import Protocol

from attnlens_viewer.page import ViewedToken


class PlacedToken(Protocol):
    """A token that knows its place in a text, as the client returns them."""

    @property
    def text(self) -> str:
        """The tokenizer's spelling."""

    @property
    def source(self) -> str:
        """Which text it stands in."""

    @property
    def char_start(self) -> int:
        """The first character that it stands for."""

    @property
    def char_end(self) -> int:
        """The character after the last one."""

    @property
    def word_index(self) -> int | None:
        """The number of its word in its source. None: it is of no word."""

    @property
    def is_special(self) -> bool:
        """Whether the tokenizer has added it."""


def viewed_tokens(tokens: Iterable[PlacedToken], texts: dict[str, str]) -> list[ViewedToken]:
    """Return the tokens as a page shows them.

    Args:
        tokens: in their order.
        texts: what they stand in, by `source`. Tokens of other sources are shown as they are spelled.
    """
    viewed: list[ViewedToken] = []
    previous: PlacedToken | None = None
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
                shown=_piece(token, previous, texts.get(token.source, "")),
                word=word,
                is_special=token.is_special,
                is_joined=_is_joined(token, previous, texts.get(token.source, "")),
            )
        )
        previous = token
    return viewed


def _piece(token: PlacedToken, previous: PlacedToken | None, text: str) -> str:
    """Return the text of a token, or its spelling: of a character in several tokens each has the whole."""
    piece = text[token.char_start : token.char_end].strip()
    is_again = (
        previous is not None
        and not previous.is_special
        and previous.source == token.source
        and (previous.char_start, previous.char_end) == (token.char_start, token.char_end)
    )
    return piece if piece and not is_again and not token.is_special else token.text


def _is_joined(token: PlacedToken, previous: PlacedToken | None, text: str) -> bool:
    if previous is None or token.is_special or previous.is_special or previous.source != token.source:
        return False
    between = text[min(previous.char_end, token.char_start) : token.char_start]
    begins_with_space = text[token.char_start : token.char_start + 1].isspace()
    return not between and not begins_with_space
