"""`attnlens explain` and `attnlens compare` against a real server process."""

import json
import re
import subprocess
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest

from attnlens_cli.commands.options import EXPLAIN_METHODS, PAIR_MATRICES
from attnlens_client import Client
from attnlens_client.arguments import ExplainMethodName, PairMatrixName
from served import ServerProcess

Run = Callable[..., subprocess.CompletedProcess[str]]

SENTENCE = "The animal didn't cross the street because it was too tired."
A, B = "A man is playing a guitar.", "Someone plays an instrument."


@pytest.fixture
def ask(run: Run, minilm_server: ServerProcess) -> Run:
    def ask_server(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
        return run(*args, "--address", minilm_server.address, **options)

    return ask_server


def numbers_of(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"[+-]\d\.\d{4}", line)]


def test_names_match_the_client() -> None:
    assert get_args(ExplainMethodName) == EXPLAIN_METHODS
    assert get_args(PairMatrixName) == PAIR_MATRICES


def test_every_token_has_its_score_and_a_bar(ask: Run, minilm_server: ServerProcess) -> None:
    result = ask("explain", SENTENCE)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "all-MiniLM-L6-v2, 16 tokens, target: the text's own embedding, 1.0000"
    with Client(minilm_server.address) as client:
        [text] = client.explain([SENTENCE])
    shown = lines[1:18]
    assert [line.split()[0] for line in shown] == [*text.labels, "(baseline)"]
    assert "█" not in shown[-1]
    values = [numbers_of(line)[0] for line in shown]
    np.testing.assert_allclose(values, [*text.values, text.scores[0].baseline], atol=6e-5)
    bars = [line.count("█") for line in shown]
    assert bars[2] == 30
    assert max(bars) == 30
    assert lines[18].startswith("contributions: sum 1.000000, the target is 1.000000 (off by ")
    assert lines[19] == "The baseline, which belongs to no token, is 8 % of the target."
    assert " ".join(lines).endswith("Add --verify to compare with leaving out each word.")
    assert "\x1b" not in result.stdout


def test_verify_leaves_out_each_token_and_reports_the_agreement(ask: Run) -> None:
    lines = ask("explain", SENTENCE, "--verify").stdout.splitlines()
    assert lines[1].split() == ["contributions", "leave_one_out"]
    [animal] = [line for line in lines if line.startswith("animal")]
    assert numbers_of(animal) == [0.2813, 0.1609]
    assert "leave_one_out: sum 0.5156; the scores do not add up to the target." in lines
    assert lines[-2] == "contributions: Spearman 0.86 with leave-one-out over 14 tokens of this text."
    assert "--verify" not in lines[-1]
    single = ask("explain", "a", "--verify").stdout
    assert "contributions: no rank correlation, because 1 token of this text can be left out." in single


def test_words_are_spelled_as_in_the_text(ask: Run) -> None:
    lines = ask("explain", "It was Unbelievably wet.", "--words", "--prompt", "So ").stdout.splitlines()
    words = [line.split("  ")[0] for line in lines[1:9]]
    assert words == ["[CLS]", "So (prompt)", "It", "was", "Unbelievably", "wet", ".", "[SEP]"]
    result = ask("compare", "It was wet.", "RAIN", "--words", "--matrix", "interaction").stdout
    assert re.search(r"^ +\[CLS\] +RAIN +\[SEP\]$", result, re.MULTILINE)


def test_contrast_has_bars_of_both_signs(ask: Run) -> None:
    query = "How do I reset a forgotten password?"
    result = ask(
        "explain", query, "--to", "Recover an account", "--rather-than", "Reset the router", "--words"
    )
    lines = result.stdout.splitlines()
    assert "minus cosine with 'Reset the router'" in lines[0]
    values = {line.split()[0]: numbers_of(line)[0] for line in lines[1:12]}
    assert values["password"] > 0 > values["reset"]
    [reset] = [line for line in lines if line.startswith("reset ")]
    assert "▒" in reset
    assert "█" not in reset


def test_json_is_complete_and_has_null_for_nan(ask: Run) -> None:
    methods = ("--method", "contributions", "--method", "output_share")
    result = ask("explain", A, "--to", B, "--json", "--verify", "--head-contributions", *methods)
    answer = json.loads(result.stdout)
    assert (answer["text"], answer["to"]) == (A, B)
    assert "rather_than" not in answer
    assert answer["target_value"] == pytest.approx(0.667446, abs=1e-5)
    contributions, shares, effects = answer["scores"]
    assert sum(contributions["values"]) + contributions["baseline"] == pytest.approx(
        contributions["sum"], abs=1e-6
    )
    assert contributions["expected_sum"] == answer["target_value"]
    assert shares["method"] == "output_share"
    assert -1 <= contributions["rank_correlation"] <= 1
    assert effects["values"][0] is None
    assert "rank_correlation" not in effects
    assert np.shape(answer["head_contributions"]) == (6, 12)
    assert [token["text"] for token in answer["tokens"]][:2] == ["[CLS]", "a"]


