"""`ConfigPart`: base class of configuration dataclasses, with validation and JSON parsing.

Every value has a unique path in the configuration, such as `attention.num_heads`, which error messages and
the tables of families use.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from attnlens_model.errors import ConfigError, nearest, suggestion

Kinds = Mapping[type["ConfigPart"], Mapping[str, type["ConfigPart"]]]
"""Subclasses of a polymorphic part by the value of their `kind` field."""

# Upper limits by field name, far beyond any real encoder. They prevent excessive memory use and run time
# before the sizes are compared with the weights.
_MAX_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("num_layers", "num_heads", "num_key_value_heads", "num_experts"), 1 << 12),
    **dict.fromkeys(("num_buckets", "distance_buckets", "num_random_blocks", "kernel_size", "rank"), 1 << 12),
    **dict.fromkeys(("hidden_size", "output_size", "head_size", "size"), 1 << 17),
    **dict.fromkeys(("block_size", "num_global_tokens"), 1 << 17),
    **dict.fromkeys(("intermediate_size", "max_position_embeddings", "max_relative_positions"), 1 << 20),
    **dict.fromkeys(("vocab_size", "type_vocab_size", "task_vocab_size", "pad_token_id"), 1 << 24),
}


def check_size(path: str, value: object, key: str | None = None) -> None:
    """Validate that a size does not exceed its limit.

    Args:
        path: Path of the value in `EncoderConfig`.
        value: The size. Non-integers are ignored.
        key: Key in the source file, for the error message. Defaults to `path`.

    Raises:
        ConfigError: The size exceeds its limit.
    """
    limit = _MAX_SIZES.get(path.rpartition(".")[2])
    if limit is not None and isinstance(value, int) and value > limit:
        raise ConfigError(f"{key or path}={value}: must be at most {limit:,}")


@dataclass(frozen=True, kw_only=True)
class ConfigPart:
    """Base class of configuration parts: frozen dataclasses whose annotations are enforced on construction.

    An annotation is int, float, bool, str, a `Literal` of strings, a part, a tuple of parts, or a union of
    these, optionally with None.

    Raises:
        ConfigError: A value has the wrong type, is not in its `Literal`, or fails `_check`.
    """

    path: ClassVar[str] = ""

    def __init_subclass__(cls, path: str | None = None) -> None:
        """Set the path of this part in the configuration. Defaults to the path of the base class."""
        cls.path = cls.path if path is None else path

    def __post_init__(self) -> None:
        for name, wanted in field_types(type(self)).items():
            _check_type(join(self.path, name), getattr(self, name), wanted)
            check_size(join(self.path, name), getattr(self, name))
        self._check()

    def _check(self) -> None:
        """Validate constraints that the annotations cannot express."""

    def require(self, name: str, holds: bool, limit: str) -> None:
        """Reject the value of field `name` unless `holds`; `limit` describes the valid values.

        Raises:
            ConfigError: `holds` is false.
        """
        if not holds:
            raise ConfigError(f"{join(self.path, name)}={getattr(self, name)!r}: {limit}")

    @classmethod
    def read(cls, values: Mapping[str, object], kinds: Kinds) -> Self:
        """Create the part, including nested parts, from a JSON object.

        Raises:
            ConfigError: A key is unknown or missing, or a value is invalid.
        """
        return cls(**_Reader(cls, kinds).fields(cls, values, cls.path))


def join(path: str, name: str) -> str:
    """Return the path of the field `name` of the part at `path`."""
    return f"{path}.{name}" if path else name


def is_positive(value: float) -> bool:
    """Return whether the number is greater than 0 and representable as a float (an int may be too large)."""
    return 0 < value <= sys.float_info.max


def field_types(part: type[ConfigPart]) -> dict[str, Any]:
    """Return the field annotations of a part by name."""
    hints = get_type_hints(part)
    return {field.name: hints[field.name] for field in dataclasses.fields(part)}


def known_paths(part: type[ConfigPart], kinds: Kinds) -> Iterator[str]:
    """Yield the paths of all fields of a part and its nested parts, for all kinds."""
    for name, wanted in field_types(part).items():
        yield join(part.path, name)
        for inner in parts_in(wanted):
            for kind in kinds.get(inner, {"": inner}).values():
                yield from known_paths(kind, kinds)


def flat(values: Mapping[str, object], path: str = "") -> dict[str, object]:
    """Flatten nested objects to values by path. Lists are not flattened."""
    result: dict[str, object] = {}
    for name, value in values.items():
        inner = join(path, name)
        result |= flat(value, inner) if isinstance(value, Mapping) else {inner: value}
    return result


def nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Convert values by path to nested objects; the inverse of `flat`."""
    result: dict[str, Any] = {}
    for path, value in values.items():
        *parts, name = path.split(".")
        target = result
        for part in parts:
            target = target.setdefault(part, {})
        target[name] = value
    return result


