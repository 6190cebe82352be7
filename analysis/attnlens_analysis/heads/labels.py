"""Labels of heads, each by a rule that is printed with it. What no rule fits has no label."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.copies import CopyTest
from attnlens_analysis.heads.maps import Head
from attnlens_analysis.heads.patterns import Patterns
from attnlens_analysis.heads.syntax import RelationScore

PLACE_THRESHOLD = 0.5
BROAD_THRESHOLD = 0.9
COPY_THRESHOLD = 0.2
DUPLICATE_FACTOR = 2
MIN_WORDS = 100
MIN_MARGIN = 0.10

RULES = {
    "previous-token": f"mean weight on the previous token > {PLACE_THRESHOLD}",
    "next-token": f"mean weight on the next token > {PLACE_THRESHOLD}",
    "first-token": f"mean weight on the first token > {PLACE_THRESHOLD}",
    "last-token": f"mean weight on the last token > {PLACE_THRESHOLD}",
    "self": f"mean weight on the token itself > {PLACE_THRESHOLD}",
    "broad": f"entropy / ln T > {BROAD_THRESHOLD}",
    "duplicate-token": f"weight on other copies > {DUPLICATE_FACTOR} x chance, and on the earlier copy of a "
    f"random token > {COPY_THRESHOLD}",
    "induction": f"weight on the token after the earlier copy of a random token > {COPY_THRESHOLD}",
    "syntax:RELATION": f"best head for the relation; scored on at least {MIN_WORDS} words; more than "
    f"{100 * MIN_MARGIN:.0f} points above the best fixed distance, which is below the 95 % interval",
}

CAVEATS = (
    (
        "A label says where attention goes, not what the model does with it. A large weight on a vector near "
        "zero moves nothing: see ablation and contribution."
    ),
    "first-token is often a resting place: the head attends there where it has nothing to do.",
    "broad says that attention is spread. So is that of a model that was never trained.",
    (
        "syntax:RELATION says that in these texts the strongest attention follows the relation more often "
        "than a fixed distance does. It does not say that the model parses, nor that no other head does it."
    ),
    "Labels hold for these texts. Other languages, kinds of text or lengths may give others.",
)


@dataclass(frozen=True, slots=True)
class Labelled:
    """A head and its labels, at least one."""

    head: Head
    labels: tuple[str, ...]


def label_heads(
    heads: Sequence[Head],
    patterns: Patterns,
    copies: CopyTest | None,
    syntax: Sequence[RelationScore],
) -> tuple[Labelled, ...]:
    """Apply `RULES`; heads without a label are left out."""
    found: dict[Head, list[str]] = {}
    for label, fits in _by_value(patterns, copies):
        for index in np.flatnonzero(fits):
            found.setdefault(heads[int(index)], []).append(label)
    for score in syntax:
        if is_winner(score):
            found.setdefault(score.head, []).append(f"syntax:{score.relation}")
    return tuple(Labelled(head, tuple(found[head])) for head in sorted(found))


def is_winner(score: RelationScore) -> bool:
    """Tell whether the best head for a relation is one for it, by the rule `syntax:RELATION`."""
    return (
        score.num_scored >= MIN_WORDS
        and score.scored - score.offset_scored > MIN_MARGIN
        and score.interval[0] > score.offset_scored
    )


def _by_value(patterns: Patterns, copies: CopyTest | None) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    yield "previous-token", patterns.previous > PLACE_THRESHOLD
    yield "next-token", patterns.next > PLACE_THRESHOLD
    yield "first-token", patterns.first > PLACE_THRESHOLD
    yield "last-token", patterns.last > PLACE_THRESHOLD
    yield "self", patterns.self > PLACE_THRESHOLD
    yield "broad", patterns.entropy_normalised > BROAD_THRESHOLD
    if copies is not None:
        is_more = patterns.duplicate > DUPLICATE_FACTOR * patterns.duplicate_chance
        yield "duplicate-token", is_more & (copies.earlier_copy > COPY_THRESHOLD)
        yield "induction", copies.induction > COPY_THRESHOLD