def test_many_tokens_are_sorted_by_score(ask: Run) -> None:
    text = "The cat sat on the mat and looked at the rain. " * 5
    lines = ask("explain", text).stdout.splitlines()
    values = [abs(numbers_of(line)[0]) for line in lines[1:21]]
    assert values == sorted(values, reverse=True)
    assert re.match(r"\d+ more tokens: [+-]0\.", lines[22])
    shown = ask("explain", text, "--top", "3").stdout.splitlines()
    assert [bool(numbers_of(line)) for line in shown[1:6]] == [
        True
    ] * 5  # 3 tokens, the baseline and the remaining tokens
    assert not any(numbers_of(line) for line in shown[6:])


def test_compare_explains_both_texts_and_shows_their_pairs(ask: Run) -> None:
    result = ask("compare", A, B, "--matrix", "interaction")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "all-MiniLM-L6-v2: cosine 0.6674"
    assert "attnlens explain TEXT --to TEXT --verify" in result.stdout
    assert A in lines
    assert B in lines
    [row] = [line for line in lines if line.startswith("guitar") and "█" not in line]
    assert row.split() == ["guitar", "-0.041", "-0.053", "0.000", "0.418", "0.012"]
    narrow = ask("compare", A, B, "--matrix", "output", env={"COLUMNS": "50"}).stdout
    assert "+0.0501  playing - plays" in narrow
    answer = json.loads(ask("compare", A, B, "--matrix", "output", "--json").stdout)
    assert np.sum(answer["matrix"]) == pytest.approx(answer["similarity"], abs=1e-5)
    assert answer["texts"] == [A, B]


def test_input_matrix_is_shown_with_its_baselines(ask: Run) -> None:
    lines = ask("compare", A, B, "--matrix", "input").stdout.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("input: Joint"))
    header, *rows, sums = lines[start + 1 :]
    assert header.split()[-1] == rows[-1].split()[0] == "(baseline)"
    assert {len(row.split()) for row in rows} == {9}
    [guitar] = [row for row in rows if row.startswith("guitar")]
    assert guitar.split()[5] == "0.234"
    assert sums.startswith("input: pairs 0.9935")
    assert "sum 0.6674" in sums
    narrow = ask("compare", A, B, "--matrix", "input", "--words", env={"COLUMNS": "50"}).stdout
    assert "+0.2335  guitar - instrument" in narrow
    assert "baselines -0.326" in narrow
    answer = json.loads(ask("compare", A, B, "--matrix", "input", "--dimensions", "64", "--json").stdout)
    parts = (answer[name] for name in ("matrix", "baseline_row", "baseline_column", "baseline"))
    assert sum(map(np.sum, parts)) == pytest.approx(answer["similarity"], abs=1e-4)
    assert np.shape(answer["matrix"]) == (9, 7)


REFUSED = {
    "rather-than alone": (("explain", "a", "--rather-than", "b"), "--rather-than needs --to or --label", 2),
    "two prompts": (("explain", "a", "--prompt", "b", "--prompt-name", "c"), "give either --prompt-name", 2),
    "json of some": (("explain", "a", "--json", "--top", "3"), "--json prints all scores", 2),
    "heads": (("explain", "a", "--head-contributions"), "--head-contributions needs --json", 2),
    "verify itself": (("explain", "a", "--verify", "--method", "leave_one_out"), "use another --method", 2),
    "too long": (("explain", "word " * 300), "TEXT has 302 tokens, but the limit is 256: shorten it", 1),
    "a long target": (
        ("explain", "a", "--to", "word " * 300),
        "--to has 302 tokens, but the limit is 256",
        1,
    ),
    "a long contrast": (
        ("explain", "a", "--to", "b", "--rather-than", "word " * 300),
        "--rather-than has 302 tokens",
        1,
    ),
    "a long second": (("compare", "a", "word " * 300), "the second TEXT has 302 tokens", 1),
}


@pytest.mark.parametrize(("args", "line", "code"), REFUSED.values(), ids=REFUSED)
def test_error_is_reported_in_one_line(ask: Run, args: tuple[str, ...], line: str, code: int) -> None:
    result = ask(*args)
    assert result.returncode == code
    assert line in result.stderr
    assert result.stderr.count("\n") == 1
