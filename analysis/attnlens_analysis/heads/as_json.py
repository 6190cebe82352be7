"""Converts a report to JSON types. docs/heads.md describes the fields. `schema` is the format version."""

import math
from typing import Any

from attnlens_analysis.heads.labels import CAVEATS, RULES, is_winner
from attnlens_analysis.heads.measures import measures
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


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
