"""Labels heads by explicit rules, which are printed with the labels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.copies import CopyTest
from attnlens_analysis.heads.coreference import ALL_KINDS, Coreference, PronounScore
from attnlens_analysis.heads.distances import LONG_RANGE_DIVISOR, MAX_LOCAL_DISTANCE, Distances
from attnlens_analysis.heads.maps import Head
from attnlens_analysis.heads.patterns import Patterns
from attnlens_analysis.heads.relatedness import Relatedness
from attnlens_analysis.heads.syntax import RelationScore

POSITION_THRESHOLD = 0.5
COPY_THRESHOLD = 0.2
DUPLICATE_FACTOR = 2
MIN_WORDS = 100
MIN_MARGIN = 0.10
MIN_PRONOUNS = 25
MIN_CONTENT = 0.5
LOCAL_FACTOR = 2
LONG_RANGE_FACTOR = 1.2
MIN_SYNONYM_DIFFERENCE = 0.02

RULES = {
    "previous-token": f"mean weight on the previous token > {POSITION_THRESHOLD}",
    "next-token": f"mean weight on the next token > {POSITION_THRESHOLD}",
    "first-token": f"mean weight on the first token > {POSITION_THRESHOLD}",
    "last-token": f"mean weight on the last token > {POSITION_THRESHOLD}",
    "self": f"mean weight on the token itself > {POSITION_THRESHOLD}",
    "duplicate-token": f"weight on other occurrences > {DUPLICATE_FACTOR} x chance, and on the earlier "
    f"occurrence of a random token > {COPY_THRESHOLD}",
    "induction": f"weight on the token after the earlier occurrence of a random token > {COPY_THRESHOLD}",
    "syntax:RELATION": f"best head for the relation; scored on at least {MIN_WORDS} words; more than "
    f"{100 * MIN_MARGIN:.0f} points above the best fixed distance, which is below the 95 % interval",
    "local": f"mean weight on tokens that are not special > {MIN_CONTENT}; share of it within "
    f"{MAX_LOCAL_DISTANCE} tokens > {LOCAL_FACTOR} x uniform attention (lower end of the 95 % interval)",
    "long-range": f"mean weight on tokens that are not special > {MIN_CONTENT}; share of it farther than "
    f"1/{LONG_RANGE_DIVISOR} of the text > {LONG_RANGE_FACTOR} x uniform attention (lower end of the 95 % "
    "interval)",
    "coreference:KIND": "best head for pronouns whose antecedent is identified by KIND; scored on at least "
    f"{MIN_PRONOUNS} pronouns; more than {100 * MIN_MARGIN:.0f} points above the best fixed distance and the "
    "nearest noun, which are below the 95 % interval",
    "semantic": "weight on a synonym minus weight on an unrelated word in the same position > "
    f"{MIN_SYNONYM_DIFFERENCE} (lower end of the 95 % interval)",
}

CAVEATS = (
    (
        "A label describes where a head attends, not how the model uses it. A large weight on a value close "
        "to zero has no effect: see ablation and contribution."
    ),
    "first-token is often a no-op: heads attend to the first token when they find nothing relevant.",
    (
        "Untrained heads get no label. Their attention is spread out, with an entropy / ln T close to 1, so "
        "a large entropy is no sign of a learned behavior."
    ),
    (
        "syntax:RELATION means that the strongest attention matches the relation more often than a fixed "
        "distance in these texts. It does not imply that the model parses, or that no other head does it."
    ),
    (
        "coreference:KIND means that the strongest attention matches antecedents more often than distance "
        "does. For gender and number, it is sufficient that the head attends to a noun that agrees with the "
        "pronoun. Only the kind meaning requires more."
    ),
    "semantic means more attention to a synonym, which similar word embeddings can cause.",
    (
        "The intervals of local, long-range and semantic apply to each head separately. With many heads, "
        "some intervals do not contain the true value."
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
    distances: Distances | None = None,
    coreference: Coreference | None = None,
    relatedness: Relatedness | None = None,
) -> tuple[LabeledHead, ...]:
    """Apply `RULES` and return the heads with at least one label."""
    labels: dict[Head, list[str]] = {}
    values = (*_by_value(patterns, copies), *_by_interval(distances, relatedness))
    for label, matches in values:
        for index in np.flatnonzero(matches):
            labels.setdefault(heads[int(index)], []).append(label)
    for score in syntax:
        if is_winner(score):
            labels.setdefault(score.head, []).append(f"syntax:{score.relation}")
    for pronouns in coreference.scores if coreference is not None else ():
        if is_coreference(pronouns):
            labels.setdefault(pronouns.head, []).append(f"coreference:{pronouns.kind}")
    return tuple(LabeledHead(head, tuple(labels[head])) for head in sorted(labels))


def is_winner(score: RelationScore) -> bool:
    """Return whether the best head for a relation satisfies the rule `syntax:RELATION`."""
    return (
        score.num_scored >= MIN_WORDS
        and score.scored - score.offset_scored > MIN_MARGIN
        and score.interval[0] > score.offset_scored
    )


def is_coreference(score: PronounScore) -> bool:
    """Return whether the best head for a kind of pronouns satisfies the rule `coreference:KIND`."""
    baseline = max(score.offset_scored, score.nearest_scored)
    return (
        score.kind != ALL_KINDS
        and score.num_scored >= MIN_PRONOUNS
        and score.scored - baseline > MIN_MARGIN
        and score.interval[0] > baseline
    )


def _by_interval(
    distances: Distances | None, relatedness: Relatedness | None
) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    if distances is not None:
        attends = distances.content > MIN_CONTENT
        yield "local", attends & (distances.local.interval[0] > LOCAL_FACTOR)
        yield "long-range", attends & (distances.long_range.interval[0] > LONG_RANGE_FACTOR)
    if relatedness is not None:
        yield "semantic", relatedness.synonym.interval[0] > MIN_SYNONYM_DIFFERENCE


def _by_value(patterns: Patterns, copies: CopyTest | None) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    yield "previous-token", patterns.previous > POSITION_THRESHOLD
    yield "next-token", patterns.next > POSITION_THRESHOLD
    yield "first-token", patterns.first > POSITION_THRESHOLD
    yield "last-token", patterns.last > POSITION_THRESHOLD
    yield "self", patterns.self > POSITION_THRESHOLD
    if copies is not None:
        is_frequent = patterns.duplicate > DUPLICATE_FACTOR * patterns.duplicate_chance
        yield "duplicate-token", is_frequent & (copies.earlier_copy > COPY_THRESHOLD)
        yield "induction", copies.induction > COPY_THRESHOLD
