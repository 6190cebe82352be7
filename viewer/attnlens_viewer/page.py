"""Content of a page, as plain data classes that validate shapes and values.

Shapes: T tokens of a text, N and M tokens of the first and second text, L layers, H heads.
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
    """A token as displayed on the page.

    Attributes:
        text: Token string as spelled by the tokenizer, e.g. `##ing`.
        shown: Span of the text that the token covers, e.g. `ing`.
        word: Word index. Tokens of a word are adjacent and indices never decrease. Each special token counts
            as a word.
        is_special: Whether the tokenizer added the token.
        is_joined: Whether the token follows the previous one without a space.
    """

    text: str
    shown: str
    word: int
    is_special: bool = False
    is_joined: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scores:
    """Scores that one method assigns to the tokens of a text.

    Attributes:
        method: Method name, e.g. `contributions`.
        target: Description of the explained quantity, e.g. "the cosine with the second text".
        values: (T,) score of each token.
        baseline: Part of the target that belongs to no token. None if the method has no baseline.
        sum: Sum of the values and the baseline.
        expected_sum: Value that `sum` should reach. None if the scores are not additive.
        rho: Faithfulness: Spearman correlation with leave-one-out scores. None if not measured for
            this question.
        description: One or two sentences about the scores and the data on which `rho` was measured.
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
    """A text with its attention maps and scores.

    Attributes:
        label: Name of the text on the page, e.g. "First text".
        tokens: The T tokens of the text.
        maps: (L, H, T, T) array or one (H, T, T) array per layer: weights between 0 and 1, or uint8 values
            from `encoding.square_root_bytes`.
        scores: Scores by method. The page opens with the first method.
        head_contributions: (L, H) contribution of each head to the embedding, if available.
        tokens_total: Number of tokens before truncation. None if the text was not truncated.

    Raises:
        ValueError: The text is too long, or an array has the wrong shape or contains non-finite values.
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
                f"{self.label} has {num_tokens} tokens, but a page displays 1 to {MAX_TOKENS}. "
                "Shorten the text."
            )
        words = [token.word for token in self.tokens]
        if words != sorted(words):
            raise ValueError(f"word indices of {self.label} are not in ascending order")
        if not len(self.maps):
            raise ValueError(f"{self.label} has no attention maps. Provide at least one layer.")
        for layer, maps in enumerate(self.maps):
            if maps.shape != (self.num_heads, num_tokens, num_tokens):
                raise ValueError(
                    f"layer {layer} of {self.label} has maps of shape {maps.shape}, expected "
                    f"{(self.num_heads, num_tokens, num_tokens)} (heads, tokens, tokens)"
                )
        for scores in self.scores:
            _validate_array(f"{scores.method} scores of {self.label}", scores.values, (num_tokens,))
        if self.head_contributions is not None:
            shape = (self.num_layers, self.num_heads)
            _validate_array(f"head contributions of {self.label}", self.head_contributions, shape)

    @property
    def num_layers(self) -> int:
        """Number of layers with attention maps."""
        return len(self.maps)

    @property
    def num_heads(self) -> int:
        """Number of heads per layer."""
        return int(self.maps[0].shape[0])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PairMatrix:
    """Contributions of token pairs to the similarity of two texts.

    Attributes:
        name: Display name of the matrix, e.g. "output vectors".
        values: (N, M) contribution of each pair: rows are tokens of the first text, columns of the second.
        baseline_row: (M,) contributions of the second text's tokens with the first text's baseline, if any.
        baseline_column: (N,) contributions of the first text's tokens with the second text's baseline, if
            any.
        baseline: Contribution of the two baselines.
        similarity: Total of all contributions. None if they are not additive.
        description: One or two sentences about the values.
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
    """Explanation of why the first text is closer to text `to` than to text `rather_than`.

    Attributes:
        scores: Scores of the first text's tokens. They add up to the difference of the two cosine
            similarities.
    """

    to: str
    rather_than: str
    scores: Scores


@dataclass(frozen=True, slots=True)
class HeadLabels:
    """Labels of an attention head, e.g. ("previous token",)."""

    layer: int
    head: int
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Page:
    """Complete content of a page.

    Attributes:
        title: Page heading.
        model: Model name.
        texts: One text, or two texts to compare.
        pair: Token pair matrix of the two texts.
        contrast: Contrast for the first text.
        labels: Labels of attention heads. Heads without labels are omitted.
        notes: Sentences to add to the section "What this does not mean".

    Raises:
        ValueError: The parts are inconsistent, or an array contains non-finite values.
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
            raise ValueError(f"a page displays one or two texts, got {len(self.texts)}")
        if len({(text.num_layers, text.num_heads) for text in self.texts}) > 1:
            raise ValueError("the two texts differ in the number of layers or heads. Use one model for both.")
        if self.pair is not None:
            if len(self.texts) != MAX_TEXTS:
                raise ValueError("a pair matrix requires two texts")
            first, second = (len(text.tokens) for text in self.texts)
            _validate_array("pair matrix", self.pair.values, (first, second))
            for name, baseline, size in (
                ("row", self.pair.baseline_row, second),
                ("column", self.pair.baseline_column, first),
            ):
                if baseline is not None:
                    _validate_array(f"baseline {name} of the pair matrix", baseline, (size,))
        if self.contrast is not None:
            _validate_array("contrast scores", self.contrast.scores.values, (len(self.texts[0].tokens),))
        layers, heads = self.texts[0].num_layers, self.texts[0].num_heads
        for labels in self.labels:
            if not (0 <= labels.layer < layers and 0 <= labels.head < heads):
                raise ValueError(
                    f"labels for nonexistent head L{labels.layer}H{labels.head}: the attention maps have "
                    f"{layers} layers with {heads} heads each, counted from 0"
                )


def _validate_array(name: str, values: Array, shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise ValueError(f"{name}: shape is {values.shape}, expected {shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"{name}: contains non-finite values")
