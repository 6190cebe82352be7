"""Megatron-BERT: pre-LN BERT without a norm after the embeddings.

Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053.
"""

from dataclasses import replace

from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES, linear_and_norm_names

_CONFIG = ConfigTable(
    keys=bert.KEYS,
    implied={"norm.placement": "pre", "embeddings.norm": False},
    required_values=bert.REQUIRED_VALUES,
)

FAMILY = replace(
    bert.FAMILY,
    name="megatron_bert",
    model_types=("megatron-bert",),
    architecture="MegatronBertModel",
    read_config=_CONFIG.read,
    write_config=_CONFIG.write,
    weights={
        **bert.TABLE_WEIGHTS,
        **bert.PROJECTION_WEIGHTS,
        **linear_and_norm_names(
            {
                "layers.{layer}.attention_norm": "encoder.layer.{layer}.attention.ln",
                "layers.{layer}.output_norm": "encoder.layer.{layer}.ln",
                "final_norm": "encoder.ln",
            }
        ),
    },
    prefixes=("bert.", *COMMON_PREFIXES),
    legacy_suffixes={},
)
