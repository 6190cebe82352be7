"""Gemma 3 (text) and EmbeddingGemma: norms around each block, local layers with a separate rotation.

Gemma Team 2025, https://arxiv.org/abs/2503.19786; EmbeddingGemma: https://arxiv.org/abs/2509.20354. A norm
multiplies by 1 + weight. The 1 is added when a checkpoint is loaded, which is exact for bfloat16 weights of
at least 2^-16. Embeddings are multiplied by sqrt(D), rounded to the dtype of the weights as in transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.layers import (
    GLOBAL,
    LOCAL,
    check_custom_code,
    default_layer_types,
    local_window,
    read_layer_types,
    read_reach,
    read_rotation,
    vary_by_layer,
    write_layer_types,
    write_rotations,
    write_window,
)
from attnlens_model.families.config_json.rotary import as_mapping, read_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.decoders import llama
from attnlens_model.family import linear_and_norm_names

_DEFAULT_HEAD_SIZE = 256
_DEFAULT_KEY_VALUE_HEADS = 4
_DEFAULT_QUERY_SCALAR = 256
_DEFAULT_WINDOW = 4096
_DEFAULT_EVERY = 6
# Key before transformers 5, and its default.
_THETAS = {GLOBAL: ("rope_theta", 1_000_000.0), LOCAL: ("rope_local_base_freq", 10_000.0)}

_CONFIG = ConfigTable(
    keys={
        **llama.KEYS,
        **llama.ATTENTION_BIAS,
        "positions.max_position_embeddings": ("max_position_embeddings", 131_072),
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    implied={
        **llama.IMPLIED,
        **llama.NO_FEED_FORWARD_BIAS,
        "attention.head_norm": True,
        "norm.placement": "both",
    },
    required_values={"attn_logit_softcapping": (None,)},
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    check_custom_code(content, "use_bidirectional_attention", "is_causal")
    fields = _CONFIG.read(content)
    is_causal, reach = _read_window(content)
    fields |= {
        **llama.read_heads(content, fields, _DEFAULT_HEAD_SIZE, _DEFAULT_KEY_VALUE_HEADS),
        "is_causal": is_causal,
        "attention.scale": _read_scale(content),
        "embeddings.scale": embedding_scale(fields["hidden_size"]),
    }
    kinds = read_layer_types(content, fields["num_layers"])
    if kinds is None:
        kinds = default_layer_types(content, fields["num_layers"], _DEFAULT_EVERY)
    changes = {
        kind: {"attention.window": window, "attention.rotary": _read_rotation(content, kind)}
        for kind, window in ((GLOBAL, None), (LOCAL, reach))
    }
    return vary_by_layer(fields, kinds, changes)


def _read_window(content: Mapping[str, object]) -> tuple[bool, int]:
    """Return whether the model is causal, and the reach of its local layers.

    With `use_bidirectional_attention`, a window of w covers w / 2 tokens on each side, as in transformers.
    """
    size, is_causal = content.get("sliding_window", _DEFAULT_WINDOW), content.get("is_causal", True)
    is_bidirectional = content.get("use_bidirectional_attention") or False
    for key, value in (("is_causal", is_causal), ("use_bidirectional_attention", is_bidirectional)):
        if not isinstance(value, bool):
            raise ConfigError(f"{key}={value!r} is not supported: it must be true or false")
    reach = read_reach("sliding_window", size, is_causal=bool(is_causal))
    if is_bidirectional and isinstance(size, int):
        reach = read_reach("sliding_window", size // 2 + 1, is_causal=bool(is_causal))
    return bool(is_causal) and not is_bidirectional, reach


def _read_scale(content: Mapping[str, object]) -> float | None:
    scalar = content.get("query_pre_attn_scalar", _DEFAULT_QUERY_SCALAR)
    if isinstance(scalar, bool) or not isinstance(scalar, int | float) or scalar <= 0:
        raise ConfigError(f"query_pre_attn_scalar={scalar!r} must be a number greater than 0")
    # None selects the default scale of `SoftmaxAttentionConfig`.
    is_usual = scalar == content.get("head_dim", _DEFAULT_HEAD_SIZE)
    return None if is_usual else float(scalar) ** -0.5


def embedding_scale(hidden_size: object) -> float:
    """Return sqrt(D)."""
    # An invalid size is rejected by EncoderConfig, which names it.
    return math.sqrt(hidden_size) if isinstance(hidden_size, int) and hidden_size > 0 else 1.0


def _read_rotation(content: Mapping[str, object], kind: str) -> dict[str, object]:
    key, default = _THETAS[kind]
    parts = read_rotation(content, kind)
    # In older files, rope_scaling applies to global layers only.
    scaling = as_mapping(content.get("rope_scaling"), "rope_scaling") if kind == GLOBAL else {}
    max_positions = content.get("max_position_embeddings")
    return read_rotary_parameters(
        {**parts, **scaling}, content.get(key, default), max_positions=max_positions
    )


def _write_config(values: Mapping[str, Any]) -> dict[str, object]:
    is_causal, scale, heads = values["is_causal"], values.get("attention.scale"), llama.write_heads(values)
    window = write_window(local_window(values), is_causal=is_causal)
    return {
        **_CONFIG.write(values),
        **heads,
        **write_layer_types(values),
        **write_rotations(values),
        "use_bidirectional_attention": not is_causal,
        "sliding_window": _DEFAULT_WINDOW if window is None else window if is_causal else 2 * window,
        "query_pre_attn_scalar": heads["head_dim"] if scale is None else round(scale**-2),
    }


def _add_one(weight: Tensor) -> Tensor:
    return weight + 1.0


WEIGHTS = {
    **llama.WEIGHTS,
    **llama.HEAD_NORMS,
    **linear_and_norm_names(
        {
            "layers.{layer}.attention_post_norm": "layers.{layer}.post_attention_layernorm",
            "layers.{layer}.output_norm": "layers.{layer}.pre_feedforward_layernorm",
            "layers.{layer}.feed_forward_post_norm": "layers.{layer}.post_feedforward_layernorm",
        }
    ),
}

FAMILY = replace(
    llama.FAMILY,
    name="gemma3_text",
    model_types=("gemma3_text",),
    architecture="Gemma3TextModel",
    read_config=_read_config,
    write_config=_write_config,
    weights=WEIGHTS,
    buffers={},
    transforms={"norm.weight": _add_one},
)
