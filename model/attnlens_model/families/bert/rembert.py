"""RemBERT: BERT with factorized embeddings.

Chung et al. 2020, https://arxiv.org/abs/2010.12821. The projection exists even if the two sizes are equal.
The larger output embeddings belong to the pretraining head.
"""

from dataclasses import replace

from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES, linear_and_norm_names

_CONFIG = ConfigTable(
    keys={
        **bert.KEYS,
        "embeddings.size": ("input_embedding_size", 256),
        "hidden_dropout": ("hidden_dropout_prob", 0.0),
        "attention.dropout": ("attention_probs_dropout_prob", 0.0),
    },
    required_values=bert.REQUIRED_VALUES,
)

FAMILY = replace(
    bert.FAMILY,
    name="rembert",
    model_types=("rembert",),
    architecture="RemBertModel",
    read_config=_CONFIG.read,
    write_config=_CONFIG.write,
    weights={
        **bert.WEIGHTS,
        **linear_and_norm_names({"embeddings.projection": "encoder.embedding_hidden_mapping_in"}),
    },
    prefixes=("rembert.", *COMMON_PREFIXES),
)
