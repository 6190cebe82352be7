"""What a page says of a method's scores: what they add up to, and how far to trust them."""

from typing import NamedTuple

import numpy as np
import pytest

from attnlens_viewer.page import Array
from attnlens_viewer.results import ReadText, page_of


class Found(NamedTuple):
    """Scores as a server returns them."""

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


def shown(method: str, **fields: float) -> tuple[str, float | None, float | None]:
    """Return the description, the sum and the expected sum that a page gets."""
    scores = [Found(method, np.ones(1, dtype=np.float32), **fields)]
    read = ReadText(text="rain", tokens=[Token()], maps=np.ones((1, 1, 1, 1)), scores=scores)
    [found] = page_of("m", [read]).texts[0].scores
    return found.description, found.sum, found.expected_sum


def test_the_share_of_the_baseline_is_a_sentence() -> None:
    exact = {"sum": 0.5, "expected_sum": 0.5}
    assert "belongs to no token, is 58 % of the target" in shown("contributions", baseline=0.29, **exact)[0]
    assert "belongs to no token" not in shown("output_share", baseline=0.0, **exact)[0]
    close = {"baseline": 0.2, "sum": 0.001, "expected_sum": 0.001}
    assert "belongs to no token" not in shown("contributions", **close)[0]


@pytest.mark.parametrize(("faithfulness", "has_caution"), [(0.85, False), (0.66, True), (-0.3, True)])
def test_a_low_faithfulness_is_a_caution(faithfulness: float, has_caution: bool) -> None:
    description, _, _ = shown("contributions", sum=1.0, expected_sum=1.0, faithfulness=faithfulness)
    assert "Measured on other texts" in description
    assert ("weak guide" in description) == has_caution
    assert "Measured" not in shown("contributions", sum=1.0, expected_sum=1.0)[0]


@pytest.mark.parametrize("method", ["rollout", "received_attention", "contribution_norm"])
def test_a_method_for_ranking_only_has_no_sum(method: str) -> None:
    description, total, expected_sum = shown(method, sum=1.0, expected_sum=1.0)  # an older server expects 1
    assert "Ranking only: the scores do not add up to the target." in description
    assert (total, expected_sum) == (None, None)
