"""docs/troubleshooting.md lists all error reasons, and its messages exist in the sources."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import attnlens_client
from attnlens.v1.error_pb2 import ErrorReason
from attnlens_client.errors import _BY_REASON

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
PACKAGES = ("cli", "client", "export", "model", "server")


def rows(heading: str) -> list[str]:
    """Return the first cell of each table row under a heading."""
    _, _, section = PAGE.partition(f"\n## {heading}\n")
    lines = section.partition("\n## ")[0].splitlines()
    return [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| `")]


def test_every_reason_is_listed_with_its_exception() -> None:
    reasons = {name.removeprefix("ERROR_REASON_") for name in ErrorReason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    listed = dict(re.findall(r"`(\w+)`", cell) for cell in rows("Server errors by reason"))
    assert set(listed) == reasons
    for reason, name in listed.items():
        assert getattr(attnlens_client, name) is _BY_REASON[reason]


def strings() -> Iterator[str]:
    """Yield the strings in the packages, with `…` in place of formatted values."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                    yield re.sub("…+", "…", "".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield re.sub(r"\{\w[^{}]*\}", "…", node.value)  # templates of str.format


def test_listed_messages_exist_in_the_sources() -> None:
    headings = ("A command cannot connect", "The server does not start", "An export fails")
    told = [cell.strip("`") for heading in headings for cell in rows(heading)]
    assert len(told) > 15
    known = "\n".join(strings())
    assert [message for message in told if message not in known] == []
