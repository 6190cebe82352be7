"""ModernBERT: pre-LN, no biases, gated GELU, rotation, and two local layers for each global one.

Warner et al. 2024, https://arxiv.org/abs/2412.13663. Files written before transformers 5 say how often a
layer is global and give the two thetas; newer ones list the layers' kinds and nest the rotations below them.
"""

from collections.abc import Mapping
from typing import Any

from attnlens_model.config_part import flat, nested
from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.rotary import (
    as_mapping,
    read_rotary_parameters,
    write_rotary_parameters,
)
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import Family, linear_and_norm_names

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
# As their class has them: the key of files before transformers 5, and what an absent one means.
_THETAS = {_GLOBAL: ("global_rope_theta", 160_000.0), _LOCAL: ("local_rope_theta", 10_000.0)}
_DEFAULT_EVERY = 3
_DEFAULT_WINDOW = 128

_CONFIG = ConfigTable(
    keys={
        "embeddings.vocab_size": ("vocab_size", None),
        "hidden_size": ("hidden_size", None),
        "num_layers": ("num_hidden_layers", None),
        "attention.num_heads": ("num_attention_heads", None),
        "feed_forward.intermediate_size": ("intermediate_size", None),
        "positions.max_position_embeddings": ("max_position_embeddings", 8192),
        "norm.eps": ("norm_eps", 1e-5),
        "norm.bias": ("norm_bias", False),
        "attention.bias": ("attention_bias", False),
        "feed_forward.up_bias": ("mlp_bias", False),
        "feed_forward.down_bias": ("mlp_bias", False),
        "hidden_dropout": ("embedding_dropout", 0.0),
        "attention.dropout": ("attention_dropout", 0.0),
    },
    pad_token_id=50283,
    activation=("hidden_activation", "gelu"),
    implied={
        "embeddings.type_vocab_size": 0,
        "positions.scheme": "none",
        "norm.placement": "pre",
        "feed_forward.kind": "gated",
    },
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    values = _CONFIG.read(content)
    window = content.get("local_attention", _DEFAULT_WINDOW)
    if not isinstance(window, int) or window < 2:  # noqa: PLR2004 - one key on each side
        raise ConfigError(f"local_attention={window!r} is not supported: it must be an integer of at least 2")
    if content.get("sliding_window") not in (None, window // 2):
        raise ConfigError(
            f"sliding_window={content['sliding_window']!r} contradicts local_attention={window}: "
            f"leave it out, or write half of that, {window // 2}"
        )
    common = {path: value for path, value in values.items() if path.startswith("attention.")}
    of_kind = {
        kind: nested(common | {"attention.window": reach, "attention.rotary": _read_rotation(content, kind)})
        for kind, reach in ((_GLOBAL, None), (_LOCAL, window // 2))
    }
    kinds = _read_layer_types(content, values["num_layers"])
    rest = {path: value for path, value in values.items() if path not in common}
    return rest | {"attention": [of_kind[kind]["attention"] for kind in kinds]}


def _read_rotation(content: Mapping[str, object], kind: str) -> dict[str, object]:
    key, default = _THETAS[kind]
    parts = as_mapping(content.get("rope_parameters"), "rope_parameters").get(kind)
    parameters = as_mapping(parts, f"rope_parameters.{kind}")
    scaling = as_mapping(content.get("rope_scaling"), "rope_scaling")
    longest = content.get("max_position_embeddings")
    return read_rotary_parameters({**parameters, **scaling}, content.get(key, default), longest=longest)


def _read_layer_types(content: Mapping[str, object], num_layers: object) -> list[str]:
    """Return the kind of each layer, or a pattern of kinds."""
    every, stated = content.get("global_attn_every_n_layers", _DEFAULT_EVERY), content.get("layer_types")
    if not isinstance(every, int) or every < 1:
        raise ConfigError(f"global_attn_every_n_layers={every!r} must be an integer of at least 1")
    if not isinstance(num_layers, int):
        return [_GLOBAL]  # The number is refused, with its name, when the configuration is made.
    if stated is None:
        return [_LOCAL if layer % every else _GLOBAL for layer in range(min(every, num_layers))]
    if not isinstance(stated, list | tuple) or len(stated) != num_layers or not set(stated) <= set(_THETAS):
        raise ConfigError(
            f"layer_types={stated!r} is not supported: it must say {_GLOBAL} or {_LOCAL} for each of "
            f"{num_layers} layers"
        )
    return list(stated)


def _write_config(values: Mapping[str, Any]) -> dict[str, object]:
    pattern = values["attention"]
    windows = [pattern[layer % len(pattern)].get("window") for layer in range(values["num_layers"])]
    rotations = {_GLOBAL if part.get("window") is None else _LOCAL: part.get("rotary") for part in pattern}
    window = next((window for window in windows if window is not None), _DEFAULT_WINDOW // 2)
    return _CONFIG.write(values) | {
        "layer_types": [_GLOBAL if window is None else _LOCAL for window in windows],
        "local_attention": 2 * window,
        "rope_parameters": {
            kind: write_rotary_parameters(flat({"rotary": rotary}, "attention"))
            for kind, rotary in rotations.items()
        },
    }


FAMILY = Family(
    name="modernbert",
    model_types=("modernbert",),
    architecture="ModernBertModel",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        "embeddings.token.weight": "embeddings.tok_embeddings.weight",
        **linear_and_norm_names(
            {
                "embeddings.norm": "embeddings.norm",
                (
                    "layers.{layer}.attention.query",
                    "layers.{layer}.attention.key",
                    "layers.{layer}.attention.value",
                ): "layers.{layer}.attn.Wqkv",
                "layers.{layer}.attention.output": "layers.{layer}.attn.Wo",
                "layers.{layer}.attention_norm": "layers.{layer}.attn_norm",
                # The first half goes through the activation.
                (
                    "layers.{layer}.feed_forward.gate",
                    "layers.{layer}.feed_forward.up",
                ): "layers.{layer}.mlp.Wi",
                "layers.{layer}.feed_forward.down": "layers.{layer}.mlp.Wo",
                "layers.{layer}.output_norm": "layers.{layer}.mlp_norm",
                "final_norm": "final_norm",
            }
        ),
    },
    prefixes=("", "model.", "0.auto_model."),
    anchor="embeddings.tok_embeddings.weight",
    roots=("embeddings.", "layers.", "final_norm."),
)
