"""ModernBERT: pre-LN, no biases, gated GELU, rotation, and two local layers for each global one.

Warner et al. 2024, https://arxiv.org/abs/2412.13663. Files written before transformers 5 say how often a
layer is global and give the two thetas; newer ones list the layers' kinds and nest the rotations below them.
"""

from collections.abc import Mapping
from typing import Any

from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.rotary import (
    RotaryBase,
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
        "vocab_size": ("vocab_size", None),
        "hidden_size": ("hidden_size", None),
        "num_layers": ("num_hidden_layers", None),
        "num_heads": ("num_attention_heads", None),
        "intermediate_size": ("intermediate_size", None),
        "max_position_embeddings": ("max_position_embeddings", 8192),
        "layer_norm_eps": ("norm_eps", 1e-5),
        "norm_bias": ("norm_bias", False),
        "attention_bias": ("attention_bias", False),
        "up_bias": ("mlp_bias", False),
        "down_bias": ("mlp_bias", False),
        "hidden_dropout": ("embedding_dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    pad_token_id=50283,
    activation=("hidden_activation", "gelu"),
    implied={
        "type_vocab_size": 0,
        "position_scheme": "none",
        "norm_placement": "pre",
        "feed_forward": "gated",
    },
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    fields = _CONFIG.read(content)
    rotations = {kind: _read_rotation(content, kind) for kind in _THETAS}
    if rotations[_LOCAL].divisor != 1.0:
        raise ConfigError("rope_parameters: scaling of the sliding_attention layers is not supported")
    window = content.get("local_attention", _DEFAULT_WINDOW)
    if not isinstance(window, int) or window < 2:  # noqa: PLR2004 - one key on each side
        raise ConfigError(f"local_attention={window!r} is not supported: it must be an integer of at least 2")
    if content.get("sliding_window") not in (None, window // 2):
        raise ConfigError(
            f"sliding_window={content['sliding_window']!r} contradicts local_attention={window}: "
            f"leave it out, or write half of that, {window // 2}"
        )
    return fields | {
        "rotary_theta": rotations[_GLOBAL].theta,
        "rotary_divisor": rotations[_GLOBAL].divisor,
        "local_rotary_theta": rotations[_LOCAL].theta,
        "local_window": window // 2,
        "global_every_n_layers": _read_global_every(content, fields["num_layers"]),
    }


def _read_rotation(content: Mapping[str, object], kind: str) -> RotaryBase:
    key, default = _THETAS[kind]
    nested = as_mapping(content.get("rope_parameters"), "rope_parameters").get(kind)
    parameters = as_mapping(nested, f"rope_parameters.{kind}")
    scaling = as_mapping(content.get("rope_scaling"), "rope_scaling")
    return read_rotary_parameters({**parameters, **scaling}, content.get(key, default))


def _read_global_every(content: Mapping[str, object], num_layers: object) -> int:
    """Return n where the layers 0, n, 2n ... are global; at most the number of layers."""
    stated = content.get("layer_types")
    every = content.get("global_attn_every_n_layers", _DEFAULT_EVERY)
    if not isinstance(every, int) or every < 1:
        raise ConfigError(f"global_attn_every_n_layers={every!r} must be an integer of at least 1")
    if not isinstance(num_layers, int):
        return every
    if not isinstance(stated, list | tuple):
        return min(every, num_layers)
    kinds = list(stated)
    every = kinds.index(_GLOBAL, 1) if _GLOBAL in kinds[1:] else num_layers
    if kinds != _layer_types(num_layers, every):
        raise ConfigError(
            f"layer_types={kinds} is not supported: of {num_layers} layers the first and every n-th after it "
            f"must be {_GLOBAL}, the others {_LOCAL}"
        )
    return every


def _layer_types(num_layers: int, every: int) -> list[str]:
    return [_LOCAL if layer % every else _GLOBAL for layer in range(num_layers)]


def _write_config(fields: Mapping[str, Any]) -> dict[str, object]:
    every, window = fields["global_every_n_layers"], fields["local_window"]
    rotations = {
        _GLOBAL: write_rotary_parameters(fields["rotary_theta"], fields["rotary_divisor"]),
        _LOCAL: write_rotary_parameters(fields["local_rotary_theta"], 1.0),
    }
    return _CONFIG.write(fields) | {
        "layer_types": _layer_types(fields["num_layers"], every),
        "local_attention": _DEFAULT_WINDOW if window is None else 2 * window,
        "rope_parameters": rotations,
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
