"""Tables of the measurements with intervals, for all report formats.

Each table lists the best heads of a measurement. The values of all heads are in `measures`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.distances import LONG_RANGE_DIVISOR, MAX_LOCAL_DISTANCE, Distances
from attnlens_analysis.heads.labels import is_coreference
from attnlens_analysis.heads.relatedness import Comparison
from attnlens_analysis.heads.report import HeadReport

NUM_HEADS = 5
TEXT_HEADINGS = frozenset({"head", "pronouns", "range", "earlier word"})  # other columns are numeric


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a title, an explanation, column titles and rows."""

    title: str
    explanation: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def interval_tables(report: HeadReport) -> Iterator[Table]:
    """Yield the tables of pronouns, distances and related words that were measured."""
    if report.coreference is not None:
        yield Table(
            "Pronouns",
            "Best head for each kind of sentence: gender, number or only the meaning identifies the "
            "antecedent. The head is selected on one half of the sentences and scored on the other half.",
            ("pronouns", "head", "sentences", "found %", "95 %", "fixed %", "nearest %", "label"),
            tuple(
                (
                    score.kind,
                    str(score.head),
                    f"{score.num_scored:,}",
                    f"{100 * score.scored:.1f}",
                    f"{100 * score.interval[0]:.1f}-{100 * score.interval[1]:.1f}",
                    f"{100 * score.offset_scored:.1f} ({score.offset:+d})",
                    f"{100 * score.nearest_scored:.1f}",
                    "yes" if is_coreference(score) else "",
                )
                for score in report.coreference.scores
            ),
        )
    if report.distances is not None:
        distances = report.distances
        yield Table(
            "Near and distant tokens",
            f"Heads with the largest share of attention within {MAX_LOCAL_DISTANCE} tokens (local) and "
            f"farther than 1/{LONG_RANGE_DIVISOR} of the text (long-range), excluding special tokens.",
            ("range", "head", "content", "share", "uniform", "ratio", "95 %", "label"),
            tuple(_share_rows(report, distances, "local"))
            + tuple(_share_rows(report, distances, "long-range")),
        )
    if report.relatedness is not None:
        related = report.relatedness
        yield Table(
            "Related words",
            "Heads with the largest difference between the weight on an earlier related word and on an "
            "unrelated word in the same position.",
            ("earlier word", "head", "weight", "unrelated", "difference", "95 %", "label"),
            tuple(_comparison_rows(report, "same word", related.same_word))
            + tuple(_comparison_rows(report, "synonym", related.synonym)),
        )


def _share_rows(report: HeadReport, distances: Distances, label: str) -> Iterator[tuple[str, ...]]:
    share = distances.local if label == "local" else distances.long_range
    for index in _largest(share.ratio):
        yield (
            label,
            str(report.heads[index]),
            f"{distances.content[index]:.3f}",
            f"{share.share[index]:.3f}",
            f"{share.uniform:.3f}",
            f"{share.ratio[index]:.2f}",
            f"{share.interval[0, index]:.2f}-{share.interval[1, index]:.2f}",
            "yes" if label in report.labels_of(report.heads[index]) else "",
        )


def _comparison_rows(report: HeadReport, name: str, comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for index in _largest(comparison.difference):
        has_label = name == "synonym" and "semantic" in report.labels_of(report.heads[index])
        yield (
            name,
            str(report.heads[index]),
            f"{comparison.weight[index]:.3f}",
            f"{comparison.weight[index] - comparison.difference[index]:.3f}",
            f"{comparison.difference[index]:.3f}",
            f"{comparison.interval[0, index]:.3f} to {comparison.interval[1, index]:.3f}",
            "yes" if has_label else "",
        )


def _largest(values: npt.NDArray[np.float64]) -> list[int]:
    """Return the indices of the `NUM_HEADS` largest values, excluding NaN."""
    order = np.argsort(-values, kind="stable")  # NaN last
    return [int(index) for index in order[:NUM_HEADS] if not np.isnan(values[index])]
