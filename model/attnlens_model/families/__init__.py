"""The registry of families: every module of this package that defines `FAMILY`.

Adding a family means adding a module here; nothing else changes.
"""

import importlib
import pkgutil

from attnlens_model.errors import ConfigError, nearest
from attnlens_model.family import Family


def _discover() -> dict[str, Family]:
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    families: list[Family] = [module.FAMILY for module in modules]
    return {family.name: family for family in families}


FAMILIES = _discover()

# Near relatives of a family that are not of it: the nearest name would be bad advice.
_NOT_IMPLEMENTED = {
    "deberta": "version 1 keeps query, key and value interleaved in one tensor, which this version does not "
    "read; versions 2 and 3 (model_type 'deberta-v2') are supported",
    "umt5": "each of its layers has a bias by distance of its own, which this version does not read; the "
    "nearest that is supported is mT5 (model_type 'mt5'), where all layers share that of the first",
}


def family_named(name: str) -> Family:
    """Return the family with our name `name`.

    Raises:
        ConfigError: there is none; the message names those that exist and the nearest.
    """
    if name not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"family={name!r} is not supported: choose one of {supported} "
            f"(nearest: {nearest(name, FAMILIES)!r})"
        )
    return FAMILIES[name]


def family_of_model_type(model_type: str) -> Family:
    """Return the family that a Hugging Face `model_type` belongs to.

    Raises:
        ConfigError: none claims it; the message names those that are supported and the nearest.
    """
    by_model_type = {known: family for family in FAMILIES.values() for known in family.model_types}
    if model_type in _NOT_IMPLEMENTED:
        raise ConfigError(f"model_type={model_type!r} is not supported: {_NOT_IMPLEMENTED[model_type]}")
    if model_type not in by_model_type:
        supported = ", ".join(sorted(by_model_type))
        raise ConfigError(
            f"model_type={model_type!r} is not supported: this version reads {supported} "
            f"(nearest: {nearest(model_type, by_model_type)!r})"
        )
    return by_model_type[model_type]
