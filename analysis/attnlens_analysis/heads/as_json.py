"""Converts a report to JSON types. docs/heads.md describes the fields. `schema` is the format version."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.coreference import PronounScore
from attnlens_analysis.heads.distances import Distances
from attnlens_analysis.heads.labels import CAVEATS, RULES, is_coreference, is_winner
from attnlens_analysis.heads.measures import measures
from attnlens_analysis.heads.relatedness import Relatedness
from attnlens_analysis.heads.report import HeadReport
from attnlens_analysis.heads.syntax import RelationScore

SCHEMA = 1


def as_json(report: HeadReport) -> dict[str, Any]:
    """Convert a report to JSON types. Missing values (NaN) become None."""
    return {
        "schema": SCHEMA,
        "model": report.model_name,
        "model_version": report.model_version,
        "data": {
            "name": report.corpus_name,
            "license": report.corpus_license,
            "sentences": report.num_sentences,
            "pattern_sentences": report.patterns.num_texts,
            "rows": report.patterns.num_rows,
            "duplicate_rows": report.patterns.num_duplicate_rows,
        },
        "heads": _heads(report),
        "syntax": None if report.syntax is None else [_relation(score) for score in report.syntax],
        "coreference": None
        if report.coreference is None
        else [_pronouns(score) for score in report.coreference.scores],
        "distances": None if report.distances is None else _distances(report, report.distances),
        "relatedness": None if report.relatedness is None else _relatedness(report, report.relatedness),
        "baselines": {
            "diagonal_chance": report.patterns.diagonal_chance,
            "duplicate_chance": report.patterns.duplicate_chance,
            "punctuation_share": report.patterns.punctuation_share,
            "copy_chance": report.copies.chance if report.copies else None,
        },
        "importance": None
        if report.importance is None
        else {"texts": report.importance.num_texts, "agreement": _number(report.importance.agreement)},
        "task": None
        if report.task is None
        else {"pairs": report.task.num_pairs, "spearman": _number(report.task.spearman)},
        "rules": RULES,
        "caveats": CAVEATS,
        "notes": report.notes,
    }


def _heads(report: HeadReport) -> list[dict[str, Any]]:
    columns = measures(report)
    return [
        {"layer": head.layer, "head": head.head, "labels": report.labels_of(head)}
        | {column.name: _number(float(column.values[index])) for column in columns}
        for index, head in enumerate(report.heads)
    ]


def _relation(score: RelationScore) -> dict[str, Any]:
    return {
        "relation": score.relation,
        "layer": score.head.layer,
        "head": score.head.head,
        "direction": score.direction,
        "num_chosen": score.num_chosen,
        "chosen": score.chosen,
        "num_scored": score.num_scored,
        "scored": _number(score.scored),
        "interval": [_number(bound) for bound in score.interval],
        "offset": score.offset,
        "offset_scored": _number(score.offset_scored),
        "labeled": is_winner(score),
    }


def _pronouns(score: PronounScore) -> dict[str, Any]:
    return {
        "kind": score.kind,
        "layer": score.head.layer,
        "head": score.head.head,
        "num_chosen": score.num_chosen,
        "chosen": score.chosen,
        "num_scored": score.num_scored,
        "scored": score.scored,
        "interval": score.interval,
        "offset": score.offset,
        "offset_scored": score.offset_scored,
        "nearest_scored": score.nearest_scored,
        "labeled": is_coreference(score),
    }


def _distances(report: HeadReport, distances: Distances) -> dict[str, Any]:
    local, long_range = distances.local, distances.long_range
    return {
        "texts": distances.num_texts,
        "rows": distances.num_rows,
        "local_uniform": local.uniform,
        "long_range_uniform": long_range.uniform,
        "heads": [
            {
                "layer": head.layer,
                "head": head.head,
                "local_ratio": _number(float(local.ratio[index])),
                "local_interval": _interval(local.interval, index),
                "long_range_ratio": _number(float(long_range.ratio[index])),
                "long_range_interval": _interval(long_range.interval, index),
            }
            for index, head in enumerate(report.heads)
        ],
    }


def _relatedness(report: HeadReport, related: Relatedness) -> dict[str, Any]:
    return {
        "items": related.num_items,
        "heads": [
            {
                "layer": head.layer,
                "head": head.head,
                "unrelated": _number(float(related.unrelated[index])),
                "same_word": _number(float(related.same_word.weight[index])),
                "same_word_interval": _interval(related.same_word.interval, index),
                "synonym": _number(float(related.synonym.weight[index])),
                "synonym_interval": _interval(related.synonym.interval, index),
            }
            for index, head in enumerate(report.heads)
        ],
    }


def _interval(bounds: npt.NDArray[np.float64], index: int) -> list[float | None]:
    return [_number(float(bound)) for bound in bounds[:, index]]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
