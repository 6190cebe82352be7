"""Every module that does not need PyTorch can be imported on each tested Python version."""

import importlib
import pkgutil

import pytest

# Without `widget`, which needs the extra `notebook`.
PACKAGES = [
    "attnlens",
    "attnlens_server",
    "attnlens_client",
    "attnlens_viewer",
    "attnlens_analysis",
    "attnlens_bulk",
    "attnlens_cli",
]
OF_EXTRAS = {"attnlens_viewer.widget"}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_can_be_imported(package: str) -> None:
    found = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
    names = [module.name for module in found if module.name not in OF_EXTRAS]
    assert len(names) > 3
    for name in names:
        importlib.import_module(name)
