"""MPNet, including all-mpnet-base-v2: RoBERTa's positions and a relative bias shared by all layers.

Song et al. 2020, https://arxiv.org/abs/2004.09297. The published implementation always uses the padding id 1
and 32 buckets up to a distance of 128, regardless of its configuration. Other values are rejected.
"""

from dataclasses import replace

from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES, linear_and_norm_names, without

_CONFIG = ConfigTable(
    keys={ours: key for ours, key in bert.ENCODER_KEYS.items() if ours != "embeddings.type_vocab_size"},
    pad_token_id=1,
    implied={
        "embeddings.type_vocab_size": 0,
        "positions.scheme": "padding_offset",
        "attention.relative_bias.num_buckets": 32,
        "attention.relative_bias.max_distance": 128,
    },
    required_values={
        "relative_attention_num_buckets": (32, None),
        "pad_token_id": (1, None),
        "pruned_heads": ({}, None),
    },
)

FAMILY = replace(
    bert.FAMILY,
    name="mpnet",
    model_types=("mpnet",),
    architecture="MPNetModel",
    read_config=_CONFIG.read,
    write_config=_CONFIG.write,
    weights={
        **without(bert.TABLE_WEIGHTS, "embeddings.token_type.weight"),
        **bert.EMBEDDINGS_NORM,
        **bert.FEED_FORWARD_WEIGHTS,
        **bert.OUTPUT_NORM,
        "shared.0.relative_bias.bias.weight": "encoder.relative_attention_bias.weight",
        **linear_and_norm_names(
            {
                "layers.{layer}.attention.query": "encoder.layer.{layer}.attention.attn.q",
                "layers.{layer}.attention.key": "encoder.layer.{layer}.attention.attn.k",
                "layers.{layer}.attention.value": "encoder.layer.{layer}.attention.attn.v",
                "layers.{layer}.attention.output": "encoder.layer.{layer}.attention.attn.o",
                "layers.{layer}.attention_norm": "encoder.layer.{layer}.attention.LayerNorm",
            }
        ),
    },
    prefixes=("mpnet.", *COMMON_PREFIXES),
)
