"""Each extra lists the packages that the modules behind it import."""

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from installed.environment import ROOT

EXTRAS = {
    "protos/attnlens": "",
    "client/attnlens_client": "",
    "viewer/attnlens_viewer": "",
    "cli/attnlens_cli": "plot",
    "server/attnlens_server": "server",
    "server/attnlens_server/http_api": "http",
    "bulk/attnlens_ray": "ray",
    "model/attnlens_model": "export",
    "export/attnlens_export": "export",
}
# Modules that are imported only if another extra is installed.
OPTIONAL = {
    "protos/attnlens/dense.py",
    "server/attnlens_server/asgi.py",
    "server/attnlens_server/observing/tracing.py",
    "viewer/attnlens_viewer/widget.py",
}


def imported(folder: str) -> Iterator[str]:
    """Yield the third-party modules that importing a package imports."""
    others = [ROOT / other for other in EXTRAS if other.startswith(f"{folder}/")]
    for path in (ROOT / folder).rglob("*.py"):
        if str(path.relative_to(ROOT)) in OPTIONAL or any(path.is_relative_to(other) for other in others):
            continue
        for node in ast.parse(path.read_text("utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and not top.startswith("attnlens"):
                    yield name


def required(extra: str) -> set[str]:
    """Return the packages that attnlens[extra] requires directly."""
    packages: set[str] = set()
    for line in requires("attnlens") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            packages.add(canonicalize_name(requirement.name))
            if requirement.name == "attnlens":
                packages |= set().union(*map(required, requirement.extras))
    return packages


@pytest.mark.parametrize("folder", EXTRAS)
def test_extra_lists_the_imports_of_its_modules(folder: str) -> None:
    distributions = packages_distributions()
    installed, missing = required(EXTRAS[folder]), []
    for name in sorted(set(imported(folder))):
        found = {canonicalize_name(package) for package in distributions.get(name.partition(".")[0], [])}
        if installed.isdisjoint(found):
            missing.append(name)
    assert missing == []
