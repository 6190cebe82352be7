"""ModernBERT: pre-LN, no biases, gated GELU, RoPE, and two local layers for each global layer.

Warner et al. 2024, https://arxiv.org/abs/2412.13663. Files written before transformers 5 specify the interval
of global layers and the two thetas; newer files list the layer types and group the rotations by type.
"""

from collections.abc import Mapping
from typing import Any

from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.layers import (
    GLOBAL,
    LOCAL,
    local_window,
    read_layer_types,
    vary_by_layer,
    write_layer_types,
    write_rotations,
)
from attnlens_model.families.config_json.rotary import as_mapping, read_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES, QUERY_KEY_VALUE, Family, linear_and_norm_names

# Key before transformers 5, and its default.
_THETAS = {GLOBAL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}
_DEFAULT_EVERY = 3
_DEFAULT_WINDOW = 128

_CONFIG = ConfigTable(
    keys={
        "embeddings.vocab_size": ("vocab_size", None),
        "hidden_size": ("hidden_size", None),
        "num_layers": ("num_hidden_layers", None),
        "attention.num_heads": ("num_attention_heads", None),
        "attention.dropout": ("attention_dropout", 0.0),
        "attention.bias": ("attention_bias", False),
        "feed_forward.intermediate_size": ("intermediate_size", None),
        "feed_forward.up_bias": ("mlp_bias", False),
        "feed_forward.down_bias": ("mlp_bias", False),
        "positions.max_position_embeddings": ("max_position_embeddings", 8192),
        "norm.eps": ("norm_eps", 1e-5),
        "norm.bias": ("norm_bias", False),
        "hidden_dropout": ("embedding_dropout", 0.0),
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
    fields = _CONFIG.read(content)
    window = content.get("local_attention", _DEFAULT_WINDOW)
    if not isinstance(window, int) or window < 2:  # noqa: PLR2004 - one key on each side
        raise ConfigError(f"local_attention={window!r} is not supported: it must be an integer of at least 2")
    if content.get("sliding_window") not in (None, window // 2):
        raise ConfigError(
            f"sliding_window={content['sliding_window']!r} contradicts local_attention={window}: "
            f"leave it out, or set it to half of local_attention, {window // 2}"
        )
    changes = {
        kind: {"attention.window": reach, "attention.rotary": _read_rotation(content, kind)}
        for kind, reach in ((GLOBAL, None), (LOCAL, window // 2))
    }
    return vary_by_layer(fields, _read_layer_types(content, fields["num_layers"]), changes)


def _read_rotation(content: Mapping[str, object], kind: str) -> dict[str, object]:
    key, default = _THETAS[kind]
    parts = as_mapping(content.get("rope_parameters"), "rope_parameters").get(kind)
    parameters = as_mapping(parts, f"rope_parameters.{kind}")
    scaling = as_mapping(content.get("rope_scaling"), "rope_scaling")
    max_positions = content.get("max_position_embeddings")
    return read_rotary_parameters(
        {**parameters, **scaling}, content.get(key, default), max_positions=max_positions
    )


def _read_layer_types(content: Mapping[str, object], num_layers: object) -> list[str]:
    """Return the type of each layer; every n-th one, starting with the first, is global by default."""
    every = content.get("global_attn_every_n_layers", _DEFAULT_EVERY)
    if not isinstance(every, int) or every < 1:
        raise ConfigError(f"global_attn_every_n_layers={every!r} must be an integer of at least 1")
    kinds = read_layer_types(content, num_layers)
    if kinds is None:
        layers = range(num_layers if isinstance(num_layers, int) else 1)
        kinds = [LOCAL if layer % every else GLOBAL for layer in layers]
    return kinds


def _write_config(values: Mapping[str, Any]) -> dict[str, object]:
    return {
        **_CONFIG.write(values),
        **write_layer_types(values),
        **write_rotations(values),
        "local_attention": 2 * (local_window(values) or _DEFAULT_WINDOW // 2),
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
                QUERY_KEY_VALUE: "layers.{layer}.attn.Wqkv",
                "layers.{layer}.attention.output": "layers.{layer}.attn.Wo",
                "layers.{layer}.attention_norm": "layers.{layer}.attn_norm",
                # The activation is applied to the first half.
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
    prefixes=COMMON_PREFIXES,
    anchor="embeddings.tok_embeddings.weight",
    roots=("embeddings.", "layers.", "final_norm."),
)
