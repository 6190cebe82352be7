"""UltraBERT: EuroBERT with local layers, which have a window and a rotation of their own.

A window of w shows a token the w tokens on each side. Files from before the class in transformers state
`attention_windows` and `rope_theta` for each layer; newer files list the kinds of layers and nest the
rotations below them.
"""

from collections.abc import Mapping
from typing import Any

from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.rotary import read_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.decoders import llama
from attnlens_model.families.decoders.layers import (
    GLOBAL,
    LOCAL,
    layer_windows,
    pattern_of,
    read_layer_types,
    read_radius,
    read_rotation,
    write_rotations,
)
from attnlens_model.family import Family

_DEFAULT_EVERY = 3
_DEFAULT_WINDOW = 128
_DEFAULT_THETAS = {GLOBAL: 2_560_000.0, LOCAL: 10_000.0}

_CONFIG = ConfigTable(
    keys={
        **llama.KEYS,
        "positions.max_position_embeddings": ("max_position_embeddings", 32_768),
        "attention.bias": ("attention_bias", False),
        "feed_forward.up_bias": ("mlp_bias", False),
        "feed_forward.down_bias": ("mlp_bias", False),
    },
    activation=("hidden_act", "silu"),
    implied=llama.IMPLIED,
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    fields = _CONFIG.read(content)
    fields |= llama.read_heads(content, fields, None, None)
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
        layers = range(num_layers if isinstance(num_layers, int) else 0)
        kinds = [LOCAL if (layer + 1) % _DEFAULT_EVERY else GLOBAL for layer in layers] or [GLOBAL]
    thetas = _per_layer(content, "rope_theta", num_layers)
    of_kind = _DEFAULT_THETAS if thetas is None else dict(zip(kinds, thetas, strict=True))
    changes = {
        kind: {
            "attention.window": None if kind == GLOBAL else reach,
            "attention.rotary": _read_rotation(content, kind, of_kind[kind]),
        }
        for kind in set(kinds)
    }
    return pattern_of(fields, kinds, changes)


def _per_layer(content: Mapping[str, object], key: str, num_layers: object) -> list[Any] | None:
    """Return a list with a number for each layer; None if the file has none.

    Raises:
        ConfigError: It has another length, or is not a list.
    """
    stated = content.get(key)
    if stated is None:
        return None
    if not isinstance(stated, list | tuple) or len(stated) != num_layers:
        raise ConfigError(f"{key}={stated!r} is not supported: it must list a number for each layer")
    return list(stated)


def _read_rotation(content: Mapping[str, object], kind: str, theta: object) -> dict[str, object]:
    parts, longest = read_rotation(content, kind), content.get("max_position_embeddings")
    # Where a file has both, as transformers has it, `rope_theta` counts for nothing.
    default = _DEFAULT_THETAS[kind] if content.get("rope_parameters") else theta
    return read_rotary_parameters(parts, default, longest=longest)


def _write_config(values: Mapping[str, Any]) -> dict[str, object]:
    windows = layer_windows(values)
    return {
        **_CONFIG.write(values),
        **llama.write_heads(values),
        "layer_types": [GLOBAL if window is None else LOCAL for window in windows],
        "sliding_window": next((window for window in windows if window is not None), _DEFAULT_WINDOW),
        "rope_parameters": write_rotations(values),
    }


FAMILY = Family(
    name="ultrabert",
    model_types=("ultrabert",),
    architecture="UltrabertModel",
    read_config=_read_config,
    write_config=_write_config,
    weights=llama.WEIGHTS,
    prefixes=("ultrabert.", *llama.PREFIXES),
    anchor=llama.ANCHOR,
    roots=llama.ROOTS,
)
