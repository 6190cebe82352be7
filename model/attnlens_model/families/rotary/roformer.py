"""RoFormer: BERT with RoPE on pairs of adjacent components instead of position embeddings.

Su et al. 2021, https://arxiv.org/abs/2104.09864. Checkpoints store the table of sines and cosines, which must
equal the table computed here. The embedding size may differ from the hidden size, as in ELECTRA.
"""

from collections.abc import Mapping
from dataclasses import replace

from attnlens_model.families.bert import bert
from attnlens_model.families.buffers import holds_sines_and_cosines
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.row_orders import halves_of_pairs
from attnlens_model.family import COMMON_PREFIXES, linear_and_norm_names, without

_CONFIG = ConfigTable(
    keys={**bert.KEYS, "positions.max_position_embeddings": ("max_position_embeddings", 1536)},
    implied={
        "positions.scheme": "none",
        "attention.rotary.theta": 10_000.0,
        "attention.rotary.divisor": 1.0,
    },
    required_values={
        "rotary_value": (False, None),
        "add_cross_attention": (False, None),
        "pruned_heads": ({}, None),
    },
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    fields, width = _CONFIG.read(content), content.get("embedding_size")
    return fields | {"embeddings.size": None if width == fields["hidden_size"] else width}


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    return _CONFIG.write(fields) | {"embedding_size": fields["embeddings.size"] or fields["hidden_size"]}


FAMILY = replace(
    bert.FAMILY,
    name="roformer",
    model_types=("roformer",),
    architecture="RoFormerModel",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        **without(bert.WEIGHTS, "embeddings.position.weight"),
        **linear_and_norm_names({"embeddings.projection": "embeddings_project"}),
    },
    prefixes=("roformer.", *COMMON_PREFIXES),
    roots=(*bert.FAMILY.roots, "embeddings_project."),
    buffers={"encoder.embed_positions.weight": holds_sines_and_cosines},
    row_orders={
        f".self.{projection}.{kind}": halves_of_pairs
        for projection in ("query", "key")
        for kind in ("weight", "bias")
    },
)
