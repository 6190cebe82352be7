"""Gemma 3 of text, and EmbeddingGemma: norms on both sides, and local layers with a rotation of their own.

Gemma Team 2025, https://arxiv.org/abs/2503.19786; EmbeddingGemma: https://arxiv.org/abs/2509.20354. A norm
multiplies by 1 + weight; the 1 is added when a checkpoint is loaded, exactly for weights that were published
in bfloat16 and are not below 2^-16. Embeddings are multiplied by sqrt(D), which transformers rounds to the
dtype of the weights, as the encoder here does.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.rotary import as_mapping, read_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.decoders import llama
from attnlens_model.families.decoders.layers import (
    GLOBAL,
    LOCAL,
    check_own_code,
    default_layer_types,
    layer_windows,
    pattern_of,
    read_layer_types,
    read_reach,
    read_rotation,
    write_rotations,
    write_window,
)
from attnlens_model.family import Family, linear_and_norm_names

_DEFAULT_HEAD_SIZE = 256
_DEFAULT_SHARED_HEADS = 4
_DEFAULT_QUERY_SCALAR = 256
_DEFAULT_WINDOW = 4096
_DEFAULT_EVERY = 6
# The key of files before transformers 5, and what an absent one means.
_THETAS = {GLOBAL: ("rope_theta", 1_000_000.0), LOCAL: ("rope_local_base_freq", 10_000.0)}

_CONFIG = ConfigTable(
    keys={
        **llama.KEYS,
        "positions.max_position_embeddings": ("max_position_embeddings", 131_072),
        "attention.bias": ("attention_bias", False),
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    implied={
        **llama.IMPLIED,
        "feed_forward.up_bias": False,
        "feed_forward.down_bias": False,
        "attention.head_norm": True,
        "norm.placement": "both",
    },
    required_values={"attn_logit_softcapping": (None,)},
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    check_own_code(content, "use_bidirectional_attention", "is_causal")
    fields = _CONFIG.read(content)
    is_causal, reach = _read_window(content)
    whole = {
        **fields,
        **llama.read_heads(content, fields, _DEFAULT_HEAD_SIZE, _DEFAULT_SHARED_HEADS),
        "is_causal": is_causal,
        "attention.scale": _read_scale(content),
        "embeddings.scale": _embedding_scale(fields["hidden_size"]),
    }
    kinds = read_layer_types(content, fields["num_layers"])
    if kinds is None:
        kinds = default_layer_types(content, fields["num_layers"], _DEFAULT_EVERY)
    changes = {
        kind: {"attention.window": window, "attention.rotary": _read_rotation(content, kind)}
        for kind, window in ((GLOBAL, None), (LOCAL, reach))
    }
    return pattern_of(whole, kinds, changes)


def _read_window(content: Mapping[str, object]) -> tuple[bool, int]:
    """Return whether the model is causal, and how far its local layers see.

    With `use_bidirectional_attention` a window of w means w / 2 on each side, as transformers has it.
    """
    size, is_causal = content.get("sliding_window", _DEFAULT_WINDOW), content.get("is_causal", True)
    sees_all = content.get("use_bidirectional_attention") or False
    for key, value in (("is_causal", is_causal), ("use_bidirectional_attention", sees_all)):
        if not isinstance(value, bool):
            raise ConfigError(f"{key}={value!r} is not supported: it must be true or false")
    reach = read_reach("sliding_window", size, is_causal=bool(is_causal))
    if sees_all and isinstance(size, int):
        reach = read_reach("sliding_window", size // 2 + 1, is_causal=bool(is_causal))
    return bool(is_causal) and not sees_all, reach


def _read_scale(content: Mapping[str, object]) -> float | None:
    scalar = content.get("query_pre_attn_scalar", _DEFAULT_QUERY_SCALAR)
    if isinstance(scalar, bool) or not isinstance(scalar, int | float) or scalar <= 0:
        raise ConfigError(f"query_pre_attn_scalar={scalar!r} must be a number greater than 0")
    # None is what `SoftmaxAttentionConfig` takes by itself.
    is_usual = scalar == content.get("head_dim", _DEFAULT_HEAD_SIZE)
    return None if is_usual else float(scalar) ** -0.5


def _embedding_scale(hidden_size: object) -> float:
    # Anything but a positive integer is refused, with its name, when the configuration is made.
    return math.sqrt(hidden_size) if isinstance(hidden_size, int) and hidden_size > 0 else 1.0


def _read_rotation(content: Mapping[str, object], kind: str) -> dict[str, object]:
    key, default = _THETAS[kind]
    parts = read_rotation(content, kind)
    # In older files it holds for the layers that see all tokens.
    scaling = as_mapping(content.get("rope_scaling"), "rope_scaling") if kind == GLOBAL else {}
    longest = content.get("max_position_embeddings")
    return read_rotary_parameters({**parts, **scaling}, content.get(key, default), longest=longest)


def _write_config(values: Mapping[str, Any]) -> dict[str, object]:
    windows = layer_windows(values)
    reach = next((window for window in windows if window is not None), None)
    is_causal, scale, heads = values["is_causal"], values.get("attention.scale"), llama.write_heads(values)
    window = write_window(reach, is_causal=is_causal)
    return {
        **_CONFIG.write(values),
        **heads,
        "layer_types": [GLOBAL if window is None else LOCAL for window in windows],
        "use_bidirectional_attention": not is_causal,
        "sliding_window": _DEFAULT_WINDOW if window is None else window if is_causal else 2 * window,
        "query_pre_attn_scalar": heads["head_dim"] if scale is None else round(scale**-2),
        "rope_parameters": write_rotations(values),
    }


def _one_more(weight: Tensor) -> Tensor:
    return weight + 1.0


FAMILY = Family(
    name="gemma3_text",
    model_types=("gemma3_text",),
    architecture="Gemma3TextModel",
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
    },
    prefixes=llama.PREFIXES,
    anchor=llama.ANCHOR,
    roots=llama.ROOTS,
    transforms={"norm.weight": _one_more},
)
