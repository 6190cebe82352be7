"""docs/request_path.md lists the modules that a warm call enters."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "request_path.md"
ROWS = re.findall(r"^\| `(\S+\.py)` \| (x?) *\| (x?) *\| \S", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("method", "column"), [("embed", 1), ("explain", 2)])
def test_page_lists_the_modules_of_a_warm_call(minilm_bundle: Path, method: str, column: int) -> None:
    listed = [row[0] for row in ROWS if row[column]]
    command = [sys.executable, "tests/request_path.py", str(minilm_bundle), method]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    assert sorted(listed) == sorted(result.stdout.split())
