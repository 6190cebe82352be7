"""Llama 2 and 3: pre-RMSNorm, no biases, gated SiLU, RoPE, grouped-query attention, causal.

Touvron et al. 2023, https://arxiv.org/abs/2307.09288. The other families in this package extend its tables.
If `is_causal` is false in the file, attention is bidirectional, as in transformers.
"""

from collections.abc import Mapping
from functools import partial

from attnlens_model.families.buffers import holds_inverse_frequencies
from attnlens_model.families.config_json.layers import check_custom_code
from attnlens_model.families.config_json.rotary import read_rotary, write_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable, Keys, unusual_head_size
from attnlens_model.family import COMMON_PREFIXES, Family, Parameters, linear_and_norm_names

DEFAULT_THETA = 10_000.0

KEYS: Keys = {
    "embeddings.vocab_size": ("vocab_size", None),
    "hidden_size": ("hidden_size", None),
    "num_layers": ("num_hidden_layers", None),
    "attention.num_heads": ("num_attention_heads", None),
    "feed_forward.intermediate_size": ("intermediate_size", None),
    "norm.eps": ("rms_norm_eps", 1e-6),
    "attention.dropout": ("attention_dropout", 0.0),
}
CAUSAL: Keys = {"is_causal": ("is_causal", True)}
ATTENTION_BIAS: Keys = {"attention.bias": ("attention_bias", False)}
BIASES: Keys = {
    **ATTENTION_BIAS,
    "feed_forward.up_bias": ("mlp_bias", False),
    "feed_forward.down_bias": ("mlp_bias", False),
}
NO_FEED_FORWARD_BIAS: Mapping[str, object] = {"feed_forward.up_bias": False, "feed_forward.down_bias": False}
IMPLIED: Mapping[str, object] = {
    "embeddings.type_vocab_size": 0,
    "hidden_dropout": 0.0,
    "positions.scheme": "none",
    "norm.kind": "rms",
    "norm.bias": False,
    "norm.placement": "pre",
    "embeddings.norm": False,
    "feed_forward.kind": "gated",
}

_CONFIG = ConfigTable(
    keys={
        **KEYS,
        **CAUSAL,
        **BIASES,
        "positions.max_position_embeddings": ("max_position_embeddings", 2048),
    },
    activation=("hidden_act", "silu"),
    implied=IMPLIED,
)


def read_heads(
    content: Mapping[str, object],
    fields: Mapping[str, object],
    head_dim: int | None = None,
    num_key_value_heads: int | None = None,
) -> dict[str, object]:
    """Return the head size and the number of key and value heads.

    Args:
        content: Content of the `config.json`.
        fields: Configuration values read so far, by path.
        head_dim: The family's default of `head_dim`. If None, hidden_size / num_heads.
        num_key_value_heads: The family's default of `num_key_value_heads`. If None, the number of heads.
    """
    num_shared = content.get("num_key_value_heads", num_key_value_heads)
    return {
        "attention.head_size": unusual_head_size(content.get("head_dim", head_dim), fields),
        "attention.num_key_value_heads": None if num_shared == fields["attention.num_heads"] else num_shared,
    }


def write_heads(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of a `config.json` that `read_heads` reads."""
    width, num_heads = fields["hidden_size"], fields["attention.num_heads"]
    usual = width // num_heads if isinstance(width, int) and isinstance(num_heads, int) else None
    return {
        "head_dim": fields.get("attention.head_size") or usual,
        "num_key_value_heads": fields.get("attention.num_key_value_heads") or num_heads,
    }


def read_config(table: ConfigTable, content: Mapping[str, object]) -> dict[str, object]:
    """Return the values of `table`, the heads and the rotation."""
    fields = table.read(content)
    rotary = read_rotary(content, DEFAULT_THETA)
    return fields | read_heads(content, fields) | {"attention.rotary": rotary}


def write_config(table: ConfigTable, fields: Mapping[str, object]) -> dict[str, object]:
    """Return the content of a `config.json`; the inverse of `read_config`."""
    rotation = {"rope_parameters": write_rotary_parameters(fields)}
    return table.write(fields) | write_heads(fields) | rotation


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    check_custom_code(content, "is_causal")
    return read_config(_CONFIG, content)


PROJECTIONS: Mapping[Parameters, str] = {
    "layers.{layer}.attention.query": "layers.{layer}.self_attn.q_proj",
    "layers.{layer}.attention.key": "layers.{layer}.self_attn.k_proj",
    "layers.{layer}.attention.value": "layers.{layer}.self_attn.v_proj",
    "layers.{layer}.attention.output": "layers.{layer}.self_attn.o_proj",
}
FEED_FORWARD: Mapping[Parameters, str] = {
    "layers.{layer}.feed_forward.gate": "layers.{layer}.mlp.gate_proj",
    "layers.{layer}.feed_forward.up": "layers.{layer}.mlp.up_proj",
    "layers.{layer}.feed_forward.down": "layers.{layer}.mlp.down_proj",
}
WEIGHTS: Mapping[Parameters, str] = {
    "embeddings.token.weight": "embed_tokens.weight",
    **linear_and_norm_names(
        {
            **PROJECTIONS,
            **FEED_FORWARD,
            "layers.{layer}.attention_norm": "layers.{layer}.input_layernorm",
            "layers.{layer}.output_norm": "layers.{layer}.post_attention_layernorm",
            "final_norm": "norm",
        }
    ),
}
HEAD_NORMS = linear_and_norm_names(
    {
        "layers.{layer}.attention.query_norm": "layers.{layer}.self_attn.q_norm",
        "layers.{layer}.attention.key_norm": "layers.{layer}.self_attn.k_norm",
    }
)

FAMILY = Family(
    name="llama",
    model_types=("llama",),
    architecture="LlamaModel",
    read_config=_read_config,
    write_config=partial(write_config, _CONFIG),
    weights=WEIGHTS,
    prefixes=COMMON_PREFIXES,
    anchor="embed_tokens.weight",
    roots=("embed_tokens.", "layers.", "norm."),
    # Stored by files of 2023.
    buffers={"layers.{layer}.self_attn.rotary_emb.inv_freq": holds_inverse_frequencies},
)
