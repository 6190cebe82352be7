"""RoBERTa, XLM-RoBERTa, CamemBERT and data2vec-text. Embedding models include BGE-M3 and multilingual E5.

Liu et al. 2019, https://arxiv.org/abs/1907.11692; Conneau et al. 2019, https://arxiv.org/abs/1911.02116;
Martin et al. 2019, https://arxiv.org/abs/1911.03894; Baevski et al. 2022, https://arxiv.org/abs/2202.03555.
BERT's layout, but positions start at `pad_token_id + 1` and count non-padding tokens only: 514 position
embeddings support 512 tokens.
"""

from dataclasses import replace

from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES

_CONFIG = ConfigTable(
    keys=bert.KEYS,
    pad_token_id=1,
    implied={"positions.scheme": "padding_offset"},
    required_values=bert.REQUIRED_VALUES,
)

FAMILY = replace(
    bert.FAMILY,
    name="roberta",
    model_types=("roberta", "xlm-roberta", "camembert", "data2vec-text"),
    architecture="RobertaModel",
    read_config=_CONFIG.read,
    write_config=_CONFIG.write,
    prefixes=("roberta.", "data2vec_text.", *COMMON_PREFIXES),
)
