"""NomicBERT (nomic-embed-text v1 and v1.5): BERT with rotation for positions, gated SiLU and no biases.

Nussbaum et al. 2024, https://arxiv.org/abs/2402.01613. In version 2 (Nussbaum & Duderstadt 2025,
https://arxiv.org/abs/2502.07972) layers have biases and plain GELU, and every other one has experts.

The checkpoints were published with code of their own, whose configuration has GPT-2's names and whose
projections are fused. transformers 5 splits and renames them when it loads a checkpoint, and joins them again
when it saves one; it has no experts.
"""

from collections.abc import Mapping
from typing import Any

from attnlens_model.config_part import nested
from attnlens_model.errors import ConfigError
from attnlens_model.families.bert import bert
from attnlens_model.families.buffers import holds_indices
from attnlens_model.families.config_json.rotary import read_rotary, write_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable, unusual_head_size
from attnlens_model.family import Family, Layout, Parameters, linear_and_norm_names

_DEFAULT_THETA = 1000.0
_GATED_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
# Beyond it the published code rescales the rotation by the length of the batch.
_DEFAULT_TRAINED_POSITIONS = 2048
_PLAIN_ACTIVATION = "gelu"
# What their class takes where a file with experts does not say it.
_DEFAULT_SELECTED = 1

_CONFIG = ConfigTable(
    keys={
        **{ours: key for ours, key in bert.KEYS.items() if ours != "is_causal"},
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
        # Turns by the number of the head instead of the position.
        "rotary_head_dim": (False, None),
        "prenorm": (False, None),
        "parallel_block": (False, None),
        "use_rms_norm": (False, None),
        "causal": (False, None),
    },
)

# Of files with experts.
_REQUIRED_OF_EXPERTS: Mapping[str, tuple[object, ...]] = {
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
            f"activation_function={content.get('activation_function')!r} is not supported: this version "
            f"knows {', '.join(_GATED_ACTIVATIONS)}, {_PLAIN_ACTIVATION}"
        )
    fields = _HUB_CONFIG.read({**content, "activation_function": _GATED_ACTIVATIONS.get(name, name)})
    fields["feed_forward.kind"] = "gated" if name in _GATED_ACTIVATIONS else "plain"
    if "rotary_emb_base" not in content and "rope_parameters" not in content:
        raise ConfigError("config.json does not say rotary_emb_base: add what the model was trained with")
    rotation = read_rotary(content, content.get("rotary_emb_base"))
    length = fields["positions.max_position_embeddings"]
    trained = content.get("max_trained_positions") or _DEFAULT_TRAINED_POSITIONS
    if content.get("rotary_scaling_factor") and isinstance(length, int) and isinstance(trained, int):
        length = min(length, trained)
    return _with_experts(content, fields) | {
        "positions.max_position_embeddings": length,
        "attention.rotary": rotation,
    }


def _with_experts(content: Mapping[str, object], fields: dict[str, object]) -> dict[str, object]:
    """Return the fields with a pattern of feed-forward parts where the file says that some are experts.

    Of every n layers, counted from 0, number 1 has experts.
    """
    every, num_layers = content.get("moe_every_n_layers") or 0, fields["num_layers"]
    has_experts = content.get("num_experts") not in (0, 1, None) and every != 0
    if not has_experts or not isinstance(num_layers, int):
        return fields
    if not isinstance(every, int) or every < 2:  # noqa: PLR2004 - of 1, no layer has the number 1
        raise ConfigError(
            f"moe_every_n_layers={every!r} is not supported: it must be an integer of at least 2"
        )
    for key, accepted in _REQUIRED_OF_EXPERTS.items():
        if content.get(key) not in accepted:
            raise ConfigError(f"{key}={content.get(key)!r} is not supported: only {accepted[0]!r} is")
    if fields["feed_forward.kind"] == "gated":
        raise ConfigError(
            f"activation_function={content['activation_function']!r} is not supported where there are "
            f"experts: only {_PLAIN_ACTIVATION!r} is"
        )
    plain = {path: value for path, value in fields.items() if path.startswith("feed_forward.")}
    experts = plain | {
        "feed_forward.up_bias": False,
        "feed_forward.down_bias": True,
        "feed_forward.experts.num_experts": content["num_experts"],
        "feed_forward.experts.num_selected": content.get("moe_top_k", _DEFAULT_SELECTED),
    }
    pattern = [
        nested(experts if layer == 1 else plain)["feed_forward"] for layer in range(min(every, num_layers))
    ]
    rest = {path: value for path, value in fields.items() if path not in plain}
    return rest | {"feed_forward": pattern[:num_layers]}


def _write_config(fields: Mapping[str, Any]) -> dict[str, object]:
    if fields["feed_forward.kind"] == "plain":
        return _write_hub_config(fields)
    return _CONFIG.write(fields) | {
        "head_dim": fields.get("attention.head_size"),
        "rope_parameters": write_rotary_parameters(fields),
    }


def _write_hub_config(fields: Mapping[str, Any]) -> dict[str, object]:
    """Return the publisher's keys, which alone can say that a layer is plain or has experts."""
    pattern = fields["feed_forward"]
    experts = next((part["experts"] for part in pattern if part["experts"] is not None), None)
    rotation = write_rotary_parameters(fields)
    return _HUB_CONFIG.write(fields) | {
        "rotary_emb_base": rotation["rope_theta"],
        "rope_parameters": rotation,
        "moe_every_n_layers": 0 if experts is None else len(pattern),
        "num_experts": 0 if experts is None else experts["num_experts"],
        "moe_top_k": _DEFAULT_SELECTED if experts is None else experts["num_selected"],
    }


_EMBEDDINGS: Mapping[Parameters, str] = {
    "embeddings.token.weight": "embeddings.word_embeddings.weight",
    "embeddings.token_type.weight": "embeddings.token_type_embeddings.weight",
}

_HUB_COMMON: Mapping[Parameters, str] = {
    **_EMBEDDINGS,
    **linear_and_norm_names(
        {
            "embeddings.norm": "emb_ln",
            (
                "layers.{layer}.attention.query",
                "layers.{layer}.attention.key",
                "layers.{layer}.attention.value",
            ): "encoder.layers.{layer}.attn.Wqkv",
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
                # This one goes through the activation.
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
        **_EMBEDDINGS,
        **linear_and_norm_names(
            {
                "embeddings.norm": "embeddings.LayerNorm",
                "layers.{layer}.attention.query": "layers.{layer}.self_attn.q_proj",
                "layers.{layer}.attention.key": "layers.{layer}.self_attn.k_proj",
                "layers.{layer}.attention.value": "layers.{layer}.self_attn.v_proj",
                "layers.{layer}.attention.output": "layers.{layer}.self_attn.o_proj",
                "layers.{layer}.attention_norm": "layers.{layer}.post_attention_layernorm",
                "layers.{layer}.feed_forward.gate": "layers.{layer}.mlp.gate_proj",
                "layers.{layer}.feed_forward.up": "layers.{layer}.mlp.up_proj",
                "layers.{layer}.feed_forward.down": "layers.{layer}.mlp.down_proj",
                "layers.{layer}.output_norm": "layers.{layer}.post_mlp_layernorm",
            }
        ),
    },
    prefixes=("", "nomic_bert.", "bert.", "model.", "0.auto_model."),
    anchor="layers.0.self_attn.q_proj.weight",
    roots=("embeddings.", "layers."),
    other_layouts=(_HUB_PLAIN_LAYOUT, _HUB_LAYOUT),
    buffers={"embeddings.position_ids": holds_indices},
)
