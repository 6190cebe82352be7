"""Output of `attnlens explain` in addition to scores, for explanations built by hand."""

import io

import numpy as np
import pytest
from rich.console import Console

from attnlens_cli.show.explanation import print_caveat, print_scores
from attnlens_client import Explanation, Token, TokenScores, Usage

WORDS = ["[CLS]", "rain", "falls", "on", "rome", "[SEP]"]
EFFECTS = [np.nan, 0.4, 0.3, 0.2, 0.1, np.nan]


def scores(
    method: str, values: list[float], baseline: float | None, faithfulness: float | None
) -> TokenScores:
    array = np.array(values, dtype=np.float32)
    total = float(np.nansum(array)) + (baseline or 0)
    return TokenScores(method, array, baseline, total, None if baseline is None else total, faithfulness)


def printed(*found: TokenScores, target: float = 1.0, verify: bool = False) -> str:
    tokens = tuple(Token(7, word, "text", 0, 0, 0, 0, None) for word in WORDS)
    usage = Usage(num_tokens=len(tokens), num_tokens_total=len(tokens), truncated=False)
    explanation = Explanation(tokens, usage, (), target, found, None, "m", "v")
    console = Console(file=io.StringIO(), width=200, highlight=False)
    print_scores(console, explanation, texts={}, top=None, verify=verify)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_bars_are_scaled_by_the_tokens_and_the_baseline_is_a_share_in_words() -> None:
    shown = printed(scores("contributions", [0, 0.2, 0.1, 0.1, 0.02, 0], 0.58, None))
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert lines["rain"].count("█") == 30
    assert lines["(baseline)"].split() == ["(baseline)", "+0.5800"]
    assert "The baseline, which belongs to no token, is 58 % of the target." in shown


@pytest.mark.parametrize(
    ("target", "baseline", "line"),
    [(0.1198, -0.0206, "is -17 % of the target."), (0.001, -0.0206, "is -0.0206, the target +0.0010.")],
)
def test_share_of_a_negative_baseline_or_of_a_small_target_is_described(
    target: float, baseline: float, line: str
) -> None:
    shown = printed(scores("contributions", [0, 1, 0, 0, 0, 0], baseline, None), target=target)
    assert f"The baseline, which belongs to no token, {line}" in shown


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0, 4, 3, 2, 1, 0], "Spearman 1.00 with leave-one-out over 4 tokens of this text.\n"),
        (
            [0, 2, 1, 4, 3, 0],
            "Spearman -0.60 with leave-one-out over 4 tokens of this text. Caution: that is negat",
        ),
        (
            [0, 3, 1, 4, 2, 0],
            "Spearman 0.00 with leave-one-out over 4 tokens of this text. Caution: that is low, ",
        ),
    ],
)
def test_low_agreement_on_the_text_is_a_caution_and_nothing_is_called_verified(
    values: list[float], line: str
) -> None:
    found = scores("contributions", values, 0.1, None), scores("leave_one_out", EFFECTS, None, None)
    shown = printed(*found, verify=True)
    assert f"contributions: {line}" in shown
    assert "erified" not in shown


@pytest.mark.parametrize(
    ("faithfulness", "end"), [(0.85, "this model.\n"), (0.66, "this model. Caution: that is low,")]
)
def test_bundle_faithfulness_is_shown_with_a_caution_if_it_is_low(faithfulness: float, end: str) -> None:
    shown = printed(scores("contributions", [0, 4, 3, 2, 1, 0], 0.1, faithfulness))
    assert f"Spearman {faithfulness} with leave-one-out, measured for {end}" in shown
    unmeasured = printed(scores("contributions", [0, 4, 3, 2, 1, 0], 0.1, None))
    assert "contributions: agreement with leave-one-out not measured for this question.\n" in unmeasured
    assert "Spearman" not in unmeasured


@pytest.mark.parametrize("method", ["rollout", "received_attention", "contribution_norm"])
def test_scores_that_do_not_sum_to_the_target_are_for_ranking_only(method: str) -> None:
    shown = printed(scores(method, [1, 4, 3, 2, 1, 1], None, None))
    assert f"{method}: ranking only; the scores do not add up to the target." in shown
    assert "aseline" not in shown


def test_note_is_no_wider_than_the_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_caveat(console, "contributions", "Add --verify to compare with leaving out each word.")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80
