"""One attention map of one text, and how to find a token in it. T tokens."""

import re
from collections.abc import Mapping, Sequence
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
    """The weights of one layer and one head, of their means, of a rollout, or of several layers and heads.

    Attributes:
        texts: what the tokens stand in, by their `source`.
        model: what the server says of it.
        result: of one query.
        axes: "layers" where all layers were asked for, each by itself; then "heads" where all heads were.
    """

    texts: Mapping[str, str]
    model: ModelInfo
    result: EncodedText
    axes: tuple[str, ...] = ()

    @cached_property
    def stack(self) -> npt.NDArray[Any]:
        """All weights, (L', H', T, T): of each layer and of each head, of a mean or rollout one."""
        stack: npt.NDArray[Any] = self.result.attention[0].dense()
        return stack if self.heads is not None else stack.mean(axis=1, keepdims=True)  # of a mean: itself

    @property
    def weights(self) -> npt.NDArray[Any]:
        """Those of the first layer and head, (T, T); row i says what token i attends to. Of words, (W, W)."""
        weights: npt.NDArray[Any] = self.stack[0, 0]
        return weights

    def has_weight(self, place: int) -> npt.NDArray[np.bool_]:
        """Where (T, T) a layer of the stack has weights: not beyond a window, nor between some blocks."""
        attention = self.result.attention[0]
        if not attention.patterns:
            return np.ones(self.stack.shape[-2:], dtype=np.bool_)
        ones = np.ones_like(attention.weights[place])
        return np.asarray(attention.patterns[place].dense(ones)[0] > 0)

    @property
    def layers(self) -> list[int] | None:
        """The number of each layer of the stack, None where a mean or rollout has put them together."""
        attention = self.result.attention[0]
        reduction = attention.query.reduction
        return None if reduction is not None and reduction.joins_layers else list(attention.layers)

    @property
    def heads(self) -> list[int] | None:
        """The number of each head of the stack, None where it is the mean of several."""
        attention = self.result.attention[0]
        is_mean = attention.view in ("head_mean", "dense") and "heads" not in self.axes
        is_mean = is_mean and len(attention.heads) > 1
        return None if is_mean else list(attention.heads)

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
        """The largest weight in magnitude of all layers and heads, 1 where all are 0."""
        return float(np.abs(self.stack).max()) or 1.0

    @cached_property
    def units(self) -> list[tuple[int, ...]]:
        """The numbers of the tokens that each row stands for: one, or those of a word."""
        unit_ids = self.result.attention[0].unit_ids
        if unit_ids is None:
            return [(number,) for number in range(len(self.result.tokens))]
        units: list[list[int]] = [[] for _ in range(int(unit_ids.max(initial=-1)) + 1)]
        for number, unit in enumerate(unit_ids.tolist()):
            if unit >= 0:
                units[unit].append(number)
        return [tuple(unit) for unit in units]

    @property
    def are_words(self) -> bool:
        """Whether rows and columns are words."""
        reduction = self.result.attention[0].query.reduction
        return reduction is not None and reduction.level == "words"

    @cached_property
    def names(self) -> list[str]:
        """The tokens as the tokenizer spells them, words as they stand in the text."""
        if not self.are_words:
            return [self.result.tokens[unit[0]].text for unit in self.units]
        return word_names(
            [[self.result.tokens[number] for number in unit] for unit in self.units], self.texts
        )

    @property
    def spellings(self) -> list[str]:
        """Return the names of the rows, control characters escaped."""
        return [printable(name) for name in self.names]

    @property
    def labels(self) -> list[str]:
        """Return the same, those of a prompt and of the second text of a pair marked."""
        return [
            spelling + _MARKS.get(self.result.tokens[unit[0]].source, "")
            for spelling, unit in zip(self.spellings, self.units, strict=True)
        ]

    @property
    def layer(self) -> int:
        """Return the layer's number from 0."""
        return self.result.attention[0].layers[0]

    @property
    def caption(self) -> str:
        """Say which map this is, and what was left out of it."""
        heads, count = self.heads, len(self.result.attention[0].heads)
        which = f"mean of {count} heads" if heads is None else f"head {heads[0]}"
        if heads is not None and count > 1:
            which = f"{count} heads"
        if self.role == "head_gates":
            which = "head gates"
        elif self.role == "attention_composed":
            which += ", composed"
        used = counted(self.result.num_tokens, "token")
        if self.result.truncated:
            used = f"the first {used} of {self.result.num_tokens_total}"
        return f"{printable(self.model.name)}, {self._layer_caption}, {which}, {used}{self._unit_caption}"

    @property
    def _layer_caption(self) -> str:
        reduction, last = self.result.attention[0].query.reduction, self.model.num_layers - 1
        if reduction is not None and reduction.joins_layers:
            return f"{reduction.layers} of layers 0-{last}"
        count = len(self.result.attention[0].layers)
        return f"layer {self.layer} of 0-{last}" if count == 1 else f"{count} layers"

    @property
    def _unit_caption(self) -> str:
        """Say what the rows are, and what they have lost."""
        result, caption = self.result.attention[0], ""
        if self.are_words:
            caption = f" as {counted(len(self.units), 'word')}"
        if result.special_token_mass is not None and result.special_token_mass.size:
            share = 100 * float(result.special_token_mass.mean())
            caption += f", without special tokens, which had {share:.0f} % of the weight"
        return caption

    def find(self, wanted: str) -> list[int]:
        """Return the numbers of the rows that `wanted` names.

        `wanted` is a token's spelling or a word of the text, in upper or lower case; all its places are
        returned. If nothing matches, a number counts tokens from 0, or from the end if it is negative.
        """
        folded = wanted.casefold()
        tokens = [[self.result.tokens[number] for number in unit] for unit in self.units]
        rows = [
            row for row, unit in enumerate(tokens) if any(each.text.casefold() == folded for each in unit)
        ]
        if not rows:
            words = self._words()
            rows = [row for row, unit in enumerate(tokens) if words.get(_word_of(unit[0]), "") == folded]
        if not rows and _NUMBER.fullmatch(wanted):
            number, count = int(wanted), len(tokens)
            rows = [number % count] if -count <= number < count else []
        return rows

    def _words(self) -> dict[tuple[str, int | None], str]:
        """Return the words, in lower case, by source and number."""
        # Some tokenizers make a token of the space before a word, and count it as part of the word.
        return {
            word: self.texts[word[0]][start:end].strip().casefold()
            for word, (start, end) in self._spans().items()
        }

    def _spans(self) -> dict[tuple[str, int | None], tuple[int, int]]:
        """Return where words stand in their texts, by source and number: first character and the end."""
        spans: dict[tuple[str, int | None], tuple[int, int]] = {}
        for token in self.result.tokens:
            if token.word_index is not None and token.source in self.texts:
                word = _word_of(token)
                start, end = spans.get(word, (token.char_start, token.char_end))
                spans[word] = (min(start, token.char_start), max(end, token.char_end))
        return spans


def word_names(units: Sequence[Sequence[Token]], texts: Mapping[str, str]) -> list[str]:
    """Return words as spelled in their texts, and everything else as the tokenizer spells it.

    Args:
        units: The tokens of each word; a special token is a unit of its own.
        texts: The text of each `Token.source`.
    """
    return [_word_name(unit, texts.get(unit[0].source, "")) for unit in units]


def _word_name(unit: Sequence[Token], text: str) -> str:
    spelled = "".join(token.text.removeprefix("##") if at else token.text for at, token in enumerate(unit))
    if unit[0].word_index is None:
        return spelled
    start, end = min(token.char_start for token in unit), max(token.char_end for token in unit)
    return text[start:end].strip() or spelled


def _word_of(token: Token) -> tuple[str, int | None]:
    return token.source, token.word_index
