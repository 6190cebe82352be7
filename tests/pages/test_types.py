"""A strict type checker accepts the Python code on the pages."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pages.blocks import PAGES, ROOT, blocks_of
from pages.exceptions import CONTINUED

# Code from files that `make check` covers or that run in environments with other packages.
CHECKED_AS_FILES = ("docs/ecosystem.md", "docs/integrations.md")


@pytest.mark.extended
def test_python_blocks_pass_strict_type_checking(tmp_path: Path) -> None:
    paths = []
    for page in PAGES:
        blocks = [block.code for block in blocks_of(page) if block.form == "python"]
        if page in CHECKED_AS_FILES:
            blocks = [code for code in blocks if not code.startswith('"""')]
        if page in CONTINUED:
            blocks = ["\n".join(blocks)]
        for number, code in enumerate(blocks):
            name = page.removesuffix(".md").replace("/", "_").replace("-", "_").lower()
            paths.append(tmp_path / f"{name}_{number}.py")
            paths[-1].write_text(code, encoding="utf-8")
    assert len(paths) >= 10
    cache = tmp_path / "cache"
    if (ROOT / ".mypy_cache").exists():  # of `make check`, with all libraries
        shutil.copytree(ROOT / ".mypy_cache", cache)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        str(cache),
        *map(str, paths),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True)
    assert result.returncode == 0, result.stdout
