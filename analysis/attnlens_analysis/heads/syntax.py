"""Scores heads on how well their strongest attention between words predicts dependency relations.

Follows Clark et al. 2019, section 4.2. The prediction for a word is the other word that it attends to most,
excluding special tokens. Each head is evaluated in both directions: from dependents to heads (`to_head`), and
from heads to dependents (`to_dependent`). The best head and direction for a relation are selected on one half
of the sentences and scored on the other half, to avoid selection bias. The baseline is the best fixed
distance, selected in the same way. The relations `punct` and `root` are not scored.

Shapes: N heads, W words of a sentence, A relations (arcs) of a sentence.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.intervals import wilson_interval
from attnlens_analysis.heads.maps import Head
from attnlens_analysis.heads.treebank import Word

Direction = Literal["to_head", "to_dependent"]
DIRECTIONS: tuple[Direction, Direction] = ("to_head", "to_dependent")
ALL_RELATIONS = "all"
_NOT_SCORED = frozenset({"punct", "root"})


@dataclass(frozen=True, slots=True)
class RelationScore:
    """Accuracy of the best head for a relation.

    Attributes:
        relation: Name of the relation, or "all".
        head: Best head on the selection half.
        direction: Best direction of the head.
        num_chosen: Number of words with the relation in the selection half.
        chosen: Accuracy on the selection half, between 0 and 1.
        num_scored: Number of words with the relation in the scoring half. If 0, the scores are NaN.
        scored: Accuracy on the scoring half.
        interval: 95 % Wilson interval of `scored`, assuming independent words.
        offset: Best fixed distance from a dependent to its head. 1 is the next word.
        offset_scored: Accuracy of the fixed distance on the scoring half.
    """

    relation: str
    head: Head
    direction: Direction
    num_chosen: int
    chosen: float
    num_scored: int
    scored: float
    interval: tuple[float, float]
    offset: int
    offset_scored: float


@dataclass(slots=True)
class _Half:
    """Counts by relation for one half of the sentences."""

    hits: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """(2, N) number of correct predictions in each direction."""
    numbers: Counter[str] = field(default_factory=Counter)
    offsets: dict[str, Counter[int]] = field(default_factory=dict)

    def add(self, relation: str, hits: npt.NDArray[np.int64], offsets: Sequence[int]) -> None:
        self.hits[relation] = self.hits.get(relation, np.zeros_like(hits)) + hits
        self.numbers[relation] += len(offsets)
        self.offsets.setdefault(relation, Counter()).update(offsets)


class SyntaxCounts:
    """Accumulates correct predictions of each head over sentences."""

    def __init__(self, heads: Sequence[Head]) -> None:
        """Initialize counts for N heads."""
        self._heads = tuple(heads)
        self._halves = (_Half(), _Half())  # selection half, scoring half

    def add(
        self,
        weights: npt.NDArray[np.float32],
        words: Sequence[Word],
        has_tokens: npt.NDArray[np.bool_],
        *,
        scores: bool,
    ) -> None:
        """Add a sentence.

        Args:
            weights: (N, W, W) weights between words.
            words: The W words.
            has_tokens: (W,) whether each word has tokens. Relations of words without tokens are ignored.
            scores: Whether the sentence belongs to the scoring half.
        """
        arcs = [
            (index, word.head, word.relation)
            for index, word in enumerate(words)
            if word.head is not None
            and word.relation.split(":")[0] not in _NOT_SCORED
            and has_tokens[index]
            and has_tokens[word.head]
        ]
        if not arcs:
            return
        dependents = np.array([dependent for dependent, _, _ in arcs])
        heads = np.array([head for _, head, _ in arcs])
        relations = np.array([relation for _, _, relation in arcs])
        strongest = strongest_word(weights)  # (N, W)
        hits = np.stack([strongest[:, dependents] == heads, strongest[:, heads] == dependents])  # (2, N, A)
        half = self._halves[scores]
        for relation in (ALL_RELATIONS, *np.unique(relations).tolist()):
            selected = relations == relation if relation != ALL_RELATIONS else np.ones(len(arcs), np.bool_)
            half.add(relation, hits[:, :, selected].sum(axis=-1), (heads - dependents)[selected].tolist())

    def scores(self) -> tuple[RelationScore, ...]:
        """Return the scores of all relations in the selection half, in descending order of frequency."""
        selection, _ = self._halves
        return tuple(self._score(relation) for relation, _ in selection.numbers.most_common())

    def _score(self, relation: str) -> RelationScore:
        selection, scoring = self._halves
        hits = selection.hits[relation]
        direction, head = np.unravel_index(int(hits.argmax()), hits.shape)
        number, num_scored = selection.numbers[relation], scoring.numbers[relation]
        offset = min(selection.offsets[relation].items(), key=lambda item: (-item[1], abs(item[0]), item[0]))[
            0
        ]
        num_correct = int(scoring.hits[relation][direction, head]) if num_scored else 0
        return RelationScore(
            relation,
            self._heads[int(head)],
            DIRECTIONS[int(direction)],
            number,
            float(hits[direction, head]) / number,
            num_scored,
            num_correct / num_scored if num_scored else math.nan,
            wilson_interval(num_correct, num_scored),
            offset,
            scoring.offsets[relation][offset] / num_scored if num_scored else math.nan,
        )


def strongest_word(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
    """Return the index of the other word that each word attends to most, (N, W), from weights (N, W, W)."""
    num_words = weights.shape[-1]
    others = np.where(np.eye(num_words, dtype=np.bool_), np.float32(-1), weights)
    result: npt.NDArray[np.intp] = others.argmax(axis=-1)
    return result
