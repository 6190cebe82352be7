"""docs/integrations.md shows the tested code and names the tested versions."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
TOOLS = ["chromadb", "duckdb", "haystack-ai", "lancedb", "langchain-core", "llama-index-core", "pgvector"]


@pytest.mark.parametrize(
    "module", sorted((ROOT / "examples" / "integrations").glob("*.py")), ids=lambda path: path.stem
)
def test_page_shows_the_tested_code(module: Path) -> None:
    assert f"```python\n{module.read_text(encoding='utf-8')}```\n" in PAGE


@pytest.mark.parametrize("tool", TOOLS)
def test_page_names_the_tested_versions(tool: str) -> None:
    pinned = dict(
        re.findall(r"^([\w-]+)==(\S+)$", (HERE / "requirements.txt").read_text("utf-8"), re.MULTILINE)
    )
    assert f"| {tool} {pinned[tool]} |" in PAGE


def test_environment_has_no_pytorch() -> None:
    requirements = (HERE / "requirements.txt").read_text("utf-8")
    assert not re.search(r"^(torch|transformers|sentence-transformers)==", requirements, re.MULTILINE)
