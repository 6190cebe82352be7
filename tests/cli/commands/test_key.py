"""`attnlens key`."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from attnlens_server.access.keys import read_keys

RunHere = Callable[..., tuple[int, str, str]]


def test_the_line_is_for_the_file_and_the_key_is_shown_once(run_here: RunHere, tmp_path: Path) -> None:
    code, line, shown = run_here("key", "search")
    message, key = shown.splitlines()
    assert (code, message) == (0, "The key of search, which is not stored anywhere:")
    assert line == f"search sha256:{hashlib.sha256(key.encode()).hexdigest()}\n"
    (tmp_path / "keys").write_text(line)
    assert read_keys(tmp_path / "keys").name_of(key.encode()) == "search"


def test_an_invalid_name_is_rejected(run_here: RunHere) -> None:
    code, line, shown = run_here("key", "two words")
    assert (code, line) == (2, "")
    assert "'two words' is not a valid name: use up to 64 letters" in shown
