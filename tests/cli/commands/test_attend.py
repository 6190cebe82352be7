"""`attnlens attend` against a real server process."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attnlens_client import AttentionQuery, Client
from scripted import ScriptedServer
from served import ServerProcess

Run = Callable[..., subprocess.CompletedProcess[str]]

SENTENCE = "The animal didn't cross the street because it was too tired."


@pytest.fixture
def attend(run: Run, minilm_server: ServerProcess) -> Run:
    def run_attend(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
        return run("attend", SENTENCE, "--address", minilm_server.address, *args, **options)

    return run_attend


@pytest.fixture
def weights(minilm_server: ServerProcess) -> np.ndarray:
    """Return all weights of the sentence, (L, H, T, T)."""
    with Client(minilm_server.address) as client:
        [result] = client.encode([SENTENCE], attention=AttentionQuery())
    return result.weights


def test_json_contains_tokens_and_all_weights(attend: Run, weights: np.ndarray) -> None:
    result = attend("--json", "--layer", "3", "--head", "-11")
    assert (result.returncode, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert (answer["layer"], answer["heads"], answer["text"]) == (3, [1], SENTENCE)
    assert (answer["num_tokens"], answer["truncated"]) == (16, False)
    assert [token["text"] for token in answer["tokens"]][:4] == ["[CLS]", "the", "animal", "didn"]
    assert np.abs(np.array(answer["weights"]) - weights[3, 1]).max() <= 1e-6


def test_default_is_the_mean_over_the_heads_of_the_last_layer(attend: Run, weights: np.ndarray) -> None:
    answer = json.loads(attend("--json").stdout)
    assert (answer["layer"], answer["heads"]) == (5, list(range(12)))
    assert np.abs(np.array(answer["weights"]) - weights[-1].mean(axis=0)).max() <= 1e-6


@pytest.mark.parametrize(("columns", "width"), [("120", 5), ("100", 4), ("80", 3)])
def test_table_shows_every_weight_in_a_wide_terminal(
    attend: Run, weights: np.ndarray, columns: str, width: int
) -> None:
    result = attend("--layer", "3", "--head", "1", env={"COLUMNS": columns})
    lines = result.stdout.splitlines()
    assert lines[0] == "all-MiniLM-L6-v2, layer 3 of 0-5, head 1, 16 tokens"
    assert "\x1b" not in result.stdout
    assert len(lines) == 2 + 2 + 16
    assert {len(line) for line in lines[3:]} == {11 + 16 * (width + 1)}
    shown = np.array([[float(number) for number in line.split()[2:]] for line in lines[4:]])
    assert np.abs(shown - weights[3, 1]).max() <= 0.00501


def test_narrow_terminal_gets_the_largest_weights_and_a_note(attend: Run, weights: np.ndarray) -> None:
    result = attend("--layer", "3", "--head", "1", env={"COLUMNS": "70"})
    assert "These are the 4 largest weights of each token" in " ".join(result.stdout.split())
    [row] = [line for line in result.stdout.splitlines() if line.startswith(" 10 it")]
    assert row.split()[2:4] == [f"{weights[3, 1, 10].max():.2f}", "animal"]
    assert row.count(".") == 4
    assert attend("--top", "2").stdout.splitlines()[11].count(".") == 2


def test_one_token_is_shown_as_bars_sorted_by_weight(attend: Run, weights: np.ndarray) -> None:
    result = attend("--layer", "3", "--head", "1", "--token", "IT", "--top", "4")
    lines = result.stdout.splitlines()
    assert lines[1] == "Token 10, 'it', attends to:"
    order = np.argsort(-weights[3, 1, 10])[:4]
    shown = [line.split() for line in lines[2:6]]
    assert [int(words[1]) for words in shown] == order.tolist()
    assert [float(words[0]) for words in shown] == pytest.approx(weights[3, 1, 10][order], abs=6e-5)
    assert len(shown[0][3]) > len(shown[1][3]) >= len(shown[3][3]) >= 1
    assert lines[-1].startswith("12 more tokens share 0.")


def test_token_can_be_selected_by_index_and_occur_several_times(attend: Run) -> None:
    assert "Token 15, '[SEP]', attends to:" in attend("--token", "-1").stdout
    both = attend("--token", "the").stdout
    assert "Token 1, 'the'" in both
    assert "Token 7, 'the'" in both


def test_word_is_found_by_all_its_tokens(run: Run, minilm_server: ServerProcess) -> None:
    result = run("attend", "Unfathomable!", "--token", "unfathomable", "--address", minilm_server.address)
    found = [line for line in result.stdout.splitlines() if line.startswith("Token ")]
    assert len(found) > 1
    assert found[0].startswith("Token 1, ")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--token", "dog"), "invalid value for '--token': no token or word 'dog' among: [CLS] the animal"),
        (
            ("--token", "16"),
            "invalid value for '--token': no token or word '16': the indices are 0 to 15, or",
        ),
        (("--token", "9" * 5000), "invalid value for '--token': no token or word '99"),
        (
            ("--layer", "6"),
            "invalid value for '--layer': 6: all-MiniLM-L6-v2 has the layers 0 to 5, or -6 to -1",
        ),
        (("--head", "-13"), "invalid value for '--head': -13: all-MiniLM-L6-v2 has the heads 0 to 11"),
        (("--image", "x.jpg"), "invalid value for '--image': x.jpg must end in .png or .svg or .pdf"),
    ],
)
def test_nonexistent_layer_head_or_token_is_a_usage_error(
    attend: Run, args: tuple[str, ...], line: str
) -> None:
    result = attend(*args)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"attnlens attend: {line}")


def test_text_that_is_not_utf_8_is_a_usage_error(run: Run) -> None:
    result = run("attend", b"caf\xe9")
    assert (result.returncode, result.stderr) == (
        2,
        "attnlens attend: invalid value for 'TEXT': it is not UTF-8\n",
    )


def test_tokens_of_a_prompt_and_a_second_text_are_marked(run: Run, minilm_server: ServerProcess) -> None:
    pair = ("attend", "Who rained?", "--text-pair", "It rained.", "--prompt", "query: ")
    shown = run(*pair, "--address", minilm_server.address).stdout.splitlines()
    assert [line[4:19].strip() for line in shown[4:]] == [
        "[CLS]", "query (prompt)", ": (prompt)", "who", "rained", "?", "[SEP]", "it (second)",
        "rained (second)", ". (second)", "[SEP]",
    ]  # fmt: skip
    found = run(*pair, "--token", "rained", "--address", minilm_server.address).stdout
    assert "Token 4, 'rained', attends to:" in found
    assert "Token 8, 'rained', attends to:" in found
    answer = json.loads(run(*pair, "--json", "--address", minilm_server.address).stdout)
    assert (answer["prompt"], answer["text"], answer["text_pair"]) == ("query: ", "Who rained?", "It rained.")
    assert len(answer["model_version"]) == 64
    assert [token["source"] for token in answer["tokens"]] == [
        "special", *["prompt"] * 2, *["text"] * 3, "special", *["second_text"] * 3, "special",
    ]  # fmt: skip
    assert np.array(answer["weights"]).shape == (11, 11)


def test_word_of_the_second_text_is_found(run: Run, minilm_server: ServerProcess) -> None:
    args = ("attend", "Who?", "--text-pair", "Unfathomable!", "--token", "unfathomable")
    result = run(*args, "--address", minilm_server.address)
    found = [line for line in result.stdout.splitlines() if line.startswith("Token ")]
    assert len(found) > 1
    assert found[0].startswith("Token 4, ")


def test_pair_that_is_too_long_is_rejected(run: Run, minilm_server: ServerProcess) -> None:
    long = ("attend", "Who?", "--text-pair", "word " * 300, "--address", minilm_server.address)
    assert (
        "TEXT with --text-pair has 305 tokens, but the limit is 256: shorten it, or give" in run(*long).stderr
    )
    assert "the first 256 tokens of 305" in run(*long, "--truncate").stdout


def test_model_without_pair_support_rejects_pairs(server: ScriptedServer, run: Run) -> None:
    result = run("attend", "a", "--text-pair", "b", "--address", server.address)
    assert (result.returncode, result.stderr) == (
        2,
        "attnlens attend: invalid value for '--text-pair': scripted does not support text pairs\n",
    )
    assert run("attend", "a", "--prompt", "b", "--prompt-name", "c").returncode == 2


def test_color_follows_force_color_and_no_color(attend: Run) -> None:
    colored = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}
    assert "\x1b[" in attend(env=colored).stdout
    assert "48;2;255;170;0m" in attend("--head", "1", env=colored).stdout
    assert "38;" not in attend(env={**colored, "NO_COLOR": "1"}).stdout


def test_image_without_matplotlib_names_the_extra(attend: Run, tmp_path: Path) -> None:
    program = "import sys; sys.modules['matplotlib'] = None; from attnlens_cli.main import main; main()"
    result = attend("--image", tmp_path / "x.png", command=[sys.executable, "-c", program])
    assert result.returncode == 2
    assert result.stderr == (
        "attnlens attend: matplotlib is not installed: in a checkout of attnlens, pip install '.[plot]'\n"
    )


def test_text_that_is_too_long_is_rejected_or_truncated(run: Run, minilm_server: ServerProcess) -> None:
    args = ("attend", "word " * 300, "--address", minilm_server.address)
    refused = run(*args)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "302 tokens, but the limit is 256: shorten it, or give --truncate" in refused.stderr
    cut = run(*args, "--truncate")
    assert "the first 256 tokens of 302" in cut.stdout


def test_characters_missing_from_the_terminal_encoding_are_replaced(attend: Run) -> None:
    result = attend("--token", "it", env={"PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, "")
    assert "Token 10, 'it', attends to:" in result.stdout
    assert "?" * 30 in result.stdout


def test_json_is_utf_8_in_every_terminal(run: Run, minilm_server: ServerProcess) -> None:
    args = ("attend", "Zoë", "--json", "--address", minilm_server.address)
    assert json.loads(run(*args, env={"PYTHONIOENCODING": "ascii"}).stdout)["text"] == "Zoë"
