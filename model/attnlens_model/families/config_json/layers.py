"""Reads and writes the per-layer keys of a `config.json`: layer types, windows and rotations."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from attnlens_model.config_part import flat, nested
from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.rotary import write_rotary_parameters

GLOBAL, LOCAL = "full_attention", "sliding_attention"

_Kind = TypeVar("_Kind", bound=Hashable)


def check_custom_code(content: Mapping[str, object], *keys: str) -> None:
    """Reject a model with custom code whose file does not specify whether it is causal.

    Such code often makes a decoder bidirectional, and custom code is never executed here.

    Args:
        content: Content of the `config.json`.
        keys: Keys of which at least one must have a value.

    Raises:
        ConfigError: None of the keys has a value.
    """
    code = content.get("auto_map")
    has_code = isinstance(code, Mapping) and any(str(name).startswith("AutoModel") for name in code)
    if has_code and all(content.get(key) is None for key in keys):
        raise ConfigError(
            "auto_map in config.json refers to custom code, and embedding models often make a decoder "
            f"bidirectional: add {' or '.join(keys)} to config.json, true or false as the model was trained"
        )


def read_layer_types(content: Mapping[str, object], num_layers: object) -> list[str] | None:
    """Return the type of each layer, or None if the file does not list them.

    Raises:
        ConfigError: The list contains an unknown type or has the wrong length.
    """
    stated = content.get("layer_types")
    if stated is None or not isinstance(num_layers, int):
        return None  # An invalid num_layers is rejected by EncoderConfig, which names it.
    kinds = (GLOBAL, LOCAL)
    if not isinstance(stated, list | tuple) or len(stated) != num_layers or not set(stated) <= set(kinds):
        raise ConfigError(
            f"layer_types={stated!r} is not supported: it must list {GLOBAL} or {LOCAL} for each of "
            f"{num_layers} layers"
        )
    return list(stated)


def vary_by_layer(
    fields: Mapping[str, object],
    kinds: Sequence[_Kind],
    changes: Mapping[_Kind, Mapping[str, object]],
    part: str = "attention",
) -> dict[str, object]:
    """Return configuration values in which attention, or another part, differs between layers.

    Args:
        fields: Values by path. Values of `part` apply to all layers.
        kinds: Kind of each layer.
        changes: Values by path that are added or replaced in the layers of each kind.
        part: "attention" or "feed_forward".
    """
    common = {path: value for path, value in fields.items() if path.startswith(f"{part}.")}
    values = {kind: nested(common | dict(changes[kind]))[part] for kind in set(kinds)}
    others = {path: value for path, value in fields.items() if path not in common}
    return others | {part: [values[kind] for kind in kinds]}


def layer_windows(values: Mapping[str, Any]) -> list[int | None]:
    """Return the window of each layer, given the argument of `Family.write_config`."""
    pattern = values["attention"]
    return [pattern[layer % len(pattern)].get("window") for layer in range(values["num_layers"])]


def local_window(values: Mapping[str, Any]) -> int | None:
    """Return the window of the local layers, or None if all layers are global."""
    return next((window for window in layer_windows(values) if window is not None), None)


def write_layer_types(values: Mapping[str, Any]) -> dict[str, object]:
    """Return `layer_types`, given the argument of `Family.write_config`."""
    return {"layer_types": [GLOBAL if window is None else LOCAL for window in layer_windows(values)]}


def write_rotations(values: Mapping[str, Any]) -> dict[str, object]:
    """Return `rope_parameters` by layer type, given the argument of `Family.write_config`."""
    rotations = {GLOBAL if part.get("window") is None else LOCAL: part for part in values["attention"]}
    return {
        "rope_parameters": {
            kind: write_rotary_parameters(flat({"rotary": part.get("rotary")}, "attention"))
            for kind, part in rotations.items()
        }
    }
