"""What a page holds, as plain data.

Letters: T tokens of a text, n and m tokens of a first and a second text, L layers, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

MAX_TOKENS = 2048
MAX_TEXTS = 2


@dataclass(frozen=True, slots=True)
class ViewedToken:
    """A token as the page shows it.

    Attributes:
        text: the tokenizer's spelling, for instance `##ing`.
        shown: the piece of the text that it stands for, for instance `ing`.
        word: the number of its word in the text, specials counted as words of their own: never falling, and
            tokens of one word stand together.
        is_special: whether the tokenizer has added it.
        is_joined: whether no space stands before it.
    """

    text: str
    shown: str
    word: int
    is_special: bool = False
    is_joined: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scores:
    """What each token has to do with an embedding, by one method.

    Attributes:
        method: its name, for instance `contributions`.
        target: what the scores add up to, in words: "the cosine with the second text".
        values: (T,), one number a token.
        baseline: what belongs to no token. None: the method has none.
        sum: the values and the baseline together.
        expected_sum: what `sum` must be where the method is exact. None: it need not be anything.
        rho: measured faithfulness: Spearman's correlation with leaving tokens out. None: not measured.
        description: what the numbers are and what the figure `rho` was measured on, in a sentence or two.
    """

    method: str
    target: str
    values: Array
    baseline: float | None = None
    sum: float | None = None
    expected_sum: float | None = None
    rho: float | None = None
    description: str = ""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ViewedText:
    """A text, its attention and its scores.

    Attributes:
        label: what the page calls it, for instance "First text".
        tokens: T of them.
        maps: one array (H, T, T) for each layer, or an array (L, H, T, T): floats from 0 to 1, or uint8 as
            `encoding.square_root_bytes` makes them.
        scores: any number of methods, the one to show first in front.
        head_contributions: (L, H), what each head added to the embedding. None: not known.
        tokens_total: how many tokens the text had before it was cut. None: it was not.
    """

    label: str
    tokens: Sequence[ViewedToken]
    maps: Sequence[Array] | Array
    scores: Sequence[Scores] = ()
    head_contributions: Array | None = None
    tokens_total: int | None = None

    def __post_init__(self) -> None:
        num_tokens = len(self.tokens)
        if not 1 <= num_tokens <= MAX_TOKENS:
            raise ValueError(
                f"{self.label} has {num_tokens} tokens, a page shows 1 to {MAX_TOKENS}: cut the text"
            )
        words = [token.word for token in self.tokens]
        if words != sorted(words):
            raise ValueError(f"the words of {self.label} are not in order: a word's tokens stand together")
        if not len(self.maps):
            raise ValueError(f"{self.label} has no attention maps: give at least one layer")
        for layer, maps in enumerate(self.maps):
            if maps.shape != (self.num_heads, num_tokens, num_tokens):
                raise ValueError(
                    f"layer {layer} of {self.label} has maps of shape {maps.shape}, not "
                    f"{(self.num_heads, num_tokens, num_tokens)}: heads, tokens, tokens"
                )
        for scores in self.scores:
            _check_shape(f"the {scores.method} of {self.label}", scores.values, (num_tokens,))
        if self.head_contributions is not None:
            shape = (self.num_layers, self.num_heads)
            _check_shape(f"the head contributions of {self.label}", self.head_contributions, shape)

    @property
    def num_layers(self) -> int:
        """How many layers have maps."""
        return len(self.maps)

    @property
    def num_heads(self) -> int:
        """How many heads each layer has."""
        return int(self.maps[0].shape[0])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PairMatrix:
    """What each pair of tokens of two texts has to do with their similarity.

    Attributes:
        name: of the kind of matrix, for instance "output vectors".
        values: (n, m), a row for each token of the first text.
        baseline_row: (m,), what the second text's tokens share with no token of the first. None: nothing.
        baseline_column: (n,), the same of the first text's tokens.
        baseline: what belongs to no token of either.
        similarity: what all of it adds up to. None: it need not add up.
        description: what the numbers are, in a sentence or two.
    """

    name: str
    values: Array
    baseline_row: Array | None = None
    baseline_column: Array | None = None
    baseline: float = 0.0
    similarity: float | None = None
    description: str = ""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Contrast:
    """Why the first text is nearer to one text than to another.

    Attributes:
        to, rather_than: the nearer and the farther text.
        scores: of the first text's tokens; they add up to the difference of the two cosines.
    """

    to: str
    rather_than: str
    scores: Scores


@dataclass(frozen=True, slots=True)
class HeadLabels:
    """What is known of a head, for instance ("previous token",)."""

    layer: int
    head: int
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Page:
    """All that a page shows.

    Attributes:
        title: the page's heading.
        model: the model's name.
        texts: one, or two that are compared.
        pair: of two texts.
        contrast: of the first text.
        labels: of heads; heads without labels need no entry.
        notes: sentences for the section "What this does not mean".

    Raises:
        ValueError: something does not fit the rest, or is not a finite number.
    """

    title: str
    model: str
    texts: Sequence[ViewedText]
    pair: PairMatrix | None = None
    contrast: Contrast | None = None
    labels: Sequence[HeadLabels] = ()
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.texts) <= MAX_TEXTS:
            raise ValueError(f"there are {len(self.texts)} texts: a page shows one, or two that are compared")
        if len({(text.num_layers, text.num_heads) for text in self.texts}) > 1:
            raise ValueError("the two texts have not the same number of layers and heads: use one model")
        if self.pair is not None:
            if len(self.texts) != MAX_TEXTS:
                raise ValueError("a pair matrix needs two texts")
            first, second = (len(text.tokens) for text in self.texts)
            _check_shape("the pair matrix", self.pair.values, (first, second))
            for name, baseline, size in (
                ("row", self.pair.baseline_row, second),
                ("column", self.pair.baseline_column, first),
            ):
                if baseline is not None:
                    _check_shape(f"the baseline {name} of the pair matrix", baseline, (size,))
        if self.contrast is not None:
            _check_shape(
                "the scores of the contrast", self.contrast.scores.values, (len(self.texts[0].tokens),)
            )
        layers, heads = self.texts[0].num_layers, self.texts[0].num_heads
        for labels in self.labels:
            if not (0 <= labels.layer < layers and 0 <= labels.head < heads):
                raise ValueError(
                    f"there are labels of L{labels.layer}H{labels.head}: the maps have {layers} layers "
                    f"of {heads} heads, from 0"
                )


def _check_shape(what: str, values: Array, shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise ValueError(f"the shape of {what} is {values.shape}, not {shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"some of {what} are not finite numbers")
