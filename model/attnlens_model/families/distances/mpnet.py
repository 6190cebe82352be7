"""MPNet, among embedders all-mpnet-base-v2: RoBERTa's positions, and a relative bias shared by all layers.

Song et al. 2020, https://arxiv.org/abs/2004.09297. The published implementation takes 1 for the padding id
and 32 buckets up to a distance of 128 whatever its configuration says, so other values are refused.
"""

from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import Family, linear_and_norm_names

_OWN_KEYS = ("embeddings.type_vocab_size", "is_causal")

_CONFIG = ConfigTable(
    keys={ours: key for ours, key in bert.KEYS.items() if ours not in _OWN_KEYS},
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

FAMILY = Family(
    name="mpnet",
    model_types=("mpnet",),
    architecture="MPNetModel",
    read_config=_CONFIG.read,
    write_config=_CONFIG.write,
    weights={
        "embeddings.token.weight": "embeddings.word_embeddings.weight",
        "embeddings.position.weight": "embeddings.position_embeddings.weight",
        "shared.0.relative_bias.bias.weight": "encoder.relative_attention_bias.weight",
        **linear_and_norm_names(
            {
                "embeddings.norm": "embeddings.LayerNorm",
                "layers.{layer}.attention.query": "encoder.layer.{layer}.attention.attn.q",
                "layers.{layer}.attention.key": "encoder.layer.{layer}.attention.attn.k",
                "layers.{layer}.attention.value": "encoder.layer.{layer}.attention.attn.v",
                "layers.{layer}.attention.output": "encoder.layer.{layer}.attention.attn.o",
                "layers.{layer}.attention_norm": "encoder.layer.{layer}.attention.LayerNorm",
                "layers.{layer}.feed_forward.up": "encoder.layer.{layer}.intermediate.dense",
                "layers.{layer}.feed_forward.down": "encoder.layer.{layer}.output.dense",
                "layers.{layer}.output_norm": "encoder.layer.{layer}.output.LayerNorm",
            }
        ),
    },
    prefixes=("", "mpnet.", "model.", "0.auto_model."),
    anchor=bert.ANCHOR,
    roots=("embeddings.", "encoder."),
    buffers=bert.BUFFERS,
    legacy_suffixes=bert.LEGACY_SUFFIXES,
)
