"""Builds pages from server results and adds the explanatory texts: targets, method caveats and warnings.

Shapes: T tokens of a text, N and M tokens of the first and second text, L layers, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from attnlens_viewer.page import Array, Contrast, Page, PairMatrix, Scores, ViewedText
from attnlens_viewer.tokens import SourceToken, viewed_tokens

OWN_EMBEDDING = "the similarity of the text to itself"
OTHER_TEXT = "the cosine similarity to the other text"
OTHER_TEXT_BY_DOT = "the dot product with the other text"
DIFFERENCE = "the difference between the two cosine similarities"

_MAX_TITLE = 90
_LABELS = ("First text", "Second text")
_DESCRIPTIONS = {
    "contributions": "Exact decomposition of the target with the attention weights held constant.",
    "output_share": "Shares of the output vectors, which already mix information from the whole text.",
    "leave_one_out": "Effect of removing one token at a time. Joint effects are not measured.",
    "rollout": "Computed from attention weights alone, independent of the target.",
    "received_attention": "Computed from attention weights alone, independent of the target.",
    "contribution_norm": "Size of each token's contribution to the embedding, independent of the target.",
}
_RANKING_ONLY = ("rollout", "received_attention", "contribution_norm")
_MEASURED = "Faithfulness was measured on other texts when the model was exported."
_LOW_FAITHFULNESS = 0.7
_LOW_WARNING = "It is low: these scores are a weak guide to which words matter."
_MISSING_SCORES = "Tokens without a score count as 0."
_MATRICES = {
    "output": (
        "Output vectors",
        "Similarity of the output vectors of both texts. The values add up to the similarity.",
    ),
    "input": (
        "Input tokens",
        "Contributions of the tokens and biases of both texts. The values add up to the similarity.",
    ),
    "interaction": (
        "Interaction",
        "Drop in similarity when both tokens are removed, minus the drops when each is removed alone.",
    ),
}


class MethodScores(Protocol):
    """Scores of one method for one text. `attnlens_client.TokenScores` implements it."""

    @property
    def method(self) -> str:
        """Method name, e.g. `contributions`."""

    @property
    def values(self) -> Array:
        """(T,) score of each token, NaN if missing."""

    @property
    def baseline(self) -> float | None:
        """Part of the target that belongs to no token. None if the method has no baseline."""

    @property
    def sum(self) -> float:
        """Sum of the baseline and the values that are not NaN."""

    @property
    def expected_sum(self) -> float | None:
        """Value that `sum` should reach. None if the scores are not additive."""

    @property
    def faithfulness(self) -> float | None:
        """Spearman correlation with leave-one-out scores, or None if not measured for this question."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TextResult:
    """Server results for one text.

    Attributes:
        text: Input text.
        prompt: Prompt that precedes the text.
        tokens: The T tokens of the text.
        maps: (L, H, T, T) array or one (H, T, T) array per layer: weights, or uint8 values from
            `encoding.square_root_bytes`.
        tokens_total: Number of tokens before truncation. None if the text was not truncated.
        scores: Token scores by method. Empty if none were requested.
        target: Description of the explained quantity: OWN_EMBEDDING, OTHER_TEXT or a custom description.
        head_contributions: (L, H) contribution of each head, if available.
    """

    text: str
    prompt: str = ""
    tokens: Sequence[SourceToken]
    maps: Array | Sequence[Array]
    tokens_total: int | None = None
    scores: Sequence[MethodScores] = ()
    target: str = OWN_EMBEDDING
    head_contributions: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PairResult:
    """Server results for the token pairs of two texts.

    Attributes:
        kind: `output`, `input` or `interaction`.
        values: (N, M) contribution of each token pair.
        similarity: Cosine similarity of the two texts.
        baseline_row: (M,) contributions of the first text's biases with the second text's tokens (`input`
            only).
        baseline_column: (N,) contributions of the first text's tokens with the second text's biases.
        baseline: Contribution of the biases of both texts.
    """

    kind: str
    values: Array
    similarity: float
    baseline_row: Array | None = None
    baseline_column: Array | None = None
    baseline: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ContrastResult:
    """Scores of the first text's tokens for being closer to text `to` than to text `rather_than`."""

    to: str
    rather_than: str
    scores: MethodScores


