"""Attention, explanations and comparisons as JSON. Non-finite numbers become null."""

import dataclasses
import math
from typing import Any

from attnlens.explanations import rank_correlation
from attnlens_cli.show.attention_map import AttentionMap
from attnlens_client import Comparison, Explanation, TokenScores

VERIFIER = "leave_one_out"


def attention_as_json(attention: AttentionMap) -> dict[str, object]:
    """Return the tokens of a text and their weights, the largest weights of each row, or head gates.

    If all layers or heads were requested, `axes` names the axes that precede those of a single map.
    """
    content = _text_as_json(attention)
    result = attention.result.attention[0]
    if attention.role == "head_gates":
        loads = [attention.head_load(index) for index in range(len(result.layers))]
        if "layers" in attention.axes:
            return content | {"gates": result.weights.tolist(), "head_load": loads}
        return content | {"gates": result.weights[0].tolist(), "head_load": loads[0]}
    if result.unit_ids is not None:
        content["units"] = [
            {"text": text, "tokens": list(tokens)}
            for text, tokens in zip(attention.names, attention.units, strict=True)
        ]
    if result.special_token_mass is not None:
        content["special_token_mass"] = _as_lists(attention, result.special_token_mass)
    if result.layout == "top_k":
        top = result.top_k
        return content | {
            "indices": _as_lists(attention, top.indices),
            "weights": _as_lists(attention, top.values),
            "remaining_mass": _as_lists(attention, top.remaining_mass),
        }
    return content | {"weights": _as_lists(attention, attention.stack)}


def _as_lists(attention: AttentionMap, array: Any) -> object:  # noqa: ANN401 - any dtype
    """Return an array (L', H', ...) as nested lists, with the requested axes only."""
    layers = slice(None) if "layers" in attention.axes else 0
    heads = slice(None) if "heads" in attention.axes else 0
    lists: object = array[:, heads][layers].tolist()
    return lists


def _text_as_json(attention: AttentionMap) -> dict[str, object]:
    result, texts = attention.result, attention.texts
    pair = {"text_pair": texts["second_text"]} if "second_text" in texts else {}
    axes = {"axes": list(attention.axes)} if attention.axes else {}
    return {
        "model": result.model,
        "model_version": result.model_version,
        "prompt": texts["prompt"],
        "text": texts["text"],
        **pair,
        **_layers_as_json(attention),
        "heads": list(result.attention[0].heads),
        **axes,
        "num_tokens": result.num_tokens,
        "num_tokens_total": result.num_tokens_total,
        "truncated": result.truncated,
        "tokens": [dataclasses.asdict(token) for token in result.tokens],
    }


def _layers_as_json(attention: AttentionMap) -> dict[str, object]:
    result = attention.result.attention[0]
    reduction = result.query.reduction
    if reduction is not None and reduction.joins_layers:
        return {"layers": list(result.layers), "layer_reduction": reduction.layers}
    if "layers" in attention.axes:
        return {"layers": list(result.layers)}
    return {"layer": attention.layer}


def explanation_as_json(explanation: Explanation, *, verify: bool) -> dict[str, object]:
    """Return the tokens, units and scores of all methods."""
    words = {"unit_ids": list(explanation.unit_ids)} if explanation.unit_ids else {}
    heads, sums = explanation.head_contributions, explanation.sums_by_source
    return {
        "target_value": explanation.target_value,
        "num_tokens": explanation.usage.num_tokens,
        "num_tokens_total": explanation.usage.num_tokens_total,
        "truncated": explanation.usage.truncated,
        "tokens": [dataclasses.asdict(token) for token in explanation.tokens],
        **words,
        "units": list(explanation.labels),
        "scores": [_scores_as_json(explanation, scores, verify=verify) for scores in explanation.scores],
        **({} if heads is None else {"head_contributions": heads.tolist()}),
        **({} if sums is None else {"sums_by_source": dict(sums)}),
    }


def _scores_as_json(explanation: Explanation, scores: TokenScores, *, verify: bool) -> dict[str, object]:
    content: dict[str, object] = {
        "method": scores.method,
        "values": [_number(value) for value in scores.values.tolist()],
        "baseline": scores.baseline,
        "sum": scores.sum,
        "expected_sum": scores.expected_sum,
        "faithfulness": scores.faithfulness,
    }
    if verify and scores.method != VERIFIER:
        content["rank_correlation"] = _number(verify_scores(explanation, scores))
    return content


def verify_scores(explanation: Explanation, scores: TokenScores) -> float:
    """Return Spearman's rank correlation of scores with the leave-one-out scores of the same explanation."""
    return rank_correlation(scores.values, explanation.by(VERIFIER).values)


def comparison_as_json(comparison: Comparison) -> dict[str, object]:
    """Return both sides, the similarity, and the matrix with its baselines if there are any."""
    content: dict[str, object] = {
        "similarity": comparison.similarity,
        "similarity_function": comparison.function,
        "a": explanation_as_json(comparison.a, verify=False),
        "b": explanation_as_json(comparison.b, verify=False),
    }
    if comparison.matrix is not None:
        content["matrix"] = [[_number(value) for value in row] for row in comparison.matrix.tolist()]
    row, column = comparison.baseline_row, comparison.baseline_column
    if row is not None and column is not None:
        content["baseline_row"], content["baseline_column"] = row.tolist(), column.tolist()
        content["baseline"] = comparison.baseline
    return content


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
