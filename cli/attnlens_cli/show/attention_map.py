"""Attention weights of one text with the labels, captions and positions that all outputs need.

Shapes: T tokens, W words, L' selected layers, H' selected heads.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens_cli.printable import counted, printable
from attnlens_client import EncodedText, ModelInfo, Token

_NUMBER = re.compile(r"-?[0-9]{1,9}")
SOURCE_MARKS = {"prompt": " (prompt)", "second_text": " (second)"}


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The weights of one layer and head, of a mean, of a rollout, or of several layers and heads.

    Attributes:
        texts: Texts by `Token.source`.
        model: The model of the server.
        result: Result with one attention query.
        axes: "layers" if every layer was requested separately, then "heads" if every head was.
    """

    texts: Mapping[str, str]
    model: ModelInfo
    result: EncodedText
    axes: tuple[str, ...] = ()

    @cached_property
    def stack(self) -> npt.NDArray[Any]:
        """All weights, (L', H', T, T). A mean or rollout has one layer or head."""
        stack: npt.NDArray[Any] = self.result.attention[0].dense()
        return stack if self.heads is not None else stack.mean(axis=1, keepdims=True)

    @property
    def weights(self) -> npt.NDArray[Any]:
        """Weights of the first layer and head, (T, T) or (W, W). Row i contains what token i attends to."""
        weights: npt.NDArray[Any] = self.stack[0, 0]
        return weights

    def has_weight(self, index: int) -> npt.NDArray[np.bool_]:
        """Return which pairs of a layer have a weight, (T, T). A window excludes distant pairs."""
        attention = self.result.attention[0]
        if not attention.patterns:
            return np.ones(self.stack.shape[-2:], dtype=np.bool_)
        ones = np.ones_like(attention.weights[index])
        return np.asarray(attention.patterns[index].dense(ones)[0] > 0)

    def head_load(self, index: int) -> list[float]:
        """Return the share of tokens that use each head of a layer with head gates."""
        selected = self.result.attention[0].selected[index]  # (T, H')
        load: list[float] = selected.mean(axis=0, dtype=np.float64).tolist()
        return load

    @property
    def layers(self) -> list[int] | None:
        """Layer indices of the stack, or None for a mean or rollout."""
        attention = self.result.attention[0]
        reduction = attention.query.reduction
        return None if reduction is not None and reduction.joins_layers else list(attention.layers)

    @property
    def heads(self) -> list[int] | None:
        """Head indices of the stack, or None for the mean of several heads."""
        attention = self.result.attention[0]
        is_mean = attention.view in ("head_mean", "dense") and "heads" not in self.axes
        is_mean = is_mean and len(attention.heads) > 1
        return None if is_mean else list(attention.heads)

    @property
    def role(self) -> str:
        """The role of the output, such as `attention_weights`."""
        return self.result.attention[0].role

    @property
    def has_distributions(self) -> bool:
        """Whether every row sums to 1."""
        return self.result.attention[0].row_sum == "one"

    @property
    def largest(self) -> float:
        """The largest magnitude in the stack, or 1 if all weights are 0."""
        return float(np.abs(self.stack).max()) or 1.0

    @cached_property
    def units(self) -> list[tuple[int, ...]]:
        """Token indices of each row: one token, or the tokens of a word."""
        unit_ids = self.result.attention[0].unit_ids
        if unit_ids is None:
            return [(token,) for token in range(len(self.result.tokens))]
        units: list[list[int]] = [[] for _ in range(int(unit_ids.max(initial=-1)) + 1)]
        for token, unit in enumerate(unit_ids.tolist()):
            if unit >= 0:
                units[unit].append(token)
        return [tuple(unit) for unit in units]

    @property
    def are_words(self) -> bool:
        """Whether rows and columns are words."""
        reduction = self.result.attention[0].query.reduction
        return reduction is not None and reduction.level == "words"

    @cached_property
    def names(self) -> list[str]:
        """Tokens as spelled by the tokenizer, or words as spelled in the text."""
        if not self.are_words:
            return [self.result.tokens[unit[0]].text for unit in self.units]
        return word_names([[self.result.tokens[token] for token in unit] for unit in self.units], self.texts)

    @property
    def spellings(self) -> list[str]:
        """The names with unprintable characters escaped."""
        return [printable(name) for name in self.names]

    @property
    def labels(self) -> list[str]:
        """The spellings, marked if they belong to a prompt or to the second text of a pair."""
        return [
            spelling + SOURCE_MARKS.get(self.result.tokens[unit[0]].source, "")
            for spelling, unit in zip(self.spellings, self.units, strict=True)
        ]

    @property
    def layer(self) -> int:
        """Index of the first layer."""
        return self.result.attention[0].layers[0]

    @property
    def caption(self) -> str:
        """Model, layers, heads and number of tokens of this map, and the share of dropped special tokens."""
        heads, count = self.heads, len(self.result.attention[0].heads)
        head_caption = f"mean of {count} heads" if heads is None else f"head {heads[0]}"
        if heads is not None and count > 1:
            head_caption = f"{count} heads"
        if self.role == "head_gates":
            head_caption = "head gates"
        elif self.role == "attention_composed":
            head_caption += ", composed"
        used = counted(self.result.num_tokens, "token")
        if self.result.truncated:
            used = f"the first {used} of {self.result.num_tokens_total}"
        return (
            f"{printable(self.model.name)}, {self._layer_caption}, {head_caption}, {used}{self._unit_caption}"
        )

    @property
    def _layer_caption(self) -> str:
        reduction, last = self.result.attention[0].query.reduction, self.model.num_layers - 1
        if reduction is not None and reduction.joins_layers:
            return f"{reduction.layers} of layers 0-{last}"
        count = len(self.result.attention[0].layers)
        return f"layer {self.layer} of 0-{last}" if count == 1 else f"{count} layers"

    @property
    def _unit_caption(self) -> str:
        """The units of rows, and the share of dropped special tokens."""
        result, caption = self.result.attention[0], ""
        if self.are_words:
            caption = f" as {counted(len(self.units), 'word')}"
        if result.special_token_mass is not None and result.special_token_mass.size:
            share = 100 * float(result.special_token_mass.mean())
            caption += f", without special tokens, which had {share:.0f} % of the weight"
        return caption

    def find(self, name: str) -> list[int]:
        """Return the indices of all rows that match a name.

        Args:
            name: Spelling of a token or a word of the text; case is ignored. If there is no match, an integer
                is a row index, which counts from the end if it is negative.
        """
        folded = name.casefold()
        tokens = [[self.result.tokens[token] for token in unit] for unit in self.units]
        rows = [
            row for row, unit in enumerate(tokens) if any(token.text.casefold() == folded for token in unit)
        ]
        if not rows:
            words = self._words()
            rows = [row for row, unit in enumerate(tokens) if words.get(_word_of(unit[0]), "") == folded]
        if not rows and _NUMBER.fullmatch(name):
            row, count = int(name), len(tokens)
            rows = [row % count] if -count <= row < count else []
        return rows

    def _words(self) -> dict[tuple[str, int | None], str]:
        """Return the case-folded words by source and word index."""
        # Some tokenizers treat the space before a word as a token of this word.
        return {
            word: self.texts[word[0]][start:end].strip().casefold()
            for word, (start, end) in self._spans().items()
        }

    def _spans(self) -> dict[tuple[str, int | None], tuple[int, int]]:
        """Return start and end characters of words by source and word index."""
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
    first, *others = (token.text for token in unit)
    spelled = first + "".join(text.removeprefix("##") for text in others)
    if unit[0].word_index is None:
        return spelled
    start, end = min(token.char_start for token in unit), max(token.char_end for token in unit)
    return text[start:end].strip() or spelled


def _word_of(token: Token) -> tuple[str, int | None]:
    return token.source, token.word_index
