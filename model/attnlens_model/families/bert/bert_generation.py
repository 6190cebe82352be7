"""The encoder of BERT for generation: BERT without token types.

Rothe et al. 2019, https://arxiv.org/abs/1907.12461.
"""

from dataclasses import replace

from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import without

_CONFIG = ConfigTable(
    keys={ours: key for ours, key in bert.KEYS.items() if ours != "embeddings.type_vocab_size"},
    implied={"embeddings.type_vocab_size": 0},
    required_values=bert.REQUIRED_VALUES,
)

FAMILY = replace(
    bert.FAMILY,
    name="bert_generation",
    model_types=("bert-generation",),
    architecture="BertGenerationEncoder",
    read_config=_CONFIG.read,
    write_config=_CONFIG.write,
    weights=without(bert.WEIGHTS, "embeddings.token_type.weight"),
    prefixes=("", "bert.", "encoder.", "0.auto_model."),
)
