"""Heads whose strongest attention from word to word follows a dependency: Clark et al. 2019, section 4.2.

Each word points to the other word that it attends to most; the word itself and special tokens are left out. A
head is tried in both directions: dependents point to their heads (`to_head`), or heads to their dependents
(`to_dependent`). Half of the sentences chooses the best head and direction for a relation, the other half
scores it, since the best of many on the sentences that chose it would be too good. The baseline is the best
fixed distance, chosen the same way. Relations `punct` and `root` are not scored.

Letters: N heads, W words of a sentence, A relations (arcs) of a sentence.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.maps import Head
from attnlens_analysis.heads.treebank import Word

Direction = Literal["to_head", "to_dependent"]
DIRECTIONS: tuple[Direction, Direction] = ("to_head", "to_dependent")
ALL_RELATIONS = "all"
_NOT_SCORED = frozenset({"punct", "root"})
_Z95 = 1.959964  # the normal distribution has 95 % of its mass within so many standard deviations


@dataclass(frozen=True, slots=True)
class RelationScore:
    """How well the best head finds a relation. Shares are from 0 to 1.

    Attributes:
        relation: as the treebank names it; "all": all of them.
        head: the best one on the half that chooses.
        direction: in which it was best.
        num_chosen: words with the relation in the half that chooses.
        chosen: share found there.
        num_scored: words with the relation in the half that scores; 0: the next four are NaN.
        scored: share found there.
        interval: 95 % interval of `scored` (Wilson), as if words were independent.
        offset: the best fixed distance from a dependent to its head; 1 is the next word.
        offset_scored: share that it finds in the half that scores.
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
    """Counts of one half of the sentences, by relation."""

    hits: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """(2, N): in each direction, how many words each head finds."""
    numbers: Counter[str] = field(default_factory=Counter)
    offsets: dict[str, Counter[int]] = field(default_factory=dict)

    def add(self, relation: str, hits: npt.NDArray[np.int64], offsets: Sequence[int]) -> None:
        self.hits[relation] = self.hits.get(relation, np.zeros_like(hits)) + hits
        self.numbers[relation] += len(offsets)
        self.offsets.setdefault(relation, Counter()).update(offsets)


class SyntaxCounts:
    """Counts what each head finds, sentence by sentence."""

    def __init__(self, heads: Sequence[Head]) -> None:
        """Count for these N heads."""
        self._heads = tuple(heads)
        self._halves = (_Half(), _Half())  # the one that chooses, the one that scores

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
            weights: between words, (N, W, W).
            words: W of them.
            has_tokens: (W,); relations of a word without tokens don't count.
            scores: whether the sentence is of the half that scores.
        """
        arcs = [
            (place, word.head, word.relation)
            for place, word in enumerate(words)
            if word.head is not None
            and word.relation.split(":")[0] not in _NOT_SCORED
            and has_tokens[place]
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
            chosen = relations == relation if relation != ALL_RELATIONS else np.ones(len(arcs), np.bool_)
            half.add(relation, hits[:, :, chosen].sum(axis=-1), (heads - dependents)[chosen].tolist())

    def scores(self) -> tuple[RelationScore, ...]:
        """Return the relations of the half that chooses, the most frequent ones first."""
        choosing, _ = self._halves
        return tuple(self._score(relation) for relation, _ in choosing.numbers.most_common())

    def _score(self, relation: str) -> RelationScore:
        choosing, scoring = self._halves
        hits = choosing.hits[relation]
        direction, head = np.unravel_index(int(hits.argmax()), hits.shape)
        number, num_scored = choosing.numbers[relation], scoring.numbers[relation]
        offset = min(choosing.offsets[relation].items(), key=lambda item: (-item[1], abs(item[0]), item[0]))[
            0
        ]
        found = int(scoring.hits[relation][direction, head]) if num_scored else 0
        return RelationScore(
            relation,
            self._heads[int(head)],
            DIRECTIONS[int(direction)],
            number,
            float(hits[direction, head]) / number,
            num_scored,
            found / num_scored if num_scored else math.nan,
            wilson_interval(found, num_scored),
            offset,
            scoring.offsets[relation][offset] / num_scored if num_scored else math.nan,
        )


def strongest_word(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
    """Return the other word that each word attends to most, (N, W), of weights (N, W, W)."""
    num_words = weights.shape[-1]
    others = np.where(np.eye(num_words, dtype=np.bool_), np.float32(-1), weights)
    result: npt.NDArray[np.intp] = others.argmax(axis=-1)
    return result


def wilson_interval(found: int, number: int) -> tuple[float, float]:
    """Return the 95 % interval of a share `found / number` (Wilson 1927); NaN where `number` is 0."""
    if not number:
        return math.nan, math.nan
    share, z2 = found / number, _Z95**2
    middle = share + z2 / (2 * number)
    spread = _Z95 * math.sqrt(share * (1 - share) / number + z2 / (4 * number**2))
    return (middle - spread) / (1 + z2 / number), (middle + spread) / (1 + z2 / number)
