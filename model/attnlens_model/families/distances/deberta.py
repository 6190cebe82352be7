"""DeBERTa v1 (deberta-base, deberta-large, deberta-xlarge): disentangled attention without buckets.

He et al. 2020, https://arxiv.org/abs/2006.03654. Query, key and value are fused within each head. Keys have
no biases.
"""

from collections.abc import Mapping
from dataclasses import replace

from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.distances import deberta_v2
from attnlens_model.families.row_orders import parts_within_heads
from attnlens_model.family import QUERY_KEY_VALUE, linear_and_norm_names

_ATTENTION = "encoder.layer.{layer}.attention.self"

_CONFIG = ConfigTable(
    keys=deberta_v2.KEYS,
    implied={"attention.key_bias": False},
    required_values={"talking_head": (False, None), "pruned_heads": ({}, None)},
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    fields, terms = _CONFIG.read(content), deberta_v2.read_terms(content)
    distances = {
        "attention.kind": "disentangled",
        "attention.terms": terms,
        "attention.max_relative_positions": deberta_v2.number_or_none(content.get("max_relative_positions")),
    }
    return fields | deberta_v2.read_embeddings(content, fields) | (distances if terms else {})


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    return _CONFIG.write(fields) | deberta_v2.write_embeddings(fields) | deberta_v2.write_terms(fields)


FAMILY = replace(
    deberta_v2.FAMILY,
    name="deberta",
    model_types=("deberta",),
    architecture="DebertaModel",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        **deberta_v2.COMMON_WEIGHTS,
        tuple(f"{name}.weight" for name in QUERY_KEY_VALUE): f"{_ATTENTION}.in_proj.weight",
        "layers.{layer}.attention.query.bias": f"{_ATTENTION}.q_bias",
        "layers.{layer}.attention.value.bias": f"{_ATTENTION}.v_bias",
        "layers.{layer}.attention.distance_key.weight": f"{_ATTENTION}.pos_proj.weight",
        **linear_and_norm_names({"layers.{layer}.attention.distance_query": f"{_ATTENTION}.pos_q_proj"}),
    },
    row_orders={".in_proj.weight": parts_within_heads},
)
