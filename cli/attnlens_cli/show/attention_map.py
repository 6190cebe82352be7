"""One attention map of one text, and how to find a token in it. T tokens."""

import re
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from attnlens_cli.show.printable import counted, printable
from attnlens_client import EncodedText, ModelInfo

_NUMBER = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMap:
    """The weights of one layer and one head, or the mean of all heads."""

    text: str
    model: ModelInfo
    result: EncodedText

    @property
    def weights(self) -> npt.NDArray[Any]:
        """Return the weights (T, T); row i says what token i attends to."""
        if self.result.attentions is None:
            raise AssertionError("the map was not asked for")
        weights: npt.NDArray[Any] = self.result.attentions[0, 0]
        return weights

    @property
    def labels(self) -> list[str]:
        """Return the tokens as the tokenizer spells them, control characters escaped."""
        return [printable(token.text) for token in self.result.tokens]

    @property
    def layer(self) -> int:
        """Return the layer's number from 0."""
        return self.result.layers[0]

    @property
    def caption(self) -> str:
        """Say which map this is, and what was left out of it."""
        heads = self.result.heads
        which = f"head {heads[0]}" if len(heads) == 1 else f"mean of {len(heads)} heads"
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
            rows = [
                row
                for row, token in enumerate(tokens)
                if token.word_index is not None and words[token.word_index].casefold() == folded
            ]
        if not rows and _NUMBER.fullmatch(wanted):
            number, count = int(wanted), len(tokens)
            rows = [number % count] if -count <= number < count else []
        return rows

    def _words(self) -> dict[int, str]:
        """Return the words of the text by number."""
        spans: dict[int, tuple[int, int]] = {}
        for token in self.result.tokens:
            if token.word_index is not None:
                start, end = spans.get(token.word_index, (token.char_start, token.char_end))
                spans[token.word_index] = (min(start, token.char_start), max(end, token.char_end))
        # Some tokenizers make a token of the space before a word, and count it as part of the word.
        return {word: self.text[start:end].strip() for word, (start, end) in spans.items()}
