"""docs/threat-model.md: every test that it names exists, and every defense has one."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "threat-model.md").read_text("utf-8")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")]


def test_every_named_test_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 30
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (TESTS / path).is_file()
        or not re.search(rf"(?m)^(async )?def {name}\(", (TESTS / path).read_text("utf-8"))
    ]
    assert missing == []


def test_every_defense_has_a_test() -> None:
    without = [
        attempt.strip()
        for attempt, defense, test in ROWS
        if "::" not in test and test.strip() != "test" and not defense.strip().startswith("none")
    ]
    assert without == []
