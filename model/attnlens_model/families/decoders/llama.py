"""Llama 2 and 3: RMSNorm first, no biases, gated SiLU, rotation, keys and values shared by heads, causal.

Touvron et al. 2023, https://arxiv.org/abs/2307.09288. The other families of this folder are built on it.
`is_causal` false in a file lets each token see all others, as transformers reads it.
"""

from collections.abc import Mapping

from attnlens_model.families.buffers import holds_inverse_frequencies
from attnlens_model.families.config_json.rotary import read_rotary, write_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable, unusual_head_size
from attnlens_model.families.decoders.layers import check_own_code
from attnlens_model.family import Buffer, Family, Parameters, linear_and_norm_names

DEFAULT_THETA = 10_000.0

KEYS: Mapping[str, tuple[str, object]] = {
    "embeddings.vocab_size": ("vocab_size", None),
    "hidden_size": ("hidden_size", None),
    "num_layers": ("num_hidden_layers", None),
    "attention.num_heads": ("num_attention_heads", None),
    "feed_forward.intermediate_size": ("intermediate_size", None),
    "norm.eps": ("rms_norm_eps", 1e-6),
    "attention.dropout": ("attention_dropout", 0.0),
}
CAUSAL: Mapping[str, tuple[str, object]] = {"is_causal": ("is_causal", True)}
BIASES: Mapping[str, object] = {
    "attention.bias": False,
    "feed_forward.up_bias": False,
    "feed_forward.down_bias": False,
}
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
        "positions.max_position_embeddings": ("max_position_embeddings", 2048),
        "attention.bias": ("attention_bias", False),
        "feed_forward.up_bias": ("mlp_bias", False),
        "feed_forward.down_bias": ("mlp_bias", False),
    },
    activation=("hidden_act", "silu"),
    implied=IMPLIED,
)


def read_heads(
    content: Mapping[str, object], fields: Mapping[str, object], head_dim: int | None, num_shared: int | None
) -> dict[str, object]:
    """Return the width of a head, and how many heads keys and values have.

    Args:
        content: of the `config.json`.
        fields: what is known of the configuration, by path.
        head_dim: what the family takes where the file has no `head_dim`; None: hidden_size / num_heads.
        num_shared: the same of `num_key_value_heads`; None: the number of heads.
    """
    shared = content.get("num_key_value_heads", num_shared)
    return {
        "attention.head_size": unusual_head_size(content.get("head_dim", head_dim), fields),
        "attention.num_key_value_heads": None if shared == fields["attention.num_heads"] else shared,
    }


def write_heads(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of a `config.json` that `read_heads` reads."""
    width, num_heads = fields["hidden_size"], fields["attention.num_heads"]
    usual = width // num_heads if isinstance(width, int) and isinstance(num_heads, int) else None
    return {
        "head_dim": fields.get("attention.head_size") or usual,
        "num_key_value_heads": fields.get("attention.num_key_value_heads") or num_heads,
    }


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    check_own_code(content, "is_causal")
    fields = _CONFIG.read(content)
    heads = read_heads(content, fields, None, None)
    return fields | heads | {"attention.rotary": read_rotary(content, DEFAULT_THETA)}


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    rotation = {"rope_parameters": write_rotary_parameters(fields)}
    return _CONFIG.write(fields) | write_heads(fields) | rotation


WEIGHTS: Mapping[Parameters, str] = {
    "embeddings.token.weight": "embed_tokens.weight",
    **linear_and_norm_names(
        {
            "layers.{layer}.attention.query": "layers.{layer}.self_attn.q_proj",
            "layers.{layer}.attention.key": "layers.{layer}.self_attn.k_proj",
            "layers.{layer}.attention.value": "layers.{layer}.self_attn.v_proj",
            "layers.{layer}.attention.output": "layers.{layer}.self_attn.o_proj",
            "layers.{layer}.attention_norm": "layers.{layer}.input_layernorm",
            "layers.{layer}.feed_forward.gate": "layers.{layer}.mlp.gate_proj",
            "layers.{layer}.feed_forward.up": "layers.{layer}.mlp.up_proj",
            "layers.{layer}.feed_forward.down": "layers.{layer}.mlp.down_proj",
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
# Qwen3-Embedding and E5-Mistral have no prefix, a language model has "model.".
PREFIXES = ("", "model.", "0.auto_model.")
ANCHOR = "embed_tokens.weight"
ROOTS = ("embed_tokens.", "layers.", "norm.")
# In files of 2023.
BUFFERS: Mapping[str, Buffer] = {"layers.{layer}.self_attn.rotary_emb.inv_freq": holds_inverse_frequencies}

FAMILY = Family(
    name="llama",
    model_types=("llama",),
    architecture="LlamaModel",
    read_config=_read_config,
    write_config=_write_config,
    weights=WEIGHTS,
    prefixes=PREFIXES,
    anchor=ANCHOR,
    roots=ROOTS,
    buffers=BUFFERS,
)
