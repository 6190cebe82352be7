"""Explanations as JSON objects; what is no number is null."""

import dataclasses
import math

from attnlens_cli.show.explanations.bars import VERIFIER, verified
from attnlens_client import Comparison, Explanation, TokenScores


def explanation_as_json(explanation: Explanation, *, verify: bool) -> dict[str, object]:
    """Return tokens, words and the scores of all methods."""
    words = {"unit_ids": list(explanation.unit_ids)} if explanation.unit_ids else {}
    heads = explanation.head_contributions
    return {
        "target_value": explanation.target_value,
        "num_tokens": explanation.usage.num_tokens,
        "num_tokens_total": explanation.usage.num_tokens_total,
        "truncated": explanation.usage.truncated,
        "tokens": [dataclasses.asdict(token) for token in explanation.tokens],
        **words,
        "units": list(explanation.labels),
        "scores": [_scores(explanation, scores, verify=verify) for scores in explanation.scores],
        **({} if heads is None else {"head_contributions": heads.tolist()}),
    }


def _scores(explanation: Explanation, scores: TokenScores, *, verify: bool) -> dict[str, object]:
    found: dict[str, object] = {
        "method": scores.method,
        "values": [_number(value) for value in scores.values.tolist()],
        "baseline": scores.baseline,
        "sum": scores.sum,
        "expected_sum": scores.expected_sum,
        "faithfulness": scores.faithfulness,
    }
    if verify and scores.method != VERIFIER:
        found["rank_correlation"] = _number(verified(explanation, scores))
    return found


def comparison_as_json(comparison: Comparison) -> dict[str, object]:
    """Return both sides, the similarity and the matrix, with the baselines that it may have."""
    matrix = comparison.matrix
    rows = (
        {} if matrix is None else {"matrix": [[_number(value) for value in row] for row in matrix.tolist()]}
    )
    return {
        "similarity": comparison.similarity,
        "a": explanation_as_json(comparison.a, verify=False),
        "b": explanation_as_json(comparison.b, verify=False),
        **rows,
        **_baselines(comparison),
    }


def _baselines(comparison: Comparison) -> dict[str, object]:
    row, column = comparison.baseline_row, comparison.baseline_column
    if row is None or column is None:
        return {}
    return {
        "baseline_row": row.tolist(),
        "baseline_column": column.tolist(),
        "baseline": comparison.baseline,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
