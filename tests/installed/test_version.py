"""The version in pyproject.toml matches the first changelog entry."""

import re
import tomllib

from installed.environment import ROOT


def test_changelog_begins_with_the_version_of_the_distribution() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[0] == version
    for name in ("Dockerfile", "compose.yaml", "README.md", "deploy/attnlens@.service", "mkdocs.yml"):
        assert version not in (ROOT / name).read_text("utf-8"), name
