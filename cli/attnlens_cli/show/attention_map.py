"""One attention map of one text, and how to find a token in it. T tokens."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens_cli.show.printable import counted, printable
from attnlens_client import EncodedText, ModelInfo, Token

_NUMBER = re.compile(r"-?[0-9]{1,9}")
_MARKS = {"prompt": " (prompt)", "second_text": " (second)"}


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The weights of one layer and one head, or the mean of all heads.

    Attributes:
        texts: what the tokens stand in, by their `source`.
        model: what the server says of it.
        result: of one query.
    """

    texts: Mapping[str, str]
    model: ModelInfo
    result: EncodedText

    @cached_property
    def weights(self) -> npt.NDArray[Any]:
        """The weights (T, T); row i says what token i attends to."""
        weights: npt.NDArray[Any] = self.result.attention[0].dense()[0, 0]
        return weights

    @cached_property
    def has_weight(self) -> npt.NDArray[np.bool_]:
        """Where (T, T) there is a weight: not beyond a window, nor where blocks do not attend."""
        attention = self.result.attention[0]
        if not attention.patterns:
            return np.ones(self.weights.shape, dtype=np.bool_)
        ones = np.ones_like(attention.weights[0])
        return np.asarray(attention.patterns[0].dense(ones)[0] > 0)

    @property
    def role(self) -> str:
        """Which output of the layer it is."""
        return self.result.attention[0].role

    @property
    def has_distributions(self) -> bool:
        """Whether each row sums to 1."""
        return self.result.attention[0].row_sum == "one"

    @property
    def largest(self) -> float:
        """The largest weight in magnitude, 1 where all are 0."""
        return float(np.abs(self.weights).max()) or 1.0

    @property
    def spellings(self) -> list[str]:
        """Return the tokens as the tokenizer spells them, control characters escaped."""
        return [printable(token.text) for token in self.result.tokens]

    @property
    def labels(self) -> list[str]:
        """Return the same, those of a prompt and of the second text of a pair marked."""
        return [
            spelling + _MARKS.get(token.source, "")
            for spelling, token in zip(self.spellings, self.result.tokens, strict=True)
        ]

    @property
    def layer(self) -> int:
        """Return the layer's number from 0."""
        return self.result.attention[0].layers[0]

    @property
    def caption(self) -> str:
        """Say which map this is, and what was left out of it."""
        heads = self.result.attention[0].heads
        which = f"head {heads[0]}" if len(heads) == 1 else f"mean of {len(heads)} heads"
        if self.role == "head_gates":
            which = "head gates"
        elif self.role == "attention_composed":
            which += ", composed"
        used = counted(self.result.num_tokens, "token")
        if self.result.truncated:
            used = f"the first {used} of {self.result.num_tokens_total}"
        layer = f"layer {self.layer} of 0-{self.model.num_layers - 1}"
        return f"{printable(self.model.name)}, {layer}, {which}, {used}"

    def find(self, wanted: str) -> list[int]:
        """Return the numbers of the tokens that `wanted` names.

        `wanted` is a token's spelling or a word of the text, in upper or lower case; all its places are
        returned. If nothing matches, a number counts tokens from 0, or from the end if it is negative.
        """
        folded = wanted.casefold()
        tokens = self.result.tokens
        rows = [row for row, token in enumerate(tokens) if token.text.casefold() == folded]
        if not rows:
            words = self._words()
            rows = [row for row, token in enumerate(tokens) if words.get(_word_of(token), "") == folded]
        if not rows and _NUMBER.fullmatch(wanted):
            number, count = int(wanted), len(tokens)
            rows = [number % count] if -count <= number < count else []
        return rows

    def _words(self) -> dict[tuple[str, int | None], str]:
        """Return the words, in lower case, by source and number."""
        spans: dict[tuple[str, int | None], tuple[int, int]] = {}
        for token in self.result.tokens:
            if token.word_index is not None and token.source in self.texts:
                word = _word_of(token)
                start, end = spans.get(word, (token.char_start, token.char_end))
                spans[word] = (min(start, token.char_start), max(end, token.char_end))
        # Some tokenizers make a token of the space before a word, and count it as part of the word.
        return {
            word: self.texts[word[0]][start:end].strip().casefold() for word, (start, end) in spans.items()
        }


def _word_of(token: Token) -> tuple[str, int | None]:
    return token.source, token.word_index
