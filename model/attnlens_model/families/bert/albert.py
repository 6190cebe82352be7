"""ALBERT: factorized embeddings and layers with shared weights.

Lan et al. 2019, https://arxiv.org/abs/1909.11942. The projection exists even if the two sizes are equal.
"""

from dataclasses import replace

from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES, linear_and_norm_names

_LAYER = "encoder.albert_layer_groups.{layer}.albert_layers.0"

_CONFIG = ConfigTable(
    keys={
        **bert.ENCODER_KEYS,
        "embeddings.size": ("embedding_size", 128),
        "num_hidden_groups": ("num_hidden_groups", 1),
        "hidden_dropout": ("hidden_dropout_prob", 0.0),
        "attention.dropout": ("attention_probs_dropout_prob", 0.0),
    },
    activation=("hidden_act", "gelu_new"),
    required_values={
        "inner_group_num": (1, None),
        "position_embedding_type": ("absolute", None),
        "pruned_heads": ({}, None),
    },
)

FAMILY = replace(
    bert.FAMILY,
    name="albert",
    model_types=("albert",),
    architecture="AlbertModel",
    read_config=_CONFIG.read,
    write_config=_CONFIG.write,
    weights={
        **bert.TABLE_WEIGHTS,
        **linear_and_norm_names(
            {
                "embeddings.norm": "embeddings.LayerNorm",
                "embeddings.projection": "encoder.embedding_hidden_mapping_in",
                "layers.{layer}.attention.query": f"{_LAYER}.attention.query",
                "layers.{layer}.attention.key": f"{_LAYER}.attention.key",
                "layers.{layer}.attention.value": f"{_LAYER}.attention.value",
                "layers.{layer}.attention.output": f"{_LAYER}.attention.dense",
                "layers.{layer}.attention_norm": f"{_LAYER}.attention.LayerNorm",
                "layers.{layer}.feed_forward.up": f"{_LAYER}.ffn",
                "layers.{layer}.feed_forward.down": f"{_LAYER}.ffn_output",
                "layers.{layer}.output_norm": f"{_LAYER}.full_layer_layer_norm",
            }
        ),
    },
    prefixes=("albert.", *COMMON_PREFIXES),
)
