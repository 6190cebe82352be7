"""RoBERTa-PreLayerNorm: pre-LN RoBERTa with a norm after the embeddings and one before the first attention.

Published with Ott et al. 2019, https://arxiv.org/abs/1904.01038, and used by Wettig et al. 2022,
https://arxiv.org/abs/2202.08005.
"""

from dataclasses import replace

from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES, linear_and_norm_names

_CONFIG = ConfigTable(
    keys=bert.KEYS,
    pad_token_id=1,
    implied={"positions.scheme": "padding_offset", "norm.placement": "pre", "norm.first_layer": True},
    required_values=bert.REQUIRED_VALUES,
)

FAMILY = replace(
    bert.FAMILY,
    name="roberta_prelayernorm",
    model_types=("roberta-prelayernorm",),
    architecture="RobertaPreLayerNormModel",
    read_config=_CONFIG.read,
    write_config=_CONFIG.write,
    weights={
        **bert.TABLE_WEIGHTS,
        **bert.PROJECTION_WEIGHTS,
        **linear_and_norm_names(
            {
                "embeddings.norm": "embeddings.LayerNorm",
                "layers.{layer}.attention_norm": "encoder.layer.{layer}.attention.LayerNorm",
                "layers.{layer}.output_norm": "encoder.layer.{layer}.intermediate.LayerNorm",
                "final_norm": "LayerNorm",
            }
        ),
    },
    prefixes=("roberta_prelayernorm.", *COMMON_PREFIXES),
    roots=(*bert.FAMILY.roots, "LayerNorm."),
    legacy_suffixes={},
)
