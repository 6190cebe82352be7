"""ELECTRA, generators and discriminators: BERT with embeddings of a width of their own.

Clark et al. 2020, https://arxiv.org/abs/2003.10555. Where the two widths are equal there is no projection.
"""

from collections.abc import Mapping

from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import Family, linear_and_norm_names

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


FAMILY = Family(
    name="electra",
    model_types=("electra",),
    architecture="ElectraModel",
    read_config=_read_config,
    write_config=_write_config,
    weights={**bert.WEIGHTS, **linear_and_norm_names({"embeddings.projection": "embeddings_project"})},
    prefixes=("", "electra.", "model.", "0.auto_model."),
    anchor=bert.ANCHOR,
    roots=("embeddings.", "embeddings_project.", "encoder."),
    buffers=bert.BUFFERS,
    legacy_suffixes=bert.LEGACY_SUFFIXES,
)
