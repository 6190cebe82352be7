"""What a report has of each head, as columns with a title, a meaning and a baseline. N heads."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.report import HeadReport


@dataclass(frozen=True, slots=True)
class Measure:
    """A column.

    Attributes:
        name: of the field in JSON.
        title: for a table.
        meaning: a phrase that follows the title and a colon.
        values: (N,); NaN: not measured.
        baseline: what attention to all tokens alike gives; None: there is no such number.
        digits: behind the point.
    """

    name: str
    title: str
    meaning: str
    values: npt.NDArray[np.float64]
    baseline: float | None = None
    digits: int = 3


def measures(report: HeadReport) -> tuple[Measure, ...]:
    """Return every column that was measured."""
    return tuple(_columns(report))


def _columns(report: HeadReport) -> Iterator[Measure]:
    found = report.patterns
    duplicate, marks = found.duplicate_chance, found.punctuation_share
    yield Measure("previous", "previous", "mean weight on the previous token", found.previous)
    yield Measure("next", "next", "mean weight on the next token", found.next)
    yield Measure("first", "first", "mean weight on the first token", found.first)
    yield Measure("last", "last", "mean weight on the last token", found.last)
    yield Measure("self", "self", "mean weight on the token itself", found.self, found.diagonal_chance)
    yield Measure("punctuation", "punctuation", "mean weight on punctuation", found.punctuation, marks)
    yield Measure(
        "duplicate", "duplicate", "mean weight on other copies of the token", found.duplicate, duplicate
    )
    if report.copies is not None:
        copies, chance = report.copies, report.copies.chance
        yield Measure(
            "earlier_copy",
            "earlier copy",
            "weight on the earlier copy of a random token",
            copies.earlier_copy,
            chance,
        )
        yield Measure(
            "induction",
            "induction",
            "weight on the token after the earlier copy of a random token",
            copies.induction,
            chance,
        )
    yield Measure("entropy", "entropy", "mean entropy of a row, in nats", found.entropy, digits=2)
    yield Measure(
        "entropy_normalised", "entropy / ln T", "the same, divided by ln T", found.entropy_normalised, 1.0
    )
    yield Measure(
        "distance", "distance", "mean number of tokens to what is attended to", found.distance, digits=1
    )
    yield Measure(
        "diagonal_argmax",
        "diagonal",
        "share of rows with the largest weight on the token itself",
        found.diagonal_argmax,
        found.diagonal_chance,
    )
    yield from _further(report)


def _further(report: HeadReport) -> Iterator[Measure]:
    if report.tied is not None:
        tied = report.tied
        meaning = "the same if queries had the weights of keys"
        yield Measure("diagonal_argmax_tied", "diagonal, tied", meaning, tied.tied, tied.chance)
    if report.importance is not None:
        importance = report.importance
        yield Measure(
            "ablation",
            "ablation",
            "1 - cosine between the embeddings with and without the head",
            importance.ablation,
            digits=5,
        )
        yield Measure(
            "contribution",
            "contribution",
            "mean size of what the head adds to a text's similarity with itself",
            importance.contribution,
            digits=5,
        )
    if report.task is not None:
        meaning = "change of the rank correlation with human scores if the head is off"
        yield Measure("task_change", "task without it", meaning, report.task.change, digits=4)
