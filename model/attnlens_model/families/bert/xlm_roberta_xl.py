"""XLM-RoBERTa-XL and XXL: pre-LN RoBERTa without a norm after the embeddings.

Goyal et al. 2021, https://arxiv.org/abs/2105.00572.
"""

from dataclasses import replace

from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES, linear_and_norm_names

_CONFIG = ConfigTable(
    keys={
        **bert.KEYS,
        "embeddings.type_vocab_size": ("type_vocab_size", 1),
        "norm.eps": ("layer_norm_eps", 1e-5),
    },
    pad_token_id=1,
    implied={"positions.scheme": "padding_offset", "norm.placement": "pre", "embeddings.norm": False},
    required_values=bert.REQUIRED_VALUES,
)

FAMILY = replace(
    bert.FAMILY,
    name="xlm_roberta_xl",
    model_types=("xlm-roberta-xl",),
    architecture="XLMRobertaXLModel",
    read_config=_CONFIG.read,
    write_config=_CONFIG.write,
    weights={
        **bert.TABLE_WEIGHTS,
        **bert.PROJECTION_WEIGHTS,
        **linear_and_norm_names(
            {
                "layers.{layer}.attention_norm": "encoder.layer.{layer}.attention.self_attn_layer_norm",
                "layers.{layer}.output_norm": "encoder.layer.{layer}.LayerNorm",
                "final_norm": "encoder.LayerNorm",
            }
        ),
    },
    prefixes=("roberta.", *COMMON_PREFIXES),
    legacy_suffixes={},
)
