"""`attnlens tokenize`, against a real server."""

import json
from collections.abc import Callable
from pathlib import Path

from attnlens_client import Client
from scripted import ScriptedServer
from served import ServerProcess

RunHere = Callable[..., tuple[int, str, str]]

TEXT = "It was unbelievably wet 😀."


def test_every_token_has_a_row(run_here: RunHere, minilm_server: ServerProcess) -> None:
    code, out, err = run_here("tokenize", TEXT, "--address", minilm_server.address)
    with Client(minilm_server.address) as client:
        [found] = client.tokenize([TEXT])
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == f"all-MiniLM-L6-v2: {len(found.tokens)} tokens, the limit is 256"
    assert lines[1].split() == ["index", "id", "token", "source", "characters"]
    rows = [line.split() for line in lines[3:]]
    assert [row[1:3] for row in rows] == [[str(token.id), token.text] for token in found.tokens]
    assert rows[0] == ["0", "101", "[CLS]", "special"]
    assert rows[4] == ["4", "8671", "##bel", "text", "9-12"]


def test_json_contains_the_limit_and_the_token_positions(
    run_here: RunHere, minilm_server: ServerProcess
) -> None:
    args = ("--text-pair", "b", "--json", "--address", minilm_server.address)
    told = json.loads(run_here("tokenize", TEXT, *args)[1])
    assert (told["text"], told["text_pair"], told["max_tokens"]) == (TEXT, "b", 256)
    assert told["num_tokens_total"] == len(told["tokens"])
    token = told["tokens"][3]
    assert TEXT[token["char_start"] : token["char_end"]] == "un"
    assert told["tokens"][-2]["source"] == "second_text"


def test_text_over_the_model_limit_is_shown_in_full(run_here: RunHere, minilm_server: ServerProcess) -> None:
    address = ("--address", minilm_server.address)
    lines = run_here("tokenize", "word " * 300, *address)[1].splitlines()
    assert lines[0].endswith("302 tokens, the limit is 256; other commands truncate the text with --truncate")
    assert len(lines) == 3 + 302
    assert json.loads(run_here("tokenize", "word " * 300, "--json", *address)[1])["exceeds_max_tokens"]


def test_file_becomes_json_lines_that_keep_their_keys(
    run_here: RunHere, minilm_server: ServerProcess, tmp_path: Path
) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text('{"text": "a", "id": 7}\n\n{"text": "b", "text_pair": "c"}\n')
    code, out, _ = run_here("tokenize", "--input", source, "--address", minilm_server.address)
    first, second = (json.loads(line) for line in out.splitlines())
    assert (code, first["index"], first["id"], second["index"]) == (0, 0, 7, 1)
    assert (first["num_tokens_total"], second["text_pair"]) == (3, "c")
    source.write_text('{"text": "a", "tokens": 7}\n')
    code, out, err = run_here("tokenize", "--input", source, "--address", minilm_server.address)
    assert (code, out) == (1, "")
    assert 'line 1: the output uses the key "tokens" itself' in err


def test_control_characters_in_a_token_are_escaped(run_here: RunHere, server: ScriptedServer) -> None:
    evil = "\x1b[2J\u009b31m"
    for options in ((), ("--json",)):
        out = run_here("tokenize", evil, *options, "--address", server.address)[1]
        assert not set(out) & {"\x1b", "\u009b"}
