"""Scores heads on how well the strongest attention of a pronoun predicts its antecedent.

Follows the coreference test of Clark et al. 2019, section 4.3 (https://arxiv.org/abs/1906.04341), with other
sentences (`probes`). The prediction for a pronoun is the other word that it attends to most, excluding
special tokens. As for syntax, the best head for each kind of sentence is selected on one half of the
sentences and scored on the other half. All sentences of a frame are in the same half. The baselines are the
best fixed distance, selected in the same way, and the nearest noun.

Shapes: N heads, I items, W words of a sentence.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.intervals import wilson_interval
from attnlens_analysis.heads.maps import Head, MapSource, Progress
from attnlens_analysis.heads.probes import PronounItem, pronoun_items
from attnlens_analysis.heads.syntax import strongest_word
from attnlens_analysis.heads.words import word_level, words_of_tokens

ALL_KINDS = "all"


@dataclass(frozen=True, slots=True)
class PronounScore:
    """Accuracy of the best head for pronouns of one kind.

    Attributes:
        kind: What identifies the antecedent (`PronounItem.kind`), or "all".
        head: Best head on the selection half.
        num_chosen: Number of pronouns in the selection half.
        chosen: Accuracy on the selection half, between 0 and 1.
        num_scored: Number of pronouns in the scoring half.
        scored: Accuracy on the scoring half.
        interval: 95 % Wilson interval of `scored`, assuming independent sentences.
        offset: Best fixed distance from a pronoun to its antecedent. -1 is the previous word.
        offset_scored: Accuracy of the fixed distance on the scoring half.
        nearest_scored: Accuracy of the nearest noun, among antecedent and distractors, on the scoring half.
    """

    kind: str
    head: Head
    num_chosen: int
    chosen: float
    num_scored: int
    scored: float
    interval: tuple[float, float]
    offset: int
    offset_scored: float
    nearest_scored: float


@dataclass(frozen=True, slots=True)
class Coreference:
    """Results of the coreference test.

    Attributes:
        scores: Scores for all pronouns, then for each kind.
        accuracy: (N,) accuracy of each head on the pronouns of both halves.
    """

    scores: tuple[PronounScore, ...]
    accuracy: npt.NDArray[np.float64]


def measure_coreference(source: MapSource, progress: Progress) -> Coreference | None:
    """Run the test on the included sentences. Return None if a half has no sentence the model can process."""
    items = pronoun_items()
    encoded = source.encode([" ".join(item.words) for item in items])
    kept = [(item, text) for item, text in zip(items, encoded, strict=True) if text is not None]
    hits: dict[int, npt.NDArray[np.bool_]] = {}  # by index in `kept`
    for done, (index, maps) in enumerate(source.of_texts([text for _, text in kept]), start=1):
        item = kept[index][0]
        token_words = words_of_tokens(item.words, maps.tokens.chars)
        if {item.pronoun, item.antecedent, *item.distractors} <= set(token_words.tolist()):
            weights = word_level(maps.weights, token_words, len(item.words))
            hits[index] = strongest_word(weights)[:, item.pronoun] == item.antecedent
        progress("pronouns", done, len(kept))
    measured = sorted(hits)
    return score_pronouns(
        source.heads,
        [kept[index][0] for index in measured],
        np.array([hits[index] for index in measured]).reshape(-1, len(source.heads)),
    )


def score_pronouns(
    heads: Sequence[Head], items: Sequence[PronounItem], hits: npt.NDArray[np.bool_]
) -> Coreference | None:
    """Select the best head for each kind on the items of odd groups, and score it on those of even groups.

    Args:
        heads: The N heads.
        items: The I items.
        hits: (I, N) whether the strongest attention of the pronoun is on the antecedent.

    Returns:
        Scores of the kinds that occur in both halves, or None if there is no such kind.
    """
    scores = []
    for kind in (ALL_KINDS, *dict.fromkeys(item.kind for item in items)):
        selected = [index for index, item in enumerate(items) if kind in {item.kind, ALL_KINDS}]
        chosen = [index for index in selected if items[index].group % 2]
        scored = [index for index in selected if not items[index].group % 2]
        if chosen and scored:
            best = int(hits[chosen].mean(axis=0).argmax())
            halves = [(items[index], bool(hits[index, best])) for index in (*chosen, *scored)]
            scores.append(_score(kind, heads[best], halves[: len(chosen)], halves[len(chosen) :]))
    return Coreference(tuple(scores), hits.mean(axis=0)) if scores else None


def nearest_noun(item: PronounItem) -> int:
    """Return the index of the noun nearest to the pronoun, the earlier one if two are equally near."""
    return min(sorted((item.antecedent, *item.distractors)), key=lambda index: abs(index - item.pronoun))


def _score(
    kind: str,
    head: Head,
    chosen: Sequence[tuple[PronounItem, bool]],
    scored: Sequence[tuple[PronounItem, bool]],
) -> PronounScore:
    """Return the score of a head, given the items of both halves and whether the head is correct."""
    offsets = Counter(item.antecedent - item.pronoun for item, _ in chosen)
    offset = min(offsets.items(), key=lambda pair: (-pair[1], abs(pair[0]), pair[0]))[0]
    number, num_correct = len(scored), sum(is_correct for _, is_correct in scored)
    return PronounScore(
        kind,
        head,
        len(chosen),
        sum(is_correct for _, is_correct in chosen) / len(chosen),
        number,
        num_correct / number,
        wilson_interval(num_correct, number),
        offset,
        sum(item.antecedent - item.pronoun == offset for item, _ in scored) / number,
        sum(nearest_noun(item) == item.antecedent for item, _ in scored) / number,
    )
