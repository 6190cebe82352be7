"""Output of commands when stdout is not a terminal."""

import io

import pytest
from rich.table import Table

from attnlens_cli.printable import source_text
from attnlens_cli.show.console import make_console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stdout", "is_padded"), [(io.StringIO(), False), (Terminal(), True)])
def test_lines_have_no_trailing_spaces_in_a_pipe(
    stdout: io.StringIO, is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setenv("TERM", "dumb")
    table = Table("name", "bar", box=None)
    table.add_row("a", "##")
    table.add_row("long name", "")
    make_console().print(table)
    lines = stdout.getvalue().splitlines()
    assert [line.split() for line in lines] == [["name", "bar"], ["a", "##"], ["long", "name"]]
    assert any(line.endswith(" ") for line in lines) == is_padded


@pytest.mark.parametrize(
    ("source", "commit", "text"),
    [
        ("org/name", "0123", "org/name at 0123"),
        ("org/name", "", "org/name"),
        ("model", "", "directory model"),
    ],
)
def test_source_of_a_local_checkpoint_is_not_a_hub_id(source: str, commit: str, text: str) -> None:
    assert source_text(source, commit) == text
