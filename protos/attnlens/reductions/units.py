"""Words and special tokens of a text, and the units that tokens become in a reduction.

Dimension names: T tokens, W words, U units in the result.
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
    """Words and special tokens of a text.

    Attributes:
        words: (T,) int32: Word index of each token, see `number_words`.
        is_special: (T,) bool: Whether the tokenizer added the token.
    """

    words: IndexArray
    is_special: BoolArray

    @classmethod
    def of(
        cls, word_indices: Sequence[int | None], is_special: Sequence[bool], is_second: Sequence[bool]
    ) -> "TextUnits":
        """Return the units of a text or pair. Each argument has one entry per token.

        Args:
            word_indices: Word index within the token's text, or None if the token belongs to no word.
            is_special: Whether the tokenizer added the token.
            is_second: Whether the token belongs to the second text of a pair.
        """
        indices = [None if special else word for word, special in zip(word_indices, is_special, strict=True)]
        return cls(number_words(indices, is_second), np.array(is_special, dtype=np.bool_))

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.words)


def number_words(word_indices: Sequence[int | None], is_second: Sequence[bool]) -> IndexArray:
    """Return a word index for each token, (T,) int32, starting at 0 in the order of the words' first tokens.

    Args:
        word_indices: Word index within the token's text (`Token.word_index`). A token with None, such as a
            special token, becomes a separate word.
        is_second: Whether the token belongs to the second text of a pair, whose words are numbered
            separately.
    """
    indices: dict[tuple[bool, int], int] = {}
    words: list[int] = []
    count = 0
    for word, of_second in zip(word_indices, is_second, strict=True):
        index = count if word is None else indices.setdefault((of_second, word), count)
        count += index == count
        words.append(index)
    return np.array(words, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Units:
    """Mapping from tokens to the units of a reduction: tokens are merged into words, then units are dropped.

    Attributes:
        words: (T,) int32: Word index of each token. None if tokens are not merged.
        dropped: (W,) bool, or (T,) if tokens are not merged: Units to drop. None if all are kept.
        is_special: (U,) bool: Whether each remaining unit is special. None if unknown.
        num_tokens: T.
    """

    words: IndexArray | None
    dropped: BoolArray | None
    is_special: BoolArray | None
    num_tokens: int

    @classmethod
    def of(cls, reduction: AttentionReduction, text: TextUnits | None, num_tokens: int) -> "Units":
        """Return the units of a text.

        Args:
            reduction: Reduction to apply.
            text: Words and special tokens. Required if `reduction.needs_text`.
            num_tokens: T.

        Raises:
            ValueError: `text` is needed but None, or has a different number of tokens.
        """
        if text is None:
            if reduction.needs_text:
                raise ValueError("the reduction needs the words and special tokens of the text")
            return cls(None, None, None, num_tokens)
        if text.num_tokens != num_tokens:
            raise ValueError(f"the text has units for {text.num_tokens} tokens instead of {num_tokens}")
        is_special, words = text.is_special, None
        if reduction.level == "words":
            words = text.words
            first_tokens = np.unique(words, return_index=True)[1]
            is_special = is_special[first_tokens]  # a special token is a separate word
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
        """(T,) int32: Unit index of each token, or -1 if dropped. None if the units are the tokens."""
        if self.words is None and self.dropped is None:
            return None
        words = np.arange(self.num_tokens, dtype=np.int32) if self.words is None else self.words
        if self.dropped is None:
            return words
        indices = np.where(self.dropped, -1, np.cumsum(~self.dropped) - 1).astype(np.int32)
        units: IndexArray = indices[words]
        return units
