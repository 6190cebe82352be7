"""NomicBERT (nomic-embed-text v1 and v1.5): BERT with RoPE, gated SiLU and no biases.

Nussbaum et al. 2024, https://arxiv.org/abs/2402.01613. In version 2 (Nussbaum & Duderstadt 2025,
https://arxiv.org/abs/2502.07972), layers have biases and plain GELU, and every second layer is a mixture of
experts.

The checkpoints were published with custom code, whose configuration uses GPT-2's keys and whose projections
are fused. transformers 5 splits and renames the tensors when it loads a checkpoint and fuses them when it
saves one. It does not support experts.
"""

from collections.abc import Mapping
from typing import Any

from attnlens_model.errors import ConfigError
from attnlens_model.families.bert import bert
from attnlens_model.families.buffers import holds_indices
from attnlens_model.families.config_json.layers import vary_by_layer
from attnlens_model.families.config_json.rotary import read_rotary, write_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable, unusual_head_size
from attnlens_model.families.rotary import gte
from attnlens_model.family import (
    COMMON_PREFIXES,
    QUERY_KEY_VALUE,
    Family,
    Layout,
    Parameters,
    linear_and_norm_names,
)

_DEFAULT_THETA = 1000.0
_GATED_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
# For longer inputs, the custom code rescales the rotation by the batch length.
_DEFAULT_TRAINED_POSITIONS = 2048
_PLAIN_ACTIVATION = "gelu"

_CONFIG = ConfigTable(
    keys={
        **bert.ENCODER_KEYS,
        "positions.max_position_embeddings": ("max_position_embeddings", 2048),
        "hidden_dropout": ("hidden_dropout_prob", 0.0),
        "attention.dropout": ("attention_probs_dropout_prob", 0.0),
    },
    activation=("hidden_act", "silu"),
    implied={
        "positions.scheme": "none",
        "feed_forward.kind": "gated",
        "attention.bias": False,
        "feed_forward.up_bias": False,
        "feed_forward.down_bias": False,
    },
)

_HUB_CONFIG = ConfigTable(
    keys={
        "embeddings.vocab_size": ("vocab_size", None),
        "hidden_size": ("n_embd", None),
        "num_layers": ("n_layer", None),
        "attention.num_heads": ("n_head", None),
        "feed_forward.intermediate_size": ("n_inner", None),
        "positions.max_position_embeddings": ("n_positions", None),
        "embeddings.type_vocab_size": ("type_vocab_size", 2),
        "norm.eps": ("layer_norm_epsilon", None),
        "attention.bias": ("qkv_proj_bias", True),
        "feed_forward.up_bias": ("mlp_fc1_bias", True),
        "feed_forward.down_bias": ("mlp_fc2_bias", True),
        "hidden_dropout": ("resid_pdrop", 0.0),
        "attention.dropout": ("attn_pdrop", 0.0),
    },
    activation=("activation_function", "silu"),
    implied={"positions.scheme": "none"},
    required_values={
        "rotary_emb_fraction": (1.0,),
        "rotary_emb_interleaved": (False, None),
        "rotary_emb_scale_base": (None,),
        # Rotates by the head index instead of the position.
        "rotary_head_dim": (False, None),
        "prenorm": (False, None),
        "parallel_block": (False, None),
        "use_rms_norm": (False, None),
        "causal": (False, None),
    },
)

# Supported values in files with experts.
_REQUIRED_WITH_EXPERTS: Mapping[str, tuple[object, ...]] = {
    "moe_normalize_expert_weights": (False, None),
    "expert_choice_router": (False, None),
    "num_shared_experts": (0, None),
    "ffn_div": (1, None),
}


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    if "n_embd" in content:
        return _read_hub_config(content)
    fields = _CONFIG.read(content)
    return fields | {
        "attention.head_size": unusual_head_size(content.get("head_dim"), fields),
        "attention.rotary": read_rotary(content, _DEFAULT_THETA),
    }


def _read_hub_config(content: Mapping[str, object]) -> dict[str, object]:
    name = str(content.get("activation_function"))
    if name != _PLAIN_ACTIVATION and name not in _GATED_ACTIVATIONS:
        raise ConfigError(
            f"activation_function={content.get('activation_function')!r} is not supported: choose one "
            f"of {', '.join(_GATED_ACTIVATIONS)}, {_PLAIN_ACTIVATION}"
        )
    fields = _HUB_CONFIG.read({**content, "activation_function": _GATED_ACTIVATIONS.get(name, name)})
    fields["feed_forward.kind"] = "gated" if name in _GATED_ACTIVATIONS else "plain"
    if "rotary_emb_base" not in content and "rope_parameters" not in content:
        raise ConfigError("config.json does not specify rotary_emb_base: add the value used in training")
    rotation = read_rotary(content, content.get("rotary_emb_base"))
    length = fields["positions.max_position_embeddings"]
    trained = content.get("max_trained_positions") or _DEFAULT_TRAINED_POSITIONS
    if content.get("rotary_scaling_factor") and isinstance(length, int) and isinstance(trained, int):
        length = min(length, trained)
    return _with_experts(content, fields, rotation) | {
        "positions.max_position_embeddings": length,
        "attention.rotary": rotation,
    }


