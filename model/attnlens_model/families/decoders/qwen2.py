"""Qwen2 and 2.5: a Llama with biases on queries, keys and values; later layers may see a window alone.

Yang et al. 2024, https://arxiv.org/abs/2407.10671; GTE-Qwen2 and others embed with it.
"""

from collections.abc import Mapping
from typing import Any

from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.rotary import read_rotary, write_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.decoders import llama
from attnlens_model.families.decoders.layers import (
    GLOBAL,
    LOCAL,
    check_own_code,
    layer_windows,
    pattern_of,
    read_layer_types,
    read_reach,
    write_window,
)
from attnlens_model.family import Family

_DEFAULT_SHARED_HEADS = 32
_DEFAULT_WINDOW = 4096
_DEFAULT_GLOBAL_LAYERS = 28
POSITIONS = {"positions.max_position_embeddings": ("max_position_embeddings", 32_768)}

_CONFIG = ConfigTable(
    keys={**llama.KEYS, **llama.CAUSAL, **POSITIONS},
    activation=("hidden_act", "silu"),
    implied={**llama.IMPLIED, **llama.BIASES, "attention.bias": True, "attention.output_bias": False},
)


def read_layers(
    content: Mapping[str, object], fields: Mapping[str, object], head_dim: int | None
) -> dict[str, object]:
    """Add what Qwen2 and 3 say alike to the values of a configuration: heads, rotation, windows.

    Args:
        content: of the `config.json`.
        fields: what is known of the configuration, by path.
        head_dim: what the family takes where the file has no `head_dim`.

    Raises:
        ConfigError: a window or the list of layers is not what these families have.
    """
    check_own_code(content, "is_causal")
    whole = {
        **fields,
        **llama.read_heads(content, fields, head_dim, _DEFAULT_SHARED_HEADS),
        "attention.rotary": read_rotary(content, llama.DEFAULT_THETA),
    }
    reach, num_layers = _read_window(content, fields), fields["num_layers"]
    kinds = read_layer_types(content, num_layers)
    if kinds is None:
        first = content.get("max_window_layers", _DEFAULT_GLOBAL_LAYERS)
        if not isinstance(first, int):
            raise ConfigError(f"max_window_layers={first!r} must be an integer")
        if reach is None or not isinstance(num_layers, int):
            return whole
        kinds = [LOCAL if layer >= first else GLOBAL for layer in range(num_layers)]
    elif LOCAL in kinds and not (content.get("use_sliding_window") and content.get("sliding_window", 1)):
        raise ConfigError(
            f"layer_types says {LOCAL}, and use_sliding_window and sliding_window do not say how far: state "
            "both, or full_attention for all layers"
        )
    if reach is None:
        return whole
    return pattern_of(whole, kinds, {GLOBAL: {"attention.window": None}, LOCAL: {"attention.window": reach}})


def _read_window(content: Mapping[str, object], fields: Mapping[str, object]) -> int | None:
    """Return the reach of local layers; None where they see all of the longest input, or are not used."""
    size = content.get("sliding_window", _DEFAULT_WINDOW)
    longest = fields["positions.max_position_embeddings"]
    if not content.get("use_sliding_window", False) or size is None:
        return None
    reach = read_reach("sliding_window", size, is_causal=fields["is_causal"] is not False)
    return None if isinstance(longest, int) and reach >= longest - 1 else reach


def write_layers(values: Mapping[str, Any]) -> dict[str, object]:
    """Return the keys of a `config.json` that `read_layers` reads."""
    windows = layer_windows(values)
    reach = next((window for window in windows if window is not None), None)
    return {
        **llama.write_heads(values),
        "rope_parameters": write_rotary_parameters(values),
        "layer_types": [GLOBAL if window is None else LOCAL for window in windows],
        "use_sliding_window": reach is not None,
        "sliding_window": write_window(reach, is_causal=values["is_causal"]),
    }


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    return read_layers(content, _CONFIG.read(content), None)


def _write_config(values: Mapping[str, Any]) -> dict[str, object]:
    return _CONFIG.write(values) | write_layers(values)


FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    architecture="Qwen2Model",
    read_config=_read_config,
    write_config=_write_config,
    weights=llama.WEIGHTS,
    prefixes=llama.PREFIXES,
    anchor=llama.ANCHOR,
    roots=llama.ROOTS,
    buffers=llama.BUFFERS,
)
