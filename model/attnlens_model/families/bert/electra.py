"""ELECTRA generators and discriminators: BERT with a separate embedding size.

Clark et al. 2020, https://arxiv.org/abs/2003.10555. There is no projection if the two sizes are equal.
"""

from collections.abc import Mapping
from dataclasses import replace

from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES, linear_and_norm_names

_CONFIG = ConfigTable(
    keys={**bert.KEYS, "embeddings.size": ("embedding_size", 128)},
    required_values=bert.REQUIRED_VALUES,
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    fields = _CONFIG.read(content)
    is_projected = fields["embeddings.size"] != fields["hidden_size"]
    return fields | {"embeddings.size": fields["embeddings.size"] if is_projected else None}


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    return _CONFIG.write({**fields, "embeddings.size": fields["embeddings.size"] or fields["hidden_size"]})


FAMILY = replace(
    bert.FAMILY,
    name="electra",
    model_types=("electra",),
    architecture="ElectraModel",
    read_config=_read_config,
    write_config=_write_config,
    weights={**bert.WEIGHTS, **linear_and_norm_names({"embeddings.projection": "embeddings_project"})},
    prefixes=("electra.", *COMMON_PREFIXES),
    roots=(*bert.FAMILY.roots, "embeddings_project."),
)