class _Reader:
    """Creates parts from JSON objects."""

    def __init__(self, root: type[ConfigPart], kinds: Kinds) -> None:
        self.kinds = kinds
        # Used to suggest the right part for a misplaced key.
        self.paths = {path.rpartition(".")[2]: path for path in known_paths(root, kinds)}

    def fields(self, part: type[ConfigPart], values: Mapping[str, object], path: str) -> dict[str, Any]:
        """Return the constructor arguments of a part, with nested parts created."""
        types = field_types(part)
        for key in values:
            if key not in types:
                paths = self.paths | {name: join(path, name) for name in types}
                match = nearest(key, paths)
                close = f" (did you mean {paths[match]!r}?)" if match else ""
                raise ConfigError(
                    f"unknown key {join(path, key)!r}{close}: the keys are those of "
                    "docs/configuration.md, or those of a Hugging Face config.json with its model_type"
                )
        required = [field.name for field in dataclasses.fields(part) if _is_required(field)]
        if missing := [join(path, name) for name in required if name not in values]:
            names = ", ".join(join(path, name) for name in required)
            raise ConfigError(f"missing {', '.join(missing)}: a configuration requires {names}")
        return {name: self.value(value, types[name], join(path, name)) for name, value in values.items()}

    def value(self, value: object, wanted: object, path: str) -> object:
        """Create a part from an object, or parts from a list. Other values are validated on construction."""
        part = next(parts_in(wanted), None)
        if part is None:
            return value
        may_be_list = any(get_origin(option) is tuple for option in _alternatives(wanted))
        if may_be_list and isinstance(value, list | tuple):
            return tuple(self.value(item, part, f"{path}[{index}]") for index, item in enumerate(value))
        if not isinstance(value, Mapping):
            return value
        if part in self.kinds:
            part = self._kind(self.kinds[part], value.get("kind"), path)
        return part(**self.fields(part, value, path))

    def _kind(self, kinds: Mapping[str, type[ConfigPart]], kind: object, path: str) -> type[ConfigPart]:
        if not isinstance(kind, str) or kind not in kinds:
            names, close = ", ".join(kinds), suggestion(str(kind), kinds)
            raise ConfigError(f"{path}.kind={kind!r} is not supported{close}: choose one of {names}")
        return kinds[kind]


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _alternatives(wanted: object) -> tuple[Any, ...]:
    return get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)


def parts_in(wanted: object) -> Iterator[type[ConfigPart]]:
    """Yield the part class that an annotation allows, directly or in a tuple."""
    for option in _alternatives(wanted):
        if isinstance(option, type) and issubclass(option, ConfigPart):
            yield option


def _check_type(path: str, value: object, wanted: object) -> None:
    if any(_accepts(value, option) for option in _alternatives(wanted)):
        return
    if get_origin(wanted) is Literal and isinstance(value, str):
        choices = get_args(wanted)
        close = suggestion(value, choices)
        raise ConfigError(f"{path}={value!r} is not supported{close}: choose one of {', '.join(choices)}")
    names = " or ".join(_name(option) for option in _alternatives(wanted))
    raise ConfigError(f"{path}={value!r} is {type(value).__name__}: it must be {names}")


def _accepts(value: object, wanted: Any) -> bool:  # noqa: ANN401 - any annotation
    if get_origin(wanted) is Literal:
        return value in get_args(wanted)
    if get_origin(wanted) is tuple:
        return (
            isinstance(value, tuple) and bool(value) and all(_accepts(x, get_args(wanted)[0]) for x in value)
        )
    if issubclass(wanted, ConfigPart):
        return isinstance(value, wanted)
    # `isinstance` would accept True as an int. Ints are accepted as floats.
    return type(value) in ((int, float) if wanted is float else (wanted,))


def _name(wanted: Any) -> str:  # noqa: ANN401 - any annotation
    if get_origin(wanted) is tuple:
        return "a list of objects"
    if get_origin(wanted) is Literal:
        return "str"
    if issubclass(wanted, ConfigPart):
        return "an object"
    return "null" if wanted is NoneType else str(wanted.__name__)
