"""Formats of text files by their names."""

from pathlib import Path

import click
import pytest

from attnlens_cli.files.text_lines import input_file


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "A.JSON"])
def test_json_lines_are_detected_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"text": "a"}\n')
    assert [line.text for line in input_file(str(path), "auto").lines(0, None)] == ["a"]
    assert [line.text for line in input_file(str(path), "lines").lines(0, None)] == ['{"text": "a"}']


def test_json_document_is_not_embedded_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{\n "text": "a"\n}\n')
    with pytest.raises(click.ClickException, match=r"a.json, line 1: not JSON"):
        list(input_file(str(path), "auto").lines(0, None))
