"""EmbeddingGemma 2: its text model, and the text half of its model of images, sound and text.

Gemma 3's norms (here times their weight, not 1 + weight), norms of each head's query, key and value, scores
that are not scaled, an input for each layer, and a projection of the hidden states at the end. A window is
the radius: a token sees the w tokens on each side. Layers that see all tokens have wider heads and share
keys and values among more of them, as `per_layer_config` says by layer index; the last layer is one of them.

The configuration of the whole model has that of the text model as `text_config`. Its other tensors, those of
images and sound, are ignored.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.rotary import as_mapping, read_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.decoders import llama
from attnlens_model.families.decoders.layers import (
    GLOBAL,
    LOCAL,
    default_layer_types,
    layer_windows,
    pattern_of,
    read_layer_types,
    read_radius,
    read_rotation,
    write_rotations,
)
from attnlens_model.family import Family, linear_and_norm_names

_WHOLE_MODEL = "embedding_gemma2"
_DEFAULT_EVERY = 6
_DEFAULT_WINDOW = 512
_DEFAULT_THETAS = {GLOBAL: 1_000_000.0, LOCAL: 10_000.0}
# Our field of attention -> their key, and what an absent one means: for all layers, and for global ones.
_HEADS = {
    "head_dim": ("global_head_dim", 256, 512),
    "num_key_value_heads": ("num_global_key_value_heads", 2, 1),
}

_CONFIG = ConfigTable(
    keys={
        **llama.KEYS,
        "positions.max_position_embeddings": ("max_position_embeddings", 262_144),
        "attention.bias": ("attention_bias", False),
        "per_layer_input.size": ("hidden_size_per_layer_input", 512),
        "output_size": ("embedding_dim", 768),
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    implied={
        **llama.IMPLIED,
        "feed_forward.up_bias": False,
        "feed_forward.down_bias": False,
        "attention.head_norm": True,
        "attention.value_norm": True,
        "attention.scale": 1.0,
        "norm.placement": "both",
    },
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    if content["model_type"] == _WHOLE_MODEL:
        content = as_mapping(content.get("text_config"), "text_config")
    fields = _CONFIG.read(content)
    num_layers, width = fields["num_layers"], fields["hidden_size"]
    kinds = read_layer_types(content, num_layers)
    if kinds is None:
        kinds = default_layer_types(content, num_layers, _DEFAULT_EVERY)
    # As transformers has it, whatever the file says.
    kinds = [*kinds[:-1], GLOBAL]
    reach = read_radius(content.get("sliding_window", _DEFAULT_WINDOW))
    whole = {
        **fields,
        # Anything but a positive integer is refused, with its name, when the configuration is made.
        "embeddings.scale": math.sqrt(width) if isinstance(width, int) and width > 0 else 1.0,
        "per_layer_input.activation": fields["feed_forward.activation"],
    }
    changes = {
        str(layer): {
            "attention.window": None if kind == GLOBAL else reach,
            "attention.rotary": read_rotary_parameters(
                read_rotation(content, kind),
                _DEFAULT_THETAS[kind],
                longest=content.get("max_position_embeddings"),
            ),
            **llama.read_heads(heads, fields, None, None),
        }
        for layer, (kind, heads) in enumerate(zip(kinds, _read_heads(content, kinds), strict=True))
    }
    return pattern_of(whole, list(changes), changes)


def _read_heads(content: Mapping[str, object], kinds: Sequence[str]) -> list[dict[str, object]]:
    """Return `head_dim` and `num_key_value_heads` of each layer.

    Raises:
        ConfigError: `per_layer_config` has another key, or an index that is not a layer's.
    """
    usual = {key: content.get(key, default) for key, (_, default, _) in _HEADS.items()}
    if "per_layer_config" not in content:
        of_global = {key: content.get(name, default) for key, (name, _, default) in _HEADS.items()}
        return [of_global if kind == GLOBAL else usual for kind in kinds]
    heads = {str(layer): dict(usual) for layer in range(len(kinds))}
    for index, stated in as_mapping(content["per_layer_config"], "per_layer_config").items():
        path = f"per_layer_config.{index}"
        changes = as_mapping(stated, path)
        # Zeros may stand before an index.
        layer = str(index).lstrip("0") or "0"
        if not str(index) or layer not in heads:
            raise ConfigError(f"{path} is not supported: there is no such layer among {len(heads)}")
        if unknown := sorted(set(changes) - set(_HEADS)):
            raise ConfigError(
                f"{path}.{unknown[0]}={changes[unknown[0]]!r} is not supported: layers may only differ in "
                f"{' and '.join(_HEADS)}"
            )
        heads[layer] |= changes
    return list(heads.values())


def _write_config(values: Mapping[str, Any]) -> dict[str, object]:
    windows, pattern = layer_windows(values), values["attention"]
    heads = [
        llama.write_heads({**values, **{f"attention.{key}": value for key, value in part.items()}})
        for part in (pattern[layer % len(pattern)] for layer in range(values["num_layers"]))
    ]
    return {
        **_CONFIG.write(values),
        **heads[0],
        "layer_types": [GLOBAL if window is None else LOCAL for window in windows],
        "per_layer_config": {str(layer): own for layer, own in enumerate(heads) if own != heads[0]},
        "sliding_window": next((window for window in windows if window is not None), _DEFAULT_WINDOW),
        "rope_parameters": write_rotations(values),
    }


FAMILY = Family(
    name="embedding_gemma2",
    model_types=("embedding_gemma2_text", _WHOLE_MODEL),
    architecture="EmbeddingGemma2TextModel",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        **llama.WEIGHTS,
        **llama.HEAD_NORMS,
        **linear_and_norm_names(
            {
                "layers.{layer}.attention_post_norm": "layers.{layer}.post_attention_layernorm",
                "layers.{layer}.output_norm": "layers.{layer}.pre_feedforward_layernorm",
                "layers.{layer}.feed_forward_post_norm": "layers.{layer}.post_feedforward_layernorm",
            }
        ),
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
    anchor=llama.ANCHOR,
    roots=(*llama.ROOTS, "ple.", "embedding_projection."),
)
