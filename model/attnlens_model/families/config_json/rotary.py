"""Reads and writes the rotary position embedding keys of a `config.json`, in current and older formats."""

from collections.abc import Mapping

from attnlens_model.errors import ConfigError

_KINDS = ("default", "linear", "dynamic", "llama3")
_SCALING_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")


def read_rotary(
    content: Mapping[str, object], default_theta: object, head_dim: int | None = None
) -> dict[str, object]:
    """Return the fields of a `RotaryConfig`.

    Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (earlier versions).

    Args:
        content: Content of the `config.json`.
        default_theta: The family's default of theta.
        head_dim: Head size K, if the family supports "ntk" scaling.

    Raises:
        ConfigError: See `read_rotary_parameters`.
    """
    parameters = as_mapping(content.get("rope_scaling"), "rope_scaling") or as_mapping(
        content.get("rope_parameters"), "rope_parameters"
    )
    stated = content.get("rope_theta")
    merged = {"partial_rotary_factor": content.get("partial_rotary_factor")} | dict(parameters)
    if "original_max_position_embeddings" in content:
        merged["original_max_position_embeddings"] = content["original_max_position_embeddings"]
    theta = default_theta if stated is None else stated
    return read_rotary_parameters(merged, theta, head_dim, content.get("max_position_embeddings"))


def read_rotary_parameters(
    parameters: Mapping[str, object],
    default_theta: object,
    head_dim: int | None = None,
    max_positions: object = None,
) -> dict[str, object]:
    """Return the fields of a `RotaryConfig` from one set of parameters.

    "linear" divides every frequency by the factor. "dynamic" only affects inputs longer than
    `max_position_embeddings`, which are always rejected here. "ntk" is the fixed variant in the custom code
    of the GTE models: theta is multiplied by the factor, and every frequency is divided by factor^(2/K).
    "llama3" is `FrequencyScalingConfig`; its original length defaults to `max_positions`.

    Raises:
        ConfigError: The scaling type is not supported, only part of the head is rotated, or a value is not a
            positive number.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    known = _KINDS if head_dim is None else (*_KINDS, "ntk")
    if kind not in known:
        raise ConfigError(
            f"rope_type={kind!r} is not supported: choose one of {', '.join(known)}. A model trained "
            "without scaling can be used with rope_type 'default' up to its training length"
        )
    fraction = parameters.get("partial_rotary_factor")
    if fraction not in (None, 1, 1.0):
        raise ConfigError(f"partial_rotary_factor={fraction!r} is not supported: only 1.0 (full rotation) is")
    if parameters.get("mixed_b") is not None:
        raise ConfigError(
            f"mixed_b={parameters['mixed_b']!r} is not supported: only 'ntk' without mixed_b is"
        )
    theta = positive_number("rope_theta", parameters.get("rope_theta", default_theta))
    if kind in ("default", "dynamic"):
        return {"theta": theta, "divisor": 1.0}
    if kind == "llama3":
        return {"theta": theta, "divisor": 1.0, "scaling": _read_scaling(parameters, max_positions)}
    factor = positive_number("factor", parameters.get("factor"))
    if head_dim is None or kind == "linear":
        return {"theta": theta, "divisor": factor}
    return {"theta": theta * factor, "divisor": factor ** (2 / head_dim)}


def write_rotary_parameters(values: Mapping[str, object]) -> dict[str, object]:
    """Return the equivalent `rope_parameters`, given `EncoderConfig` values by path."""
    theta, divisor = values.get("attention.rotary.theta"), values.get("attention.rotary.divisor", 1.0)
    path = "attention.rotary.scaling."
    scaling = {key.removeprefix(path): value for key, value in values.items() if key.startswith(path)}
    if scaling:
        return {"rope_type": "llama3", "rope_theta": theta, **scaling}
    if divisor == 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "linear", "rope_theta": theta, "factor": divisor}


def as_mapping(value: object, name: str) -> Mapping[str, object]:
    """Return the object at the key `name`. If it is null, return an empty mapping.

    Raises:
        ConfigError: The value is not an object.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r} must be an object")
    return value


def _read_scaling(parameters: Mapping[str, object], max_positions: object) -> dict[str, object]:
    length = parameters.get("original_max_position_embeddings", max_positions)
    factors = {name: positive_number(name, parameters.get(name)) for name in _SCALING_FACTORS}
    return {**factors, "original_max_position_embeddings": length}


def positive_number(name: str, value: object) -> float:
    """Return the value of the key `name`, a positive number.

    Raises:
        ConfigError: The value is not a number or not positive.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{name}={value!r} must be a number greater than 0")
    return float(value)