def build_page(
    model: str,
    texts: Sequence[TextResult],
    *,
    matrix: PairResult | None = None,
    contrast: ContrastResult | None = None,
    notes: Sequence[str] = (),
) -> Page:
    """Build the page of one text, or of two texts to compare.

    Args:
        model: Model name.
        texts: Results of one or two texts.
        matrix: Token pair results of the two texts.
        contrast: Contrast results of the first text.
        notes: Notes for the reader, e.g. why something is missing.

    Raises:
        ValueError: A text has no tokens or too many for a page, or the results are inconsistent.
    """
    labels = ("Text",) if len(texts) == 1 else _LABELS
    return Page(
        title=build_title([result.text for result in texts], contrast),
        model=model,
        texts=[_viewed_text(result, label) for result, label in zip(texts, labels, strict=True)],
        pair=None if matrix is None else _pair(matrix),
        contrast=None
        if contrast is None
        else Contrast(
            to=contrast.to,
            rather_than=contrast.rather_than,
            scores=_scores(contrast.scores, DIFFERENCE),
        ),
        notes=notes,
    )


def describe_target(to: str | None, rather_than: str | None = None, label: str | None = None) -> str:
    """Describe the quantity that the scores of a single text explain."""
    if label is not None:
        other = "" if rather_than is None else f" minus the logit of {_quote(rather_than)}"
        return f"the logit of {_quote(label)}{other}"
    if to is None:
        return OWN_EMBEDDING
    if rather_than is None:
        return f"the cosine similarity to {_quote(to)}"
    return f"the cosine similarity to {_quote(to)} minus the cosine similarity to {_quote(rather_than)}"


def _quote(text: str) -> str:
    return f"\N{LEFT DOUBLE QUOTATION MARK}{text}\N{RIGHT DOUBLE QUOTATION MARK}"


def build_title(texts: Sequence[str], contrast: ContrastResult | None = None) -> str:
    """Return a title from the shortened texts: "A", "A / B", or "A / B rather than C" for a contrast."""
    compared = () if contrast is None else (contrast.to, contrast.rather_than)
    max_chars = _MAX_TITLE // (1 + len(compared) if compared else len(texts))
    if contrast is None:
        return " / ".join(_shorten(text, max_chars) for text in texts)
    first, to, rather_than = (_shorten(text, max_chars) for text in (texts[0], *compared))
    return f"{first} / {to} rather than {rather_than}"


def _shorten(text: str, max_chars: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[: max_chars - 1].rstrip() + "…"


def _viewed_text(result: TextResult, label: str) -> ViewedText:
    return ViewedText(
        label=label,
        tokens=viewed_tokens(result.tokens, {"text": result.text, "prompt": result.prompt}),
        maps=result.maps,
        scores=[_scores(scores, result.target) for scores in result.scores],
        head_contributions=result.head_contributions,
        tokens_total=result.tokens_total,
    )


def _scores(scores: MethodScores, target: str) -> Scores:
    has_gaps = not np.isfinite(scores.values).all()
    is_ranking = scores.method in _RANKING_ONLY
    sentences = [_DESCRIPTIONS.get(scores.method, "")]
    sentences += ["Ranking only: the scores do not add up to the target."] if is_ranking else []
    sentences += _baseline_share(scores)
    sentences += [_MISSING_SCORES] if has_gaps else []
    if scores.faithfulness is not None:
        sentences += [_MEASURED, _LOW_WARNING] if scores.faithfulness < _LOW_FAITHFULNESS else [_MEASURED]
    return Scores(
        method=scores.method,
        target=target,
        values=np.nan_to_num(scores.values),
        baseline=scores.baseline,
        sum=None if is_ranking else scores.sum,
        expected_sum=None if is_ranking else scores.expected_sum,
        rho=scores.faithfulness,
        description=" ".join(sentences),
    )


def _baseline_share(scores: MethodScores) -> list[str]:
    """Return a sentence on the baseline's share of the target, or nothing if the target is close to 0."""
    if not scores.baseline or not scores.expected_sum or abs(scores.baseline) > 10 * abs(scores.expected_sum):
        return []
    share = 100 * scores.baseline / scores.expected_sum
    return [f"The baseline, which belongs to no token, is {share:.0f} % of the target."]


def _pair(matrix: PairResult) -> PairMatrix:
    name, description = _MATRICES.get(matrix.kind, (matrix.kind, ""))
    has_gaps = not np.isfinite(matrix.values).all()
    return PairMatrix(
        name=name,
        values=np.nan_to_num(matrix.values),
        baseline_row=matrix.baseline_row,
        baseline_column=matrix.baseline_column,
        baseline=matrix.baseline or 0.0,
        similarity=None if matrix.kind == "interaction" else matrix.similarity,
        description=f"{description} {_MISSING_SCORES}" if has_gaps else description,
    )
