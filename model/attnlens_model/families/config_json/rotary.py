"""What a `config.json` says about rotary position embedding, in the many ways in which it has been said."""

from collections.abc import Mapping

from attnlens_model.errors import ConfigError

_KINDS = ("default", "linear", "dynamic", "llama3")
_SCALING_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")


def read_rotary(
    content: Mapping[str, object], default_theta: object, head_dim: int | None = None
) -> dict[str, object]:
    """Return the fields of a `RotaryConfig`.

    They come from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
        content: of the `config.json`.
        default_theta: what the family takes where the file names none.
        head_dim: K, where the family knows the kind "ntk".

    Raises:
        ConfigError: as `read_rotary_parameters`.
    """
    parameters = as_mapping(content.get("rope_scaling"), "rope_scaling") or as_mapping(
        content.get("rope_parameters"), "rope_parameters"
    )
    stated = content.get("rope_theta")
    whole = {"partial_rotary_factor": content.get("partial_rotary_factor")} | dict(parameters)
    if "original_max_position_embeddings" in content:
        whole["original_max_position_embeddings"] = content["original_max_position_embeddings"]
    theta, longest = default_theta if stated is None else stated, content.get("max_position_embeddings")
    return read_rotary_parameters(whole, theta, head_dim, longest)


def read_rotary_parameters(
    parameters: Mapping[str, object],
    default_theta: object,
    head_dim: int | None = None,
    longest: object = None,
) -> dict[str, object]:
    """Return the fields of a `RotaryConfig` from one set of parameters.

    "linear" divides every frequency by its factor. "dynamic" changes nothing up to
    `max_position_embeddings` tokens, and more are never taken here. "ntk" is the fixed form in the code that
    came with the GTE models: theta is multiplied by the factor, every frequency divided by factor^(2/K).
    "llama3" is `FrequencyScalingConfig`; its length of training is `longest` where it names none.

    Raises:
        ConfigError: another kind, a part of the head that is not rotated, or what should be a number is not.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    known = _KINDS if head_dim is None else (*_KINDS, "ntk")
    if kind not in known:
        raise ConfigError(
            f"rope_type={kind!r} is not supported: this version knows {', '.join(known)}; a model that was "
            "trained without scaling can be used with rope_type 'default' up to the length it was trained on"
        )
    share = parameters.get("partial_rotary_factor")
    if share not in (None, 1, 1.0):
        raise ConfigError(f"partial_rotary_factor={share!r} is not supported: only 1.0, the whole head, is")
    if parameters.get("mixed_b") is not None:
        raise ConfigError(
            f"mixed_b={parameters['mixed_b']!r} is not supported: only the plain kind of 'ntk' is"
        )
    theta = _number("rope_theta", parameters.get("rope_theta", default_theta))
    if kind in ("default", "dynamic"):
        return {"theta": theta, "divisor": 1.0}
    if kind == "llama3":
        return {"theta": theta, "divisor": 1.0, "scaling": _read_scaling(parameters, longest)}
    factor = _number("factor", parameters.get("factor"))
    if head_dim is None or kind == "linear":
        return {"theta": theta, "divisor": factor}
    return {"theta": theta * factor, "divisor": factor ** (2 / head_dim)}


def write_rotary_parameters(values: Mapping[str, object]) -> dict[str, object]:
    """Return `rope_parameters` of the same rotation, from values of an `EncoderConfig` by path."""
    theta, divisor = values.get("attention.rotary.theta"), values.get("attention.rotary.divisor", 1.0)
    path = "attention.rotary.scaling."
    scaling = {key.removeprefix(path): value for key, value in values.items() if key.startswith(path)}
    if scaling:
        return {"rope_type": "llama3", "rope_theta": theta, **scaling}
    if divisor == 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "linear", "rope_theta": theta, "factor": divisor}


def as_mapping(value: object, name: str) -> Mapping[str, object]:
    """Return the value of the key `name`, an object; null is an empty one.

    Raises:
        ConfigError: neither.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r} must be an object")
    return value


def _read_scaling(parameters: Mapping[str, object], longest: object) -> dict[str, object]:
    length = parameters.get("original_max_position_embeddings", longest)
    factors = {name: _number(name, parameters.get(name)) for name in _SCALING_FACTORS}
    return {**factors, "original_max_position_embeddings": length}


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{name}={value!r} must be a number greater than 0")
    return float(value)
