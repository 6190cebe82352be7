"""Descriptions of scores: their sum, the baseline and their faithfulness."""

from typing import NamedTuple

import numpy as np
import pytest

from attnlens_viewer.page import Array
from attnlens_viewer.results import TextResult, build_page


class MethodScores(NamedTuple):
    """Scores as returned by a server."""

    method: str
    values: Array
    baseline: float | None = None
    sum: float = 0.0
    expected_sum: float | None = None
    faithfulness: float | None = None


class Token(NamedTuple):
    text: str = "rain"
    source: str = "text"
    char_start: int = 0
    char_end: int = 4
    word_index: int | None = 0
    is_special: bool = False


def page_scores(method: str, **fields: float) -> tuple[str, float | None, float | None]:
    """Return the description, sum and expected sum on the page."""
    scores = [MethodScores(method, np.ones(1, dtype=np.float32), **fields)]
    result = TextResult(text="rain", tokens=[Token()], maps=np.ones((1, 1, 1, 1)), scores=scores)
    [shown] = build_page("m", [result]).texts[0].scores
    return shown.description, shown.sum, shown.expected_sum


def test_share_of_the_baseline_is_described() -> None:
    exact = {"sum": 0.5, "expected_sum": 0.5}
    assert (
        "belongs to no token, is 58 % of the target"
        in page_scores("contributions", baseline=0.29, **exact)[0]
    )
    assert "belongs to no token" not in page_scores("output_share", baseline=0.0, **exact)[0]
    near_zero = {"baseline": 0.2, "sum": 0.001, "expected_sum": 0.001}
    assert "belongs to no token" not in page_scores("contributions", **near_zero)[0]


@pytest.mark.parametrize(("faithfulness", "has_warning"), [(0.85, False), (0.66, True), (-0.3, True)])
def test_low_faithfulness_adds_a_warning(faithfulness: float, has_warning: bool) -> None:
    description, _, _ = page_scores("contributions", sum=1.0, expected_sum=1.0, faithfulness=faithfulness)
    assert "measured on other texts" in description
    assert ("weak guide" in description) == has_warning
    assert "measured" not in page_scores("contributions", sum=1.0, expected_sum=1.0)[0]


@pytest.mark.parametrize("method", ["rollout", "received_attention", "contribution_norm"])
def test_ranking_method_has_no_sum(method: str) -> None:
    # Older servers return an expected sum for these methods.
    description, total, expected_sum = page_scores(method, sum=1.0, expected_sum=1.0)
    assert "Ranking only: the scores do not add up to the target." in description
    assert (total, expected_sum) == (None, None)
