"""EmbeddingGemma 2: the text model, also as part of the multimodal model.

Differences from Gemma 3: norms multiply by the weight rather than 1 + weight, values are normalized in each
head as well, attention scores are not scaled, each layer has an additional input, and hidden states are
projected at the end. A window of w covers w tokens on each side. Global layers have larger heads and fewer
key and value heads, as specified by `per_layer_config`; the last layer is always global.

The configuration of the multimodal model contains that of the text model as `text_config`. Tensors of other
modalities are ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.layers import (
    GLOBAL,
    LOCAL,
    default_layer_types,
    local_window,
    read_layer_types,
    read_radius,
    read_rotation,
    vary_by_layer,
    write_layer_types,
    write_rotations,
)
from attnlens_model.families.config_json.rotary import as_mapping, read_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.decoders import gemma3_text, llama

_MULTIMODAL = "embedding_gemma2"
_DEFAULT_EVERY = 6
_DEFAULT_WINDOW = 512
_DEFAULT_THETAS = {GLOBAL: 1_000_000.0, LOCAL: 10_000.0}
# Key of local layers -> (key of global layers, default of local layers, default of global layers).
_HEADS = {
    "head_dim": ("global_head_dim", 256, 512),
    "num_key_value_heads": ("num_global_key_value_heads", 2, 1),
}

_CONFIG = ConfigTable(
    keys={
        **llama.KEYS,
        **llama.ATTENTION_BIAS,
        "positions.max_position_embeddings": ("max_position_embeddings", 262_144),
        "per_layer_input.size": ("hidden_size_per_layer_input", 512),
        "output_size": ("embedding_dim", 768),
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    implied={
        **llama.IMPLIED,
        **llama.NO_FEED_FORWARD_BIAS,
        "attention.head_norm": True,
        "attention.value_norm": True,
        "attention.scale": 1.0,
        "norm.placement": "both",
    },
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    if content["model_type"] == _MULTIMODAL:
        content = as_mapping(content.get("text_config"), "text_config")
    fields = _CONFIG.read(content)
    num_layers = fields["num_layers"]
    kinds = read_layer_types(content, num_layers)
    if kinds is None:
        kinds = default_layer_types(content, num_layers, _DEFAULT_EVERY)
    # As in transformers, regardless of layer_types.
    kinds = [*kinds[:-1], GLOBAL]
    reach = read_radius(content.get("sliding_window", _DEFAULT_WINDOW))
    fields |= {
        "embeddings.scale": gemma3_text.embedding_scale(fields["hidden_size"]),
        "per_layer_input.activation": fields["feed_forward.activation"],
    }
    changes = {
        layer: {
            "attention.window": None if kind == GLOBAL else reach,
            "attention.rotary": read_rotary_parameters(
                read_rotation(content, kind),
                _DEFAULT_THETAS[kind],
                max_positions=content.get("max_position_embeddings"),
            ),
            **llama.read_heads(heads, fields),
        }
        for layer, (kind, heads) in enumerate(zip(kinds, _read_heads(content, kinds), strict=True))
    }
    return vary_by_layer(fields, list(changes), changes)


def _read_heads(content: Mapping[str, object], kinds: Sequence[str]) -> list[dict[str, object]]:
    """Return `head_dim` and `num_key_value_heads` of each layer.

    Raises:
        ConfigError: `per_layer_config` has an unknown key or layer index.
    """
    local = {key: content.get(key, default) for key, (_, default, _) in _HEADS.items()}
    if "per_layer_config" not in content:
        global_ = {key: content.get(name, default) for key, (name, _, default) in _HEADS.items()}
        return [global_ if kind == GLOBAL else local for kind in kinds]
    heads = {str(layer): dict(local) for layer in range(len(kinds))}
    for index, stated in as_mapping(content["per_layer_config"], "per_layer_config").items():
        path = f"per_layer_config.{index}"
        changes = as_mapping(stated, path)
        # An index may have leading zeros.
        layer = str(index).lstrip("0") or "0"
        if not str(index) or layer not in heads:
            raise ConfigError(f"{path} is not supported: the model has {len(heads)} layers")
        if unknown := sorted(set(changes) - set(_HEADS)):
            raise ConfigError(
                f"{path}.{unknown[0]}={changes[unknown[0]]!r} is not supported: layers may only differ in "
                f"{' and '.join(_HEADS)}"
            )
        heads[layer] |= changes
    return list(heads.values())


def _write_config(values: Mapping[str, Any]) -> dict[str, object]:
    pattern = values["attention"]
    heads = [
        llama.write_heads({**values, **{f"attention.{key}": value for key, value in part.items()}})
        for part in (pattern[layer % len(pattern)] for layer in range(values["num_layers"]))
    ]
    return {
        **_CONFIG.write(values),
        **heads[0],
        **write_layer_types(values),
        **write_rotations(values),
        "per_layer_config": {str(layer): own for layer, own in enumerate(heads) if own != heads[0]},
        "sliding_window": local_window(values) or _DEFAULT_WINDOW,
    }


FAMILY = replace(
    gemma3_text.FAMILY,
    name="embedding_gemma2",
    model_types=("embedding_gemma2_text", _MULTIMODAL),
    architecture="EmbeddingGemma2TextModel",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        **gemma3_text.WEIGHTS,
        "per_layer_input.layers.{part}.input_projection.weight": "ple.per_layer_model_projection.weight",
        "per_layer_input.norm.weight": "ple.per_layer_projection_norm.weight",
        "per_layer_input.layers.{layer}.gate.weight": "layers.{layer}.ple_block.per_layer_input_gate.weight",
        "per_layer_input.layers.{layer}.projection.weight": (
            "layers.{layer}.ple_block.per_layer_projection.weight"
        ),
        "per_layer_input.layers.{layer}.output_norm.weight": (
            "layers.{layer}.ple_block.post_per_layer_input_norm.weight"
        ),
        "per_layer_input.layers.{layer}.scale": "layers.{layer}.layer_scalar",
        "output_projection.weight": "embedding_projection.weight",
    },
    prefixes=("", "language_model.", "model.language_model."),
    roots=(*llama.FAMILY.roots, "ple.", "embedding_projection."),
    transforms={},
)