def _with_experts(
    content: Mapping[str, object], fields: dict[str, object], rotation: Mapping[str, object]
) -> dict[str, object]:
    """Return the fields with experts in every n-th layer, from layer 1, if the file specifies them."""
    every, num_layers = content.get("moe_every_n_layers") or 0, fields["num_layers"]
    has_experts = content.get("num_experts") not in (0, 1, None) and every != 0
    if not has_experts or not isinstance(num_layers, int):
        return fields
    if not isinstance(every, int) or every < 2:  # noqa: PLR2004 - there is no layer 1 in a pattern of one
        raise ConfigError(
            f"moe_every_n_layers={every!r} is not supported: it must be an integer of at least 2"
        )
    for key, accepted in _REQUIRED_WITH_EXPERTS.items():
        if content.get(key) not in accepted:
            raise ConfigError(f"{key}={content.get(key)!r} is not supported: only {accepted[0]!r} is")
    if fields["feed_forward.kind"] == "gated":
        raise ConfigError(
            f"activation_function={content['activation_function']!r} is not supported with "
            f"experts: only {_PLAIN_ACTIVATION!r} is"
        )
    if "moe_top_k" not in content:
        raise ConfigError("config.json does not specify moe_top_k: add the value used in training")
    if rotation != read_rotary({}, content.get("rotary_emb_base")):
        raise ConfigError(
            "the custom code of models with experts reads rotary_emb_base alone, and another key in "
            "config.json contradicts it: remove rope_theta, rope_scaling and rope_parameters"
        )
    experts = {
        "feed_forward.up_bias": False,
        "feed_forward.down_bias": True,
        "feed_forward.experts.num_experts": content["num_experts"],
        "feed_forward.experts.num_selected": content["moe_top_k"],
    }
    kinds = [layer == 1 for layer in range(min(every, num_layers))]
    return vary_by_layer(fields, kinds, {False: {}, True: experts}, "feed_forward")


def _write_config(fields: Mapping[str, Any]) -> dict[str, object]:
    if fields["feed_forward.kind"] == "plain":
        return _write_hub_config(fields)
    return _CONFIG.write(fields) | {
        "head_dim": fields.get("attention.head_size"),
        "rope_parameters": write_rotary_parameters(fields),
    }


def _write_hub_config(fields: Mapping[str, Any]) -> dict[str, object]:
    """Return the keys of the custom code, the only ones that support plain layers and experts."""
    pattern = fields["feed_forward"]
    experts = next((part["experts"] for part in pattern if part["experts"] is not None), None)
    rotation = write_rotary_parameters(fields)
    return _HUB_CONFIG.write(fields) | {
        "rotary_emb_base": rotation["rope_theta"],
        "rope_parameters": rotation,
        "moe_every_n_layers": 0 if experts is None else len(pattern),
        "num_experts": 0 if experts is None else experts["num_experts"],
        "moe_top_k": 1 if experts is None else experts["num_selected"],
    }


_HUB_COMMON: Mapping[Parameters, str] = {
    **bert.TOKEN_WEIGHTS,
    **linear_and_norm_names(
        {
            "embeddings.norm": "emb_ln",
            QUERY_KEY_VALUE: "encoder.layers.{layer}.attn.Wqkv",
            "layers.{layer}.attention.output": "encoder.layers.{layer}.attn.out_proj",
            "layers.{layer}.attention_norm": "encoder.layers.{layer}.norm1",
            "layers.{layer}.feed_forward.down": "encoder.layers.{layer}.mlp.fc2",
            "layers.{layer}.output_norm": "encoder.layers.{layer}.norm2",
        }
    ),
}
_HUB_ROOTS = ("embeddings.", "emb_ln.", "encoder.")

_HUB_PLAIN_LAYOUT = Layout(
    weights={
        **_HUB_COMMON,
        **linear_and_norm_names({"layers.{layer}.feed_forward.up": "encoder.layers.{layer}.mlp.fc1"}),
        "layers.{layer}.feed_forward.router.weight": "encoder.layers.{layer}.mlp.router.layer.weight",
        "layers.{layer}.feed_forward.experts.{part}.up.weight": ("encoder.layers.{layer}.mlp.experts.mlp.w1"),
        "layers.{layer}.feed_forward.experts.{part}.down": "encoder.layers.{layer}.mlp.experts.mlp.w2",
        "layers.{layer}.feed_forward.bias": "encoder.layers.{layer}.mlp.experts.bias",
    },
    anchor="encoder.layers.0.mlp.fc1.weight",
    roots=_HUB_ROOTS,
)

_HUB_LAYOUT = Layout(
    weights={
        **_HUB_COMMON,
        **linear_and_norm_names(
            {
                "layers.{layer}.feed_forward.up": "encoder.layers.{layer}.mlp.fc11",
                # The activation is applied to this projection.
                "layers.{layer}.feed_forward.gate": "encoder.layers.{layer}.mlp.fc12",
            }
        ),
    },
    anchor="encoder.layers.0.attn.Wqkv.weight",
    roots=_HUB_ROOTS,
)

FAMILY = Family(
    name="nomic_bert",
    model_types=("nomic_bert",),
    architecture="NomicBertModel",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        **bert.TOKEN_WEIGHTS,
        **bert.EMBEDDINGS_NORM,
        **linear_and_norm_names({**gte.POST_NORM_LAYERS, **gte.FEED_FORWARD}),
    },
    prefixes=("nomic_bert.", "bert.", *COMMON_PREFIXES),
    anchor="layers.0.self_attn.q_proj.weight",
    roots=("embeddings.", "layers."),
    other_layouts=(_HUB_PLAIN_LAYOUT, _HUB_LAYOUT),
    buffers={"embeddings.position_ids": holds_indices},
)
