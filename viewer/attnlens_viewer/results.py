"""From what a server says of a text, or of two, to a page.

Whoever asks the server fills in `ReadText`; here the page gets its words: what scores add up to, what a
method does not say, and why something is missing.

Letters: T tokens, L layers, H heads, n and m tokens of a first and a second text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from attnlens_viewer.page import Array, Contrast, Page, PairMatrix, Scores, ViewedText
from attnlens_viewer.tokens import PlacedToken, viewed_tokens

OWN_VECTOR = "for the text's own vector"
OTHER_TEXT = "the cosine with the other text"
DIFFERENCE = "the difference of the two cosines"

_MAX_TITLE = 90
_LABELS = ("First text", "Second text")
_DESCRIPTIONS = {
    "contributions": "Exact sums, with the attention weights held as they are.",
    "output_share": "About the last layer's vectors, each of which holds the whole text already.",
    "leave_one_out": "Measures one token at a time: what two do together is not in it.",
    "rollout": "Made of attention weights alone, it knows nothing of the target.",
    "received_attention": "Made of attention weights alone, it knows nothing of the target.",
    "contribution_norm": "How much of the vector a token contributes, independent of the target.",
}
_RANKING_ONLY = ("rollout", "received_attention", "contribution_norm")
_MEASURED = "Measured on other texts, when the model was exported."
_LOW = 0.7
_CAUTION = "That is low: these scores are a weak guide to which words matter."
_NO_NUMBER = "Tokens without a number count as 0."
_MATRICES = {
    "output": ("Output vectors", "How alike the vectors of the last layer are; all of it is the cosine."),
    "input": (
        "Input tokens",
        "What the input tokens and biases of both texts gave to the cosine; all of it is the cosine.",
    ),
    "interaction": (
        "Interaction",
        "What the cosine loses without both tokens beyond what it loses without each.",
    ),
}


class MethodScores(Protocol):
    """The scores of one method for one text, for instance `attnlens_client.TokenScores`."""

    @property
    def method(self) -> str:
        """Its name, for instance `contributions`."""

    @property
    def values(self) -> Array:
        """(T,); NaN where there is no number."""

    @property
    def baseline(self) -> float | None:
        """What belongs to no token. None: the method has none."""

    @property
    def sum(self) -> float:
        """The values that are numbers and the baseline together."""

    @property
    def expected_sum(self) -> float | None:
        """What `sum` must be. None: it need not be anything."""

    @property
    def faithfulness(self) -> float | None:
        """Spearman's correlation with leaving tokens out, from the export. None: not measured."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReadText:
    """A text, and what a server says of it.

    Attributes:
        text: as it was given.
        prompt: what was put before it.
        tokens: T of them.
        maps: (L, H, T, T), or one (H, T, T) for each layer; weights, or bytes as `square_root_bytes` makes.
        tokens_total: the tokens before truncation. None: it was not cut.
        scores: of its tokens; empty: none were asked for.
        target: what they are about: OWN_VECTOR, OTHER_TEXT or words of your own.
        head_contributions: (L, H). None: not known.
    """

    text: str
    prompt: str = ""
    tokens: Sequence[PlacedToken]
    maps: Array | Sequence[Array]
    tokens_total: int | None = None
    scores: Sequence[MethodScores] = ()
    target: str = OWN_VECTOR
    head_contributions: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReadMatrix:
    """What each pair of tokens did.

    Attributes:
        kind: `output`, `input` or `interaction`.
        values: (n, m).
        similarity: of the two texts.
        baseline_row: (m,), of `input`: the first text's biases with the second one's tokens.
        baseline_column: (n,), the same the other way round.
        baseline: the biases of both.
    """

    kind: str
    values: Array
    similarity: float
    baseline_row: Array | None = None
    baseline_column: Array | None = None
    baseline: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReadContrast:
    """What the first text's tokens did for being nearer to one text than to another one."""

    to: str
    rather_than: str
    scores: MethodScores


