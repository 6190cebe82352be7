"""GTE v1.5 and multilingual: BERT with RoPE and a gated feed-forward network.

Zhang et al. 2024, "mGTE", https://arxiv.org/abs/2407.19669. The checkpoints were published with custom code,
the model type "new" and fused projections. transformers 5 uses the model type "gte" and separate projections.
"""

from collections.abc import Mapping

from attnlens_model.families.bert import bert
from attnlens_model.families.buffers import holds_indices
from attnlens_model.families.config_json.rotary import read_rotary, write_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import (
    COMMON_PREFIXES,
    QUERY_KEY_VALUE,
    Family,
    Layout,
    Parameters,
    linear_and_norm_names,
)

# Defaults by model type.
_DEFAULT_THETAS = {"gte": 160_000.0, "new": 10_000.0}
_DEFAULT_PADDING = {"gte": 1, "new": 0}

_CONFIG = ConfigTable(
    keys={
        **bert.ENCODER_KEYS,
        "positions.max_position_embeddings": ("max_position_embeddings", 8192),
        "embeddings.type_vocab_size": ("type_vocab_size", 1),
        "attention.dropout": ("attention_probs_dropout_prob", 0.0),
    },
    implied={"positions.scheme": "none", "feed_forward.kind": "gated", "feed_forward.up_bias": False},
    required_values={
        "position_embedding_type": ("rope", None),
        "layer_norm_type": ("layer_norm", None),
        "logn_attention_scale": (False, None),
    },
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    model_type = str(content["model_type"])
    fields = _CONFIG.read({"pad_token_id": _DEFAULT_PADDING[model_type], **content})
    return fields | {"attention.rotary": read_rotary(content, _DEFAULT_THETAS[model_type], _head_dim(fields))}


def _head_dim(fields: Mapping[str, object]) -> int:
    hidden_size, num_heads = fields["hidden_size"], fields["attention.num_heads"]
    if isinstance(hidden_size, int) and isinstance(num_heads, int) and 1 <= num_heads <= hidden_size:
        return hidden_size // num_heads
    # Invalid sizes are rejected by EncoderConfig, which names them.
    return 1


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    return _CONFIG.write(fields) | {"rope_parameters": write_rotary_parameters(fields)}


# The post-LN layers of transformers 5, except for the feed-forward network.
POST_NORM_LAYERS: Mapping[Parameters, str] = {
    "layers.{layer}.attention.query": "layers.{layer}.self_attn.q_proj",
    "layers.{layer}.attention.key": "layers.{layer}.self_attn.k_proj",
    "layers.{layer}.attention.value": "layers.{layer}.self_attn.v_proj",
    "layers.{layer}.attention.output": "layers.{layer}.self_attn.o_proj",
    "layers.{layer}.attention_norm": "layers.{layer}.post_attention_layernorm",
    "layers.{layer}.output_norm": "layers.{layer}.post_mlp_layernorm",
}
FEED_FORWARD: Mapping[Parameters, str] = {
    "layers.{layer}.feed_forward.gate": "layers.{layer}.mlp.gate_proj",
    "layers.{layer}.feed_forward.up": "layers.{layer}.mlp.up_proj",
    "layers.{layer}.feed_forward.down": "layers.{layer}.mlp.down_proj",
}
_EMBEDDINGS: Mapping[Parameters, str] = {**bert.TOKEN_WEIGHTS, **bert.EMBEDDINGS_NORM}

_HUB_LAYOUT = Layout(
    weights={
        **_EMBEDDINGS,
        **linear_and_norm_names(
            {
                QUERY_KEY_VALUE: "encoder.layer.{layer}.attention.qkv_proj",
                "layers.{layer}.attention.output": "encoder.layer.{layer}.attention.o_proj",
                "layers.{layer}.attention_norm": "encoder.layer.{layer}.attn_ln",
                # The activation is applied to the second half.
                (
                    "layers.{layer}.feed_forward.up",
                    "layers.{layer}.feed_forward.gate",
                ): "encoder.layer.{layer}.mlp.up_gate_proj",
                "layers.{layer}.feed_forward.down": "encoder.layer.{layer}.mlp.down_proj",
                "layers.{layer}.output_norm": "encoder.layer.{layer}.mlp_ln",
            }
        ),
    },
    anchor="encoder.layer.0.attention.qkv_proj.weight",
    roots=("embeddings.", "encoder."),
)

FAMILY = Family(
    name="gte",
    model_types=("gte", "new"),
    architecture="GteModel",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        **_EMBEDDINGS,
        **linear_and_norm_names({**POST_NORM_LAYERS, **FEED_FORWARD}),
    },
    prefixes=("gte.", "new.", *COMMON_PREFIXES),
    anchor="layers.0.self_attn.q_proj.weight",
    roots=("embeddings.", "layers."),
    other_layouts=(_HUB_LAYOUT,),
    buffers={"embeddings.position_ids": holds_indices},
)
