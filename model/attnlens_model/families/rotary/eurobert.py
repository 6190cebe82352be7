"""EuroBERT: a Llama without the causal mask: RMSNorm first, gated SiLU, rotation, shared keys and values.

Boizard et al. 2025, https://arxiv.org/abs/2503.05500.
"""

from collections.abc import Mapping

from attnlens_model.families.config_json.rotary import read_rotary, write_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.decoders import llama
from attnlens_model.family import Family

_DEFAULT_THETA = 10_000.0

_CONFIG = ConfigTable(
    keys={
        "embeddings.vocab_size": ("vocab_size", None),
        "hidden_size": ("hidden_size", None),
        "num_layers": ("num_hidden_layers", None),
        "attention.num_heads": ("num_attention_heads", None),
        "feed_forward.intermediate_size": ("intermediate_size", None),
        "positions.max_position_embeddings": ("max_position_embeddings", 8192),
        "norm.eps": ("rms_norm_eps", 1e-5),
        "attention.bias": ("attention_bias", False),
        "feed_forward.up_bias": ("mlp_bias", False),
        "feed_forward.down_bias": ("mlp_bias", False),
        "attention.dropout": ("attention_dropout", 0.0),
    },
    pad_token_id=128001,
    activation=("hidden_act", "silu"),
    implied={
        "embeddings.type_vocab_size": 0,
        "hidden_dropout": 0.0,
        "positions.scheme": "none",
        "norm.kind": "rms",
        "norm.bias": False,
        "norm.placement": "pre",
        "embeddings.norm": False,
        "feed_forward.kind": "gated",
    },
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    fields = _CONFIG.read(content)
    heads = llama.read_heads(content, fields, None, None)
    return fields | heads | {"attention.rotary": read_rotary(content, _DEFAULT_THETA)}


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    return _CONFIG.write(fields) | {
        "head_dim": fields.get("attention.head_size"),
        "num_key_value_heads": fields.get("attention.num_key_value_heads"),
        "rope_parameters": write_rotary_parameters(fields),
    }


FAMILY = Family(
    name="eurobert",
    model_types=("eurobert",),
    architecture="EuroBertModel",
    read_config=_read_config,
    write_config=_write_config,
    weights=llama.WEIGHTS,
    prefixes=llama.PREFIXES,
    anchor=llama.ANCHOR,
    roots=llama.ROOTS,
)
