"""Attention as JSON: one map, or those of all layers or heads."""

import dataclasses
from typing import Any

from attnlens_cli.show.attention.gates import gates_as_json
from attnlens_cli.show.attention.map import AttentionMap


def attention_as_json(attention: AttentionMap) -> dict[str, object]:
    """Return the text's tokens and their weights, or the largest of each row, or gates.

    Where all layers or all heads were asked for, `axes` names the axes that come before those of one map.
    """
    described = _described(attention)
    if attention.role == "head_gates":
        return described | gates_as_json(attention)
    result = attention.result.attention[0]
    if result.unit_ids is not None:
        described["units"] = [
            {"text": text, "tokens": list(tokens)}
            for text, tokens in zip(attention.names, attention.units, strict=True)
        ]
    if result.special_token_mass is not None:
        described["special_token_mass"] = _listed(attention, result.special_token_mass)
    if result.layout == "top_k":
        top = result.top_k
        return described | {
            "indices": _listed(attention, top.indices),
            "weights": _listed(attention, top.values),
            "remaining_mass": _listed(attention, top.remaining_mass),
        }
    return described | {"weights": _listed(attention, attention.stack)}


def _listed(attention: AttentionMap, array: Any) -> object:  # noqa: ANN401 - of any dtype
    """Return (L', H', ...) as lists, without the axes that were not asked for."""
    layers = slice(None) if "layers" in attention.axes else 0
    heads = slice(None) if "heads" in attention.axes else 0
    listed: object = array[:, heads][layers].tolist()
    return listed


def _layers(attention: AttentionMap) -> dict[str, object]:
    result = attention.result.attention[0]
    reduction = result.query.reduction
    if reduction is not None and reduction.joins_layers:
        return {"layers": list(result.layers), "layer_reduction": reduction.layers}
    if "layers" in attention.axes:
        return {"layers": list(result.layers)}
    return {"layer": attention.layer}


def _described(attention: AttentionMap) -> dict[str, object]:
    result, texts = attention.result, attention.texts
    pair = {"text_pair": texts["second_text"]} if "second_text" in texts else {}
    axes = {"axes": list(attention.axes)} if attention.axes else {}
    return {
        "model": result.model,
        "model_version": result.model_version,
        "prompt": texts["prompt"],
        "text": texts["text"],
        **pair,
        **_layers(attention),
        "heads": list(result.attention[0].heads),
        **axes,
        "num_tokens": result.num_tokens,
        "num_tokens_total": result.num_tokens_total,
        "truncated": result.truncated,
        "tokens": [dataclasses.asdict(token) for token in result.tokens],
    }
