"""What the `config.json` of a decoder says about its layers: which tokens each of them sees.

The windows are those of transformers' `masking_utils`: a causal window of the size w shows a token itself and
the w - 1 before it; one of a file with `is_causal` false shows it the w on each side.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from attnlens_model.config_part import flat, nested
from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.rotary import as_mapping, write_rotary_parameters

GLOBAL, LOCAL = "full_attention", "sliding_attention"
_MIN_WINDOW = 2


def check_own_code(content: Mapping[str, object], *stated: str) -> None:
    """Refuse a model with code of its own whose file does not say whether it is causal.

    Such code often lets every token of a decoder see all others, and it is never run here.

    Args:
        content: of the `config.json`.
        stated: the keys of which one says it.

    Raises:
        ConfigError: none is there.
    """
    own_code = content.get("auto_map")
    has_own = isinstance(own_code, Mapping) and any(str(name).startswith("AutoModel") for name in own_code)
    if has_own and not any(key in content for key in stated):
        raise ConfigError(
            "auto_map in config.json names code of the publisher's own, and embedders often change a decoder "
            f"so that each token sees all others: add {' or '.join(stated)} to config.json, true or false as "
            "the model was trained"
        )


def read_reach(key: str, size: object, *, is_causal: bool) -> int:
    """Return how many places away a token sees a key in a window of `size`, the value of `key`.

    Raises:
        ConfigError: the size is not an integer of at least 2.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < _MIN_WINDOW:
        raise ConfigError(f"{key}={size!r} is not supported: it must be an integer of at least {_MIN_WINDOW}")
    return size - 1 if is_causal else size


def write_window(reach: int | None, *, is_causal: bool) -> int | None:
    """Return the size of a window; the inverse of `read_reach`."""
    return reach + 1 if is_causal and reach is not None else reach


def read_radius(size: object) -> int:
    """Return the value of a `sliding_window` that is a radius: a token sees so many tokens on each side.

    Raises:
        ConfigError: The size is not an integer of at least 1.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"sliding_window={size!r} is not supported: it must be an integer of at least 1")
    return size


def read_rotation(content: Mapping[str, object], kind: str) -> Mapping[str, object]:
    """Return what `rope_parameters` says of one kind of layer; empty where the file does not have it.

    Raises:
        ConfigError: It does not state parameters for each kind.
    """
    stated = as_mapping(content.get("rope_parameters"), "rope_parameters")
    if stated and not set(stated) <= {GLOBAL, LOCAL}:
        raise ConfigError(
            f"rope_parameters={dict(stated)!r} is not supported: it must have {GLOBAL} and {LOCAL}, each "
            "with parameters of its own"
        )
    return as_mapping(stated.get(kind), f"rope_parameters.{kind}")


def write_rotations(values: Mapping[str, Any]) -> dict[str, object]:
    """Return `rope_parameters` by kind of layer, given values as `Family.write_config` gets them."""
    rotations = {GLOBAL if part.get("window") is None else LOCAL: part for part in values["attention"]}
    return {
        kind: write_rotary_parameters(flat({"rotary": part.get("rotary")}, "attention"))
        for kind, part in rotations.items()
    }


def read_layer_types(content: Mapping[str, object], num_layers: object) -> list[str] | None:
    """Return the kind of each layer; None where the file does not list them.

    Raises:
        ConfigError: it lists other kinds, or another number of them.
    """
    stated = content.get("layer_types")
    if stated is None or not isinstance(num_layers, int):
        return None  # The number is refused, with its name, when the configuration is made.
    kinds = (GLOBAL, LOCAL)
    if not isinstance(stated, list | tuple) or len(stated) != num_layers or not set(stated) <= set(kinds):
        raise ConfigError(
            f"layer_types={stated!r} is not supported: it must say {GLOBAL} or {LOCAL} for each of "
            f"{num_layers} layers"
        )
    return list(stated)


def default_layer_types(content: Mapping[str, object], num_layers: object, default_every: int) -> list[str]:
    """Return the kind of each layer of a file without a list: each `sliding_window_pattern`-th is global.

    Raises:
        ConfigError: The key is not an integer of at least 1.
    """
    every = content.get("sliding_window_pattern", default_every)
    if not isinstance(every, int) or every < 1:
        raise ConfigError(f"sliding_window_pattern={every!r} must be an integer of at least 1")
    layers = range(num_layers if isinstance(num_layers, int) else 0)
    return [LOCAL if (layer + 1) % every else GLOBAL for layer in layers] or [GLOBAL]


def pattern_of(
    fields: Mapping[str, object], kinds: Sequence[str], changes: Mapping[str, Mapping[str, object]]
) -> dict[str, object]:
    """Return the values of a configuration whose attention differs from layer to layer.

    Args:
        fields: by path; those of attention hold for all layers.
        kinds: of the layers.
        changes: by kind, what its layers have beside them or instead, by path.
    """
    common = {path: value for path, value in fields.items() if path.startswith("attention.")}
    of_kind = {kind: nested(common | dict(changes[kind]))["attention"] for kind in set(kinds)}
    rest = {path: value for path, value in fields.items() if path not in common}
    return rest | {"attention": [of_kind[kind] for kind in kinds]}


def layer_windows(values: Mapping[str, Any]) -> list[int | None]:
    """Return the window of each layer, given values as `Family.write_config` gets them."""
    pattern = values["attention"]
    return [pattern[layer % len(pattern)].get("window") for layer in range(values["num_layers"])]
