"""The registry of families: every module of this package and those below it that defines `FAMILY`.

Adding a family means adding a module; nothing else changes. Folders group families by how positions reach
their attention.
"""

import importlib
import pkgutil

from attnlens_model.errors import ConfigError, suggestion
from attnlens_model.family import Family
from attnlens_model.other_models import refusal


def _discover() -> dict[str, Family]:
    names = [module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    families: list[Family] = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.name: family for family in families}


FAMILIES = _discover()


def family_named(name: str) -> Family:
    """Return the family with our name `name`.

    Raises:
        ConfigError: there is none; the message names those that exist.
    """
    if name not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"family={name!r} is not supported{suggestion(name, FAMILIES)}: choose one of {supported}"
        )
    return FAMILIES[name]


def family_of_model_type(model_type: str, architectures: object = None) -> Family:
    """Return the family that a Hugging Face `model_type` belongs to.

    Args:
        model_type: as `config.json` says.
        architectures: what it says under that key.

    Raises:
        ConfigError: none claims it; the message says what it is, if known, and which are supported.
    """
    by_model_type = {known: family for family in FAMILIES.values() for known in family.model_types}
    if model_type not in by_model_type:
        raise ConfigError(refusal(model_type, architectures, sorted(by_model_type)))
    return by_model_type[model_type]
