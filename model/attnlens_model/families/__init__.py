"""The registry of families: every module of this package and those below it that defines `FAMILY`.

Adding a family means adding a module; nothing else changes. Folders group families by how positions reach
their attention.
"""

import importlib
import pkgutil
from collections.abc import Mapping

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


def family_of_config(content: Mapping[str, object]) -> Family:
    """Return the family that the content of a Hugging Face `config.json` belongs to.

    It is told by `model_type`; among families with the same one, by what each claims.

    Raises:
        ConfigError: none claims it; the message says what it is, if known, and which are supported.
    """
    model_type = str(content["model_type"])
    families = [family for family in FAMILIES.values() if model_type in family.model_types]
    if not families:
        supported = sorted({known for family in FAMILIES.values() for known in family.model_types})
        raise ConfigError(refusal(content, supported))
    claiming = [family for family in families if family.claims is not None and family.claims(content)]
    return (claiming or [family for family in families if family.claims is None])[0]