def page_of(
    model: str,
    texts: Sequence[ReadText],
    *,
    matrix: ReadMatrix | None = None,
    contrast: ReadContrast | None = None,
    notes: Sequence[str] = (),
) -> Page:
    """Return the page of one text, or of two that are compared.

    Args:
        model: its name.
        texts: one or two.
        matrix: between the two.
        contrast: of the first.
        notes: why something is missing, for instance.

    Raises:
        ValueError: a text has no tokens, or too many for a page; something does not fit the rest.
    """
    labels = ("Text",) if len(texts) == 1 else _LABELS
    return Page(
        title=title_of([each.text for each in texts], contrast),
        model=model,
        texts=[_viewed(each, label) for each, label in zip(texts, labels, strict=True)],
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


def target_of(to: str | None, rather_than: str | None = None) -> str:
    """Return what the scores of a single text add up to, in words."""
    if to is None:
        return OWN_VECTOR
    if rather_than is None:
        return f"the cosine with {_quoted(to)}"
    return f"the cosine with {_quoted(to)} less that with {_quoted(rather_than)}"


def _quoted(text: str) -> str:
    return f"\N{LEFT DOUBLE QUOTATION MARK}{text}\N{RIGHT DOUBLE QUOTATION MARK}"


def title_of(texts: Sequence[str], contrast: ReadContrast | None = None) -> str:
    """Return the beginning of each text: "A", "A / B", or "A / B rather than C" for a contrast."""
    compared = () if contrast is None else (contrast.to, contrast.rather_than)
    room = _MAX_TITLE // (1 + len(compared) if compared else len(texts))
    if contrast is None:
        return " / ".join(_beginning(text, room) for text in texts)
    first, to, rather_than = (_beginning(text, room) for text in (texts[0], *compared))
    return f"{first} / {to} rather than {rather_than}"


def _beginning(text: str, room: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= room else line[: room - 1].rstrip() + "…"


def _viewed(read: ReadText, label: str) -> ViewedText:
    return ViewedText(
        label=label,
        tokens=viewed_tokens(read.tokens, {"text": read.text, "prompt": read.prompt}),
        maps=read.maps,
        scores=[_scores(scores, read.target) for scores in read.scores],
        head_contributions=read.head_contributions,
        tokens_total=read.tokens_total,
    )


def _scores(found: MethodScores, target: str) -> Scores:
    has_gaps = not np.isfinite(found.values).all()
    is_ranking = found.method in _RANKING_ONLY
    said = [_DESCRIPTIONS.get(found.method, "")]
    said += ["Ranking only: the scores do not add up to the target."] if is_ranking else []
    said += _baseline_share(found)
    said += [_NO_NUMBER] if has_gaps else []
    if found.faithfulness is not None:
        said += [_MEASURED, _CAUTION] if found.faithfulness < _LOW else [_MEASURED]
    return Scores(
        method=found.method,
        target=target,
        values=np.nan_to_num(found.values),
        baseline=found.baseline,
        sum=None if is_ranking else found.sum,
        expected_sum=None if is_ranking else found.expected_sum,
        rho=found.faithfulness,
        description=" ".join(said),
    )


def _baseline_share(found: MethodScores) -> list[str]:
    """Return a sentence about the baseline's share of the target, unless the target is close to 0."""
    if not found.baseline or not found.expected_sum or abs(found.baseline) > 10 * abs(found.expected_sum):
        return []
    share = 100 * found.baseline / found.expected_sum
    return [f"The baseline, which belongs to no token, is {share:.0f} % of the target."]


def _pair(matrix: ReadMatrix) -> PairMatrix:
    name, description = _MATRICES.get(matrix.kind, (matrix.kind, ""))
    has_gaps = not np.isfinite(matrix.values).all()
    return PairMatrix(
        name=name,
        values=np.nan_to_num(matrix.values),
        baseline_row=matrix.baseline_row,
        baseline_column=matrix.baseline_column,
        baseline=matrix.baseline or 0.0,
        similarity=None if matrix.kind == "interaction" else matrix.similarity,
        description=f"{description} {_NO_NUMBER}" if has_gaps else description,
    )
