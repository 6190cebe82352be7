"""UltraBERT: EuroBERT with local layers, which have a window and a separate rotation.

A window of w covers w tokens on each side. Files that predate the class in transformers specify
`attention_windows` and `rope_theta` for each layer; newer files list the layer types and group the rotations
by type.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.layers import (
    GLOBAL,
    LOCAL,
    alternate_layer_types,
    local_window,
    read_layer_types,
    read_radius,
    read_rotation,
    vary_by_layer,
    write_layer_types,
    write_rotations,
)
from attnlens_model.families.config_json.rotary import read_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.decoders import llama

_DEFAULT_EVERY = 3
_DEFAULT_WINDOW = 128
_DEFAULT_THETAS = {GLOBAL: 2_560_000.0, LOCAL: 10_000.0}

_CONFIG = ConfigTable(
    keys={
        **llama.KEYS,
        **llama.BIASES,
        "positions.max_position_embeddings": ("max_position_embeddings", 32_768),
    },
    activation=("hidden_act", "silu"),
    implied=llama.IMPLIED,
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    fields = _CONFIG.read(content)
    fields |= llama.read_heads(content, fields)
    num_layers = fields["num_layers"]
    windows = _per_layer(content, "attention_windows", num_layers)
    window = content.get("sliding_window", _DEFAULT_WINDOW)
    kinds = read_layer_types(content, num_layers)
    if windows is not None:
        window = next((size for size in windows if size), window)
        kinds = kinds or [LOCAL if size else GLOBAL for size in windows]
        if {size for size in windows if size} - {window}:
            raise ConfigError(f"attention_windows={windows!r} is not supported: the windows must be equal")
    reach = read_radius(window)
    if kinds is None:
        kinds = alternate_layer_types(num_layers, _DEFAULT_EVERY)
    thetas = _per_layer(content, "rope_theta", num_layers)
    theta_by_kind = _DEFAULT_THETAS if thetas is None else dict(zip(kinds, thetas, strict=True))
    changes = {
        kind: {
            "attention.window": None if kind == GLOBAL else reach,
            "attention.rotary": _read_rotation(content, kind, theta_by_kind[kind]),
        }
        for kind in set(kinds)
    }
    return vary_by_layer(fields, kinds, changes)


def _per_layer(content: Mapping[str, object], key: str, num_layers: object) -> list[Any] | None:
    """Return the list of numbers at `key`, one per layer, or None if the key is absent.

    Raises:
        ConfigError: The value is not a list or has the wrong length.
    """
    stated = content.get(key)
    if stated is None:
        return None
    if not isinstance(stated, list | tuple) or len(stated) != num_layers:
        raise ConfigError(f"{key}={stated!r} is not supported: it must list a number for each layer")
    return list(stated)


def _read_rotation(content: Mapping[str, object], kind: str, theta: object) -> dict[str, object]:
    parts, max_positions = read_rotation(content, kind), content.get("max_position_embeddings")
    # rope_parameters take precedence over rope_theta, as in transformers.
    default = _DEFAULT_THETAS[kind] if content.get("rope_parameters") else theta
    return read_rotary_parameters(parts, default, max_positions=max_positions)


def _write_config(values: Mapping[str, Any]) -> dict[str, object]:
    return {
        **_CONFIG.write(values),
        **llama.write_heads(values),
        **write_layer_types(values),
        **write_rotations(values),
        "sliding_window": local_window(values) or _DEFAULT_WINDOW,
    }


FAMILY = replace(
    llama.FAMILY,
    name="ultrabert",
    model_types=("ultrabert",),
    architecture="UltrabertModel",
    read_config=_read_config,
    write_config=_write_config,
    prefixes=("ultrabert.", *llama.FAMILY.prefixes),
    buffers={},
)
