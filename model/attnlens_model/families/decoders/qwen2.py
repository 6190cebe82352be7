"""Qwen2 and 2.5: Llama with biases on queries, keys and values; later layers may have a sliding window.

Yang et al. 2024, https://arxiv.org/abs/2407.10671. Embedding models such as GTE-Qwen2 use it.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.layers import (
    GLOBAL,
    LOCAL,
    check_custom_code,
    local_window,
    read_layer_types,
    read_reach,
    vary_by_layer,
    write_layer_types,
    write_window,
)
from attnlens_model.families.config_json.rotary import read_rotary
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.decoders import llama

_DEFAULT_KEY_VALUE_HEADS = 32
_DEFAULT_WINDOW = 4096
_DEFAULT_GLOBAL_LAYERS = 28
POSITIONS = {"positions.max_position_embeddings": ("max_position_embeddings", 32_768)}

_CONFIG = ConfigTable(
    keys={**llama.KEYS, **llama.CAUSAL, **POSITIONS},
    activation=("hidden_act", "silu"),
    implied={
        **llama.IMPLIED,
        **llama.NO_FEED_FORWARD_BIAS,
        "attention.bias": True,
        "attention.output_bias": False,
    },
)


def read_config(
    table: ConfigTable, content: Mapping[str, object], head_dim: int | None = None
) -> dict[str, object]:
    """Return the values of `table`, the heads, the rotation and the windows of Qwen2 or Qwen3.

    Args:
        table: Keys of the family.
        content: Content of the `config.json`.
        head_dim: The family's default of `head_dim`. If None, hidden_size / num_heads.

    Raises:
        ConfigError: A window or the list of layer types is not supported.
    """
    table_fields = table.read(content)
    check_custom_code(content, "is_causal")
    fields = {
        **table_fields,
        **llama.read_heads(content, table_fields, head_dim, _DEFAULT_KEY_VALUE_HEADS),
        "attention.rotary": read_rotary(content, llama.DEFAULT_THETA),
    }
    reach, num_layers = _read_window(content, fields), fields["num_layers"]
    kinds = read_layer_types(content, num_layers)
    if kinds is None:
        first = content.get("max_window_layers", _DEFAULT_GLOBAL_LAYERS)
        if not isinstance(first, int):
            raise ConfigError(f"max_window_layers={first!r} must be an integer")
        if reach is None or not isinstance(num_layers, int):
            return fields
        kinds = [LOCAL if layer >= first else GLOBAL for layer in range(num_layers)]
    elif LOCAL in kinds and not (content.get("use_sliding_window") and content.get("sliding_window", 1)):
        raise ConfigError(
            f"layer_types contains {LOCAL}, but use_sliding_window or sliding_window is not set: set both or "
            "use full_attention for all layers"
        )
    if reach is None:
        return fields
    changes: dict[str, dict[str, object]] = {
        GLOBAL: {"attention.window": None},
        LOCAL: {"attention.window": reach},
    }
    return vary_by_layer(fields, kinds, changes)


def _read_window(content: Mapping[str, object], fields: Mapping[str, object]) -> int | None:
    """Return the reach of local layers, or None if they are unused or the window covers the longest input."""
    size = content.get("sliding_window", _DEFAULT_WINDOW)
    max_tokens = fields["positions.max_position_embeddings"]
    if not content.get("use_sliding_window", False) or size is None:
        return None
    reach = read_reach("sliding_window", size, is_causal=fields["is_causal"] is not False)
    return None if isinstance(max_tokens, int) and reach >= max_tokens - 1 else reach


def write_config(table: ConfigTable, values: Mapping[str, Any]) -> dict[str, object]:
    """Return the content of a `config.json`; the inverse of `read_config`."""
    reach = local_window(values)
    return {
        **llama.write_config(table, values),
        **write_layer_types(values),
        "use_sliding_window": reach is not None,
        "sliding_window": write_window(reach, is_causal=values["is_causal"]),
    }


FAMILY = replace(
    llama.FAMILY,
    name="qwen2",
    model_types=("qwen2",),
    architecture="Qwen2Model",
    read_config=partial(read_config, _CONFIG),
    write_config=partial(write_config, _CONFIG),
)
