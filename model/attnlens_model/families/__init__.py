"""Registry of families: all modules in this package and its subpackages that define `FAMILY`.

To add a family, add a module. Subpackages group families by how attention uses positions.
"""

import importlib
import pkgutil
from collections.abc import Mapping

from attnlens_model.errors import ConfigError, suggestion
from attnlens_model.family import Family


def _discover() -> dict[str, Family]:
    names = [module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    families: list[Family] = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.name: family for family in families}


FAMILIES = _discover()

SUPPORTED_TYPES = tuple(sorted({known for family in FAMILIES.values() for known in family.model_types}))
"""`model_type` values of a Hugging Face `config.json` that our encoder computes."""


def family_named(name: str) -> Family:
    """Return the family `name`.

    Raises:
        ConfigError: There is no such family. The message lists the supported families.
    """
    if name not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"family={name!r} is not supported{suggestion(name, FAMILIES)}: choose one of {supported}"
        )
    return FAMILIES[name]


def family_of_config(content: Mapping[str, object]) -> Family:
    """Return the family of a Hugging Face `config.json`.

    The family is selected by `model_type`. If several families share it, `Family.claims` decides.

    Raises:
        ConfigError: `model_type` is not supported. The message lists the supported types.
    """
    model_type = str(content["model_type"])
    families = [family for family in FAMILIES.values() if model_type in family.model_types]
    if not families:
        supported = ", ".join(SUPPORTED_TYPES) + suggestion(model_type, SUPPORTED_TYPES)
        raise ConfigError(
            f"model_type={model_type!r} is none of {supported}: other encoders are those of transformers, "
            "for which the directory of a checkpoint is needed; export an older bundle again"
        )
    claiming = [family for family in families if family.claims is not None and family.claims(content)]
    return (claiming or [family for family in families if family.claims is None])[0]
