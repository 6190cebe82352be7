"""`attnlens view` as a process, against a real server process."""

import base64
import json
import re
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlens_client import AttentionQuery, Client
from served import ServerProcess

Run = Callable[..., subprocess.CompletedProcess[str]]

SENTENCE = "The animal didn't cross the street because it was too tired."


@pytest.fixture
def view(run: Run, minilm_server: ServerProcess) -> Run:
    return lambda *args, **options: run("view", *args, "--address", minilm_server.address, **options)


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'id="attnlens-data">([^<]*)</script>', path.read_text(encoding="utf-8"))
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_holds_the_tokens_and_the_weights_that_the_server_gives(
    view: Run, minilm_server: ServerProcess, tmp_path: Path
) -> None:
    path = tmp_path / "animal.html"
    result = view(SENTENCE, "-o", path)
    assert (result.returncode, result.stdout) == (0, "")
    assert re.fullmatch(rf"{path}: 0\.\d+ MB, open it in a browser\n", result.stderr)
    data = data_of(path)
    [text] = data["texts"]
    assert (data["title"], data["model"], data["kept"]) == (SENTENCE, "all-MiniLM-L6-v2", None)
    shown = [token.get("shown", token["text"]) for token in text["tokens"]]
    assert shown[:6] == ["[CLS]", "The", "animal", "didn", "'", "t"]
    with Client(minilm_server.address) as client:
        [encoded] = client.encode([SENTENCE], attention=AttentionQuery())
    for layer, weights in enumerate(encoded.weights):
        found = re.search(rf'id="attnlens-maps-0-{layer}">([^<]*)<', path.read_text(encoding="utf-8"))
        assert found is not None
        content = np.frombuffer(zlib.decompress(base64.b64decode(found[1])), np.uint8)
        assert np.abs((content.reshape(weights.shape) / 255) ** 2 - weights).max() <= 1 / 255


def test_two_texts_make_one_page(view: Run, tmp_path: Path) -> None:
    path = tmp_path / "pair.html"
    assert view("A man plays.", "It rained all day.", "-o", path).returncode == 0
    data = data_of(path)
    assert data["title"] == "A man plays. / It rained all day."
    assert [len(text["tokens"]) for text in data["texts"]] == [6, 7]
    assert [text["label"] for text in data["texts"]] == ["First text", "Second text"]


def test_a_small_page_is_smaller_and_says_so(view: Run, tmp_path: Path) -> None:
    long = "The lamps were lit along the river, and nobody had thought of supper. " * 8
    whole, small = tmp_path / "whole.html", tmp_path / "small.html"
    assert view(long, "-o", whole).returncode == 0
    assert view(long, "-o", small, "--small").returncode == 0
    assert small.stat().st_size < 0.8 * whole.stat().st_size
    assert (data_of(small)["kept"], data_of(small)["reason"]) == (32, "asked")


def test_a_prompt_is_part_of_the_text_and_a_cut_is_said(view: Run, tmp_path: Path) -> None:
    path = tmp_path / "cut.html"
    result = view("word " * 400, "--prompt", "query: ", "--truncate", "-o", path)
    assert result.returncode == 0
    [text] = data_of(path)["texts"]
    assert [token["text"] for token in text["tokens"][:3]] == ["[CLS]", "query", ":"]
    assert (len(text["tokens"]), text["tokensTotal"]) == (256, 404)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("word " * 400, "-o", "x.html"), 1, "a text has 402 tokens, the model takes 256: shorten it"),
        (("text", "-o", "x.pdf"), 2, "x.pdf must end in .html or .htm"),
        (("text", "-o", "no/where.html"), 2, "there is no directory no"),
        (("text", "-o", "x.html", "--prompt", "", "--prompt-name", "b"), 2, "--prompt-name or --prompt"),
    ],
)
def test_what_is_wrong_is_said_and_leaves_no_file(
    view: Run, tmp_path: Path, args: tuple[str, ...], code: int, message: str
) -> None:
    result = view(*args, cwd=tmp_path)
    assert result.returncode == code
    assert message in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []
