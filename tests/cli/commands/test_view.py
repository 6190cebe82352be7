"""`attnlens view` against a real server process."""

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


def test_page_contains_the_tokens_and_weights_from_the_server(
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


def test_page_contains_the_contributions_of_a_text(view: Run, tmp_path: Path) -> None:
    path = tmp_path / "animal.html"
    assert view(SENTENCE, "-o", path).returncode == 0
    data = data_of(path)
    [text] = data["texts"]
    [scores] = text["scores"]
    assert (scores["method"], scores["target"]) == ("contributions", "the similarity of the text to itself")
    # Reference values from an independent program, in docs/explanations.md.
    assert scores["baseline"] == pytest.approx(0.082509, abs=2e-4)
    assert scores["values"][2] == pytest.approx(0.28130, abs=2e-4)
    assert scores["sum"] == pytest.approx(1, abs=1e-5)
    assert np.asarray(text["headContributions"]).shape == (6, 12)
    assert (data["pair"], data["contrast"], data["notes"]) == (None, None, [])


def test_page_of_two_texts_has_mutual_scores_a_matrix_and_a_contrast(
    view: Run, minilm_server: ServerProcess, tmp_path: Path
) -> None:
    path = tmp_path / "pair.html"
    first, second, third = "A man is playing a guitar.", "Someone plays an instrument.", "A man is eating."
    assert view(first, second, "--rather-than", third, "-o", path).returncode == 0
    data = data_of(path)
    for text in data["texts"]:
        assert text["scores"][0]["sum"] == pytest.approx(0.667446, abs=1e-5)
        assert text["scores"][0]["target"] == "the cosine similarity to the other text"
    assert np.sum(data["pair"]["values"]) == pytest.approx(0.667446, abs=1e-5)
    assert data["pair"]["name"] == "Output vectors"
    with Client(minilm_server.address) as client:
        vectors = client.embed([first, second, third], normalize=True)
    difference = float(vectors[0] @ vectors[1] - vectors[0] @ vectors[2])
    assert data["contrast"]["scores"]["sum"] == pytest.approx(difference, abs=1e-5)
    assert (data["contrast"]["to"], data["contrast"]["ratherThan"]) == (second, third)
    assert view(first, second, "--matrix", "interaction", "-o", path).returncode == 0
    pair = data_of(path)["pair"]
    assert (pair["name"], pair["similarity"]) == ("Interaction", None)
    assert pair["values"][6][4] == pytest.approx(0.4181, abs=1e-3)


def test_explain_and_compare_write_the_same_page(
    run: Run, minilm_server: ServerProcess, tmp_path: Path
) -> None:
    path, address = tmp_path / "page.html", ("--address", minilm_server.address)
    texts = ("A man is playing a guitar.", "Someone plays an instrument.")
    assert run("view", *texts, "-o", path, *address).returncode == 0
    viewed = path.read_bytes()
    result = run("compare", *texts, "--words", "--html", path, *address)
    assert (result.returncode, "guitar" in result.stdout) == (0, True)
    assert path.read_bytes() == viewed
    assert run("view", SENTENCE, "-o", path, *address).returncode == 0
    viewed = path.read_bytes()
    assert run("explain", SENTENCE, "--words", "--html", path, *address).returncode == 0
    assert path.read_bytes() == viewed
    assert run("explain", texts[0], "--to", texts[1], "--verify", "--html", path, *address).returncode == 0
    scores = data_of(path)["texts"][0]["scores"]
    assert [each["method"] for each in scores] == ["contributions", "leave_one_out"]
    assert (
        scores[0]["target"]
        == f"the cosine similarity to \N{LEFT DOUBLE QUOTATION MARK}{texts[1]}\N{RIGHT DOUBLE QUOTATION MARK}"
    )
    assert scores[1]["values"][0] == 0
    assert "Tokens without a score count as 0." in scores[1]["description"]


def test_page_without_explanations_states_the_reason(run: Run, minilm_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with ServerProcess(minilm_bundle, "--no-explain") as server:
        assert run("view", SENTENCE, "-o", path, "--address", server.address).returncode == 0
    data = data_of(path)
    assert data["texts"][0]["scores"] == []
    assert "the server does not support explanations" in data["notes"][0]


def test_two_texts_are_written_to_one_page(view: Run, tmp_path: Path) -> None:
    path = tmp_path / "pair.html"
    assert view("A man plays.", "It rained all day.", "-o", path).returncode == 0
    data = data_of(path)
    assert data["title"] == "A man plays. / It rained all day."
    assert [len(text["tokens"]) for text in data["texts"]] == [6, 7]
    assert [text["label"] for text in data["texts"]] == ["First text", "Second text"]


def test_small_page_is_smaller_and_records_the_reason(view: Run, tmp_path: Path) -> None:
    long = "The lamps were lit along the river, and nobody had thought of supper. " * 8
    whole, small = tmp_path / "whole.html", tmp_path / "small.html"
    assert view(long, "-o", whole).returncode == 0
    assert view(long, "-o", small, "--small").returncode == 0
    assert small.stat().st_size < 0.8 * whole.stat().st_size
    assert (data_of(small)["kept"], data_of(small)["reason"]) == (32, "requested")


def test_prompt_is_part_of_the_text_and_truncation_is_reported(view: Run, tmp_path: Path) -> None:
    path = tmp_path / "cut.html"
    result = view("word " * 400, "--prompt", "query: ", "--truncate", "-o", path)
    assert result.returncode == 0
    [text] = data_of(path)["texts"]
    assert [token["text"] for token in text["tokens"][:3]] == ["[CLS]", "query", ":"]
    assert (len(text["tokens"]), text["tokensTotal"]) == (256, 404)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("word " * 400, "-o", "x.html"), 1, "a text has 402 tokens, but the limit is 256: shorten it"),
        (("text", "-o", "x.pdf"), 2, "x.pdf must end in .html or .htm"),
        (("text", "-o", "no/where.html"), 2, "there is no directory no"),
        (("text", "-o", "x.html", "--prompt", "", "--prompt-name", "b"), 2, "--prompt-name or --prompt"),
        (("text", "-o", "x.html", "--rather-than", "b"), 2, "--rather-than needs TEXT2"),
        (("text", "-o", "x.html", "--matrix", "output"), 2, "--matrix needs TEXT2"),
    ],
)
def test_error_is_reported_and_leaves_no_file(
    view: Run, tmp_path: Path, args: tuple[str, ...], code: int, message: str
) -> None:
    result = view(*args, cwd=tmp_path)
    assert result.returncode == code
    assert message in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []
