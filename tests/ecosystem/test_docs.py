"""docs/ecosystem.md shows the tested code and names the tested versions."""

from pathlib import Path

import pytest

from ecosystem.tools import HERE, NODE_PROJECT, TOOLS, pinned_versions

PAGE = (HERE.parents[1] / "docs" / "ecosystem.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "module",
    [*sorted(HERE.glob("with_*.py")), *sorted(NODE_PROJECT.glob("with_*.mjs"))],
    ids=lambda path: path.name,
)
def test_page_shows_the_tested_code(module: Path) -> None:
    language = {".py": "python", ".mjs": "js"}[module.suffix]
    assert f"```{language}\n{module.read_text(encoding='utf-8')}```\n" in PAGE


@pytest.mark.parametrize("tool", TOOLS)
def test_page_names_the_tested_versions(tool: str) -> None:
    assert f"| {tool} | {pinned_versions()[tool]} |" in PAGE
