"""Labels heads by explicit rules, which are printed with the labels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.copies import CopyTest
from attnlens_analysis.heads.maps import Head
from attnlens_analysis.heads.patterns import Patterns
from attnlens_analysis.heads.syntax import RelationScore

POSITION_THRESHOLD = 0.5
BROAD_THRESHOLD = 0.9
COPY_THRESHOLD = 0.2
DUPLICATE_FACTOR = 2
MIN_WORDS = 100
MIN_MARGIN = 0.10

RULES = {
    "previous-token": f"mean weight on the previous token > {POSITION_THRESHOLD}",
    "next-token": f"mean weight on the next token > {POSITION_THRESHOLD}",
    "first-token": f"mean weight on the first token > {POSITION_THRESHOLD}",
    "last-token": f"mean weight on the last token > {POSITION_THRESHOLD}",
    "self": f"mean weight on the token itself > {POSITION_THRESHOLD}",
    "broad": f"entropy / ln T > {BROAD_THRESHOLD}",
    "duplicate-token": f"weight on other occurrences > {DUPLICATE_FACTOR} x chance, and on the earlier "
    f"occurrence of a random token > {COPY_THRESHOLD}",
    "induction": f"weight on the token after the earlier occurrence of a random token > {COPY_THRESHOLD}",
    "syntax:RELATION": f"best head for the relation; scored on at least {MIN_WORDS} words; more than "
    f"{100 * MIN_MARGIN:.0f} points above the best fixed distance, which is below the 95 % interval",
}

CAVEATS = (
    (
        "A label describes where a head attends, not how the model uses it. A large weight on a value close "
        "to zero has no effect: see ablation and contribution."
    ),
    "first-token is often a no-op: heads attend to the first token when they find nothing relevant.",
    "broad means that attention is spread out. This also applies to untrained models.",
    (
        "syntax:RELATION means that the strongest attention matches the relation more often than a fixed "
        "distance in these texts. It does not imply that the model parses, or that no other head does it."
    ),
    "Labels apply to these texts and may differ for other languages, domains or lengths.",
)


@dataclass(frozen=True, slots=True)
class LabeledHead:
    """A head with at least one label."""

    head: Head
    labels: tuple[str, ...]


def label_heads(
    heads: Sequence[Head],
    patterns: Patterns,
    copies: CopyTest | None,
    syntax: Sequence[RelationScore],
) -> tuple[LabeledHead, ...]:
    """Apply `RULES` and return the heads with at least one label."""
    labels: dict[Head, list[str]] = {}
    for label, matches in _by_value(patterns, copies):
        for index in np.flatnonzero(matches):
            labels.setdefault(heads[int(index)], []).append(label)
    for score in syntax:
        if is_winner(score):
            labels.setdefault(score.head, []).append(f"syntax:{score.relation}")
    return tuple(LabeledHead(head, tuple(labels[head])) for head in sorted(labels))


def is_winner(score: RelationScore) -> bool:
    """Return whether the best head for a relation satisfies the rule `syntax:RELATION`."""
    return (
        score.num_scored >= MIN_WORDS
        and score.scored - score.offset_scored > MIN_MARGIN
        and score.interval[0] > score.offset_scored
    )


def _by_value(patterns: Patterns, copies: CopyTest | None) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    yield "previous-token", patterns.previous > POSITION_THRESHOLD
    yield "next-token", patterns.next > POSITION_THRESHOLD
    yield "first-token", patterns.first > POSITION_THRESHOLD
    yield "last-token", patterns.last > POSITION_THRESHOLD
    yield "self", patterns.self > POSITION_THRESHOLD
    yield "broad", patterns.entropy_normalized > BROAD_THRESHOLD
    if copies is not None:
        is_frequent = patterns.duplicate > DUPLICATE_FACTOR * patterns.duplicate_chance
        yield "duplicate-token", is_frequent & (copies.earlier_copy > COPY_THRESHOLD)
        yield "induction", copies.induction > COPY_THRESHOLD
