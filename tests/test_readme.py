"""The Python of the README and of docs/python.md is what a strict type checker accepts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_examples_pass_a_strict_type_checker(tmp_path: Path) -> None:
    blocks = _examples("README.md")
    assert len(blocks) >= 2
    blocks.append("\n".join(_examples("docs/python.md")))  # they go on from each other
    paths = [tmp_path / f"example_{number}.py" for number in range(len(blocks))]
    for path, block in zip(paths, blocks, strict=True):
        path.write_text(block, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        str(tmp_path / "cache"),
        *map(str, paths),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True)
    assert result.returncode == 0, result.stdout


def _examples(page: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
