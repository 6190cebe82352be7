"""Sample pages for viewer tests: short texts with random attention maps. T tokens, L layers, H heads."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnlens_viewer import Contrast, HeadLabels, Page, PairMatrix, Scores, ViewedText, ViewedToken

Array = npt.NDArray[np.float32]

LAYERS, HEADS = 3, 4

# `##` continues a word.
TOKENS = ("[CLS]", "un", "##believ", "##ably", "the", "animal", "was", "too", "tired", ".", "[SEP]")


def tokens_of(spellings: Sequence[str]) -> list[ViewedToken]:
    tokens: list[ViewedToken] = []
    for spelling in spellings:
        continues = spelling.startswith("##")
        word = tokens[-1].word + (not continues) if tokens else 0
        special = spelling in {"[CLS]", "[SEP]"}
        joined = continues or spelling == "."
        tokens.append(ViewedToken(spelling, spelling.removeprefix("##"), word, special, joined))
    return tokens


def maps_of(num_tokens: int, seed: int = 0, layers: int = LAYERS, heads: int = HEADS) -> Array:
    """Return random attention maps, (L, H, T, T)."""
    logits = np.random.default_rng(seed).normal(scale=2, size=(layers, heads, num_tokens, num_tokens))
    exponentials = np.exp(logits)
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True), dtype=np.float32)


def scores_of(values: Array, baseline: float, *, target: str = "the cosine with itself") -> Scores:
    total = float(values.sum()) + baseline
    return Scores(
        method="contributions",
        target=target,
        values=values,
        baseline=baseline,
        sum=total,
        expected_sum=total,
        rho=0.845,
        description="Measured on 124 sentences.",
    )


def text_of(
    spellings: Sequence[str] = TOKENS, *, label: str = "Text", seed: int = 0, scored: bool = False
) -> ViewedText:
    values = np.linspace(-0.1, 0.3, len(spellings), dtype=np.float32)
    return ViewedText(
        label=label,
        tokens=tokens_of(spellings),
        maps=maps_of(len(spellings), seed),
        scores=[scores_of(values, 0.05)] if scored else [],
    )


def plain_page() -> Page:
    return Page(title="Unbelievably, the animal was too tired.", model="small", texts=[text_of()])


def full_page() -> Page:
    """Return a page with all optional parts."""
    first = text_of(label="First text", scored=True)
    second = text_of(("[CLS]", "it", "slept", "[SEP]"), label="Second text", seed=1, scored=True)
    heads = np.linspace(-0.2, 0.4, LAYERS * HEADS, dtype=np.float32).reshape(LAYERS, HEADS)
    first = ViewedText(
        label=first.label,
        tokens=first.tokens,
        maps=first.maps,
        scores=first.scores,
        head_contributions=heads,
        tokens_total=20,
    )
    matrix = np.arange(len(first.tokens) * 4, dtype=np.float32).reshape(-1, 4) / 1000
    return Page(
        title="Two texts",
        model="small",
        texts=[first, second],
        pair=PairMatrix(
            name="input vectors",
            values=matrix,
            baseline_row=np.full(4, -0.05, np.float32),
            baseline_column=np.full(len(first.tokens), -0.01, np.float32),
            similarity=float(matrix.sum()) - 0.31,
            description="A product of two vectors each.",
        ),
        contrast=Contrast(
            to="It slept.",
            rather_than="It ran.",
            scores=scores_of(np.linspace(-1, 1, 11, dtype=np.float32), 0.1),
        ),
        labels=[HeadLabels(0, 2, ("previous token",)), HeadLabels(1, 3, ("broad", "next token"))],
        notes=["A note from outside."],
    )
