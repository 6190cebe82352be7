"""`attnlens rerank` and `attnlens classify`, against a scripted server."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scripted import ScriptedServer

RunHere = Callable[..., tuple[int, str, str]]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    lines = [{"text": "a", "id": 7}, {"text": "cc\x1b", "id": 8}, {"text": "bb", "id": 9}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_documents_are_sorted(run_here: RunHere, server: ScriptedServer, documents: Path) -> None:
    code, out, err = run_here("rerank", "q", documents, "--top-n", "2", "--address", server.address)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("scripted: 3 documents")
    assert [line.split() for line in lines[3:]] == [
        ["1", "3.0000", "3.0000", "cc\\x1b"],
        ["2", "2.0000", "2.0000", "bb"],
    ]


def test_json_keeps_the_keys_of_the_input(run_here: RunHere, server: ScriptedServer, documents: Path) -> None:
    code, out, _ = run_here("rerank", "q", documents, "--json", "--address", server.address)
    assert code == 0
    content = json.loads(out)
    assert [(each["index"], each["id"], each["logit"]) for each in content["results"]] == [
        (1, 8, 3), (2, 9, 2), (0, 7, 1),
    ]  # fmt: skip
    assert content["query"] == "q"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a", "text_pair": "b"}', "line 1: documents cannot be pairs"),
        ('{"text": "a", "score": 1}', 'line 1: the output uses the key "score" itself'),
        ("[]", "line 1: not an object"),
    ],
)
def test_invalid_lines_are_named(
    run_here: RunHere, server: ScriptedServer, tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text(line, encoding="utf-8")
    code, _, err = run_here("rerank", "q", path, "--address", server.address)
    assert code == 1
    assert message in err


def test_empty_query_is_a_usage_error(run_here: RunHere, server: ScriptedServer, documents: Path) -> None:
    code, _, err = run_here("rerank", "", documents, "--address", server.address)
    assert code == 2
    assert "query is empty" in err


def test_labels_of_a_text_are_shown(run_here: RunHere, server: ScriptedServer, documents: Path) -> None:
    code, out, err = run_here("classify", "abc", "--top-k", "1", "--address", server.address)
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines() if "3.0000" in line] == [["long", "3.0000", "3.0000"]]
    code, out, _ = run_here("classify", "--input", documents, "--address", server.address)
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["index"], row["id"], row["labels"][0]["logit"]) for row in rows] == [
        (0, 7, 1), (1, 8, 3), (2, 9, 2),
    ]  # fmt: skip
