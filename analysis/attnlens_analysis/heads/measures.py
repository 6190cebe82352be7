"""Per-head results of a report as table columns with title, description and baseline.

Shape legend: N heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.distances import LONG_RANGE_DIVISOR, MAX_LOCAL_DISTANCE
from attnlens_analysis.heads.report import HeadReport


@dataclass(frozen=True, slots=True)
class Measure:
    """A column of the per-head results.

    Attributes:
        name: JSON field name.
        title: Column title.
        meaning: Short description.
        values: (N,) value of each head, NaN if not measured.
        baseline: Value for uniform attention, if defined.
        digits: Number of decimal places.
        is_share: Whether the values are shares of attention or of rows, or differences of these.
    """

    name: str
    title: str
    meaning: str
    values: npt.NDArray[np.float64]
    baseline: float | None = None
    digits: int = 3
    is_share: bool = True


def measures(report: HeadReport) -> tuple[Measure, ...]:
    """Return the columns of all measurements in the report."""
    return tuple(_columns(report))


def _columns(report: HeadReport) -> Iterator[Measure]:
    patterns = report.patterns
    duplicate, punctuation = patterns.duplicate_chance, patterns.punctuation_share
    yield Measure("previous", "previous", "mean weight on the previous token", patterns.previous)
    yield Measure("next", "next", "mean weight on the next token", patterns.next)
    yield Measure("first", "first", "mean weight on the first token", patterns.first)
    yield Measure("last", "last", "mean weight on the last token", patterns.last)
    yield Measure("self", "self", "mean weight on the token itself", patterns.self, patterns.diagonal_chance)
    meaning = "mean weight on punctuation"
    yield Measure("punctuation", "punctuation", meaning, patterns.punctuation, punctuation)
    yield Measure(
        "duplicate",
        "duplicate",
        "mean weight on other occurrences of the token",
        patterns.duplicate,
        duplicate,
    )
    if report.copies is not None:
        copies, chance = report.copies, report.copies.chance
        yield Measure(
            "earlier_copy",
            "earlier copy",
            "weight on the earlier occurrence of a random token",
            copies.earlier_copy,
            chance,
        )
        yield Measure(
            "induction",
            "induction",
            "weight on the token after the earlier occurrence of a random token",
            copies.induction,
            chance,
        )
    yield Measure(
        "entropy", "entropy", "mean entropy of the rows, in nats", patterns.entropy, digits=2, is_share=False
    )
    yield Measure(
        "entropy_normalized",
        "entropy / ln T",
        "mean entropy of the rows divided by ln T",
        patterns.entropy_normalized,
        1.0,
    )
    yield Measure(
        "distance",
        "distance",
        "mean distance to the attended tokens, in tokens",
        patterns.distance,
        digits=1,
        is_share=False,
    )
    yield Measure(
        "diagonal_argmax",
        "diagonal",
        "share of rows whose largest weight is on the token itself",
        patterns.diagonal_argmax,
        patterns.diagonal_chance,
    )
    yield from _test_columns(report)
    yield from _optional_columns(report)


def _test_columns(report: HeadReport) -> Iterator[Measure]:
    if report.distances is not None:
        distances = report.distances
        local, distant = distances.local, distances.long_range
        meaning = "mean weight on tokens that are not special"
        yield Measure("content", "content", meaning, distances.content, distances.content_uniform)
        meaning = f"share of attention within {MAX_LOCAL_DISTANCE} tokens, without special tokens"
        yield Measure("local", "local", meaning, local.share, local.uniform)
        meaning = (
            f"share of attention farther than 1/{LONG_RANGE_DIVISOR} of the text, without special tokens"
        )
        yield Measure("long_range", "long-range", meaning, distant.share, distant.uniform)
    if report.coreference is not None:
        meaning = "share of pronouns whose strongest attention is on the antecedent"
        yield Measure("coreference", "coreference", meaning, report.coreference.accuracy)
    if report.relatedness is not None:
        related = report.relatedness
        meaning = "weight on an earlier occurrence of the word minus weight on an unrelated word"
        yield Measure("same_word", "same word", meaning, related.same_word.difference, 0.0)
        meaning = "weight on an earlier synonym minus weight on an unrelated word"
        yield Measure("synonym", "synonym", meaning, related.synonym.difference, 0.0)


def _optional_columns(report: HeadReport) -> Iterator[Measure]:
    if report.tied is not None:
        tied = report.tied
        meaning = "diagonal share with query weights replaced by key weights"
        yield Measure("diagonal_argmax_tied", "diagonal, tied", meaning, tied.tied, tied.chance)
    if report.importance is not None:
        importance = report.importance
        yield Measure(
            "ablation",
            "ablation",
            "1 - cosine similarity of the embeddings with and without the head",
            importance.ablation,
            digits=5,
            is_share=False,
        )
        yield Measure(
            "contribution",
            "contribution",
            "mean absolute contribution of the head to a text's similarity to itself",
            importance.contribution,
            digits=5,
            is_share=False,
        )
    if report.task is not None:
        meaning = "change in rank correlation with human scores when the head is removed"
        yield Measure("task_change", "task, removed", meaning, report.task.change, digits=4, is_share=False)
