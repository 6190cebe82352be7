"""Which tokens of a text make a word, which are special, and what rows and columns they become.

Letters: T tokens, W words, U units that are left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from attnlens.reductions.choices import AttentionReduction

IndexArray: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class TextUnits:
    """What is known of the tokens of a text.

    Attributes:
        words: (T,) int32: the number of the word that each token belongs to, see `number_words`.
        is_special: (T,) bool: whether the tokenizer has added it.
    """

    words: IndexArray
    is_special: BoolArray

    @classmethod
    def of(
        cls, word_indices: Sequence[int | None], is_special: Sequence[bool], is_second: Sequence[bool]
    ) -> "TextUnits":
        """Return the units of a text or pair, of which each argument has a value for each token.

        Args:
            word_indices: the number of the word in its text, None: it belongs to none.
            is_special: whether the tokenizer has added it.
            is_second: whether it stands in the second text of a pair.
        """
        indices = [None if special else word for word, special in zip(word_indices, is_special, strict=True)]
        return cls(number_words(indices, is_second), np.array(is_special, dtype=np.bool_))

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.words)


def number_words(word_indices: Sequence[int | None], is_second: Sequence[bool]) -> IndexArray:
    """Return the number of each token's word, (T,) int32: from 0, in the order of their first tokens.

    Args:
        word_indices: the number of the word in its text (`Token.word_index`); None: it belongs to none, as
            special tokens do, and is a word of its own.
        is_second: whether the token stands in the second text of a pair, whose words are counted apart.
    """
    numbers: dict[tuple[bool, int], int] = {}
    words: list[int] = []
    count = 0
    for word, of_second in zip(word_indices, is_second, strict=True):
        number = count if word is None else numbers.setdefault((of_second, word), count)
        count += number == count
        words.append(number)
    return np.array(words, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Units:
    """What tokens become in a reduction: first words, where these are asked for, then fewer.

    Attributes:
        words: (T,) int32, the number of each token's word from 0; None: tokens stay tokens.
        dropped: (W,) bool, or (T,) where tokens stay tokens: which are left out; None: nothing is.
        is_special: of the U units that are left; None: not known.
        num_tokens: T.
    """

    words: IndexArray | None
    dropped: BoolArray | None
    is_special: BoolArray | None
    num_tokens: int

    @classmethod
    def of(cls, reduction: AttentionReduction, text: TextUnits | None, num_tokens: int) -> "Units":
        """Return what the tokens of a text become.

        Args:
            reduction: what is asked for.
            text: what is known of the tokens; None: nothing, which will do unless `reduction.needs_text`.
            num_tokens: T.

        Raises:
            ValueError: `text` is None and needed, or has another number of tokens.
        """
        if text is None:
            if reduction.needs_text:
                raise ValueError("the words and special tokens of the text are not known")
            return cls(None, None, None, num_tokens)
        if text.num_tokens != num_tokens:
            raise ValueError(f"the units of {text.num_tokens} tokens do not fit {num_tokens}")
        is_special, words = text.is_special, None
        if reduction.level == "words":
            words = text.words
            first_tokens = np.unique(words, return_index=True)[1]
            is_special = is_special[first_tokens]  # a special token is a word of its own
        if reduction.special_tokens == "drop":
            return cls(words, is_special, np.zeros(int((~is_special).sum()), dtype=np.bool_), num_tokens)
        return cls(words, None, is_special, num_tokens)

    @cached_property
    def num_units(self) -> int:
        """U."""
        if self.is_special is not None:
            return len(self.is_special)
        return self.num_tokens

    @cached_property
    def of_token(self) -> IndexArray | None:
        """(T,) int32: the unit of each token, -1 where it was dropped; None: each token is its own."""
        if self.words is None and self.dropped is None:
            return None
        words = np.arange(self.num_tokens, dtype=np.int32) if self.words is None else self.words
        if self.dropped is None:
            return words
        numbers = np.where(self.dropped, -1, np.cumsum(~self.dropped) - 1).astype(np.int32)
        units: IndexArray = numbers[words]
        return units
