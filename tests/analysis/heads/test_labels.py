"""Label rules at their thresholds."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from attnlens_analysis.heads.copies import CopyTest
from attnlens_analysis.heads.labels import RULES, is_winner, label_heads
from attnlens_analysis.heads.maps import Head
from attnlens_analysis.heads.patterns import Patterns
from attnlens_analysis.heads.syntax import RelationScore, wilson_interval

HEADS = (Head(0, 0), Head(0, 1))
NOTHING = np.zeros(2)
PATTERNS = Patterns(
    num_texts=1,
    num_rows=10,
    num_duplicate_rows=4,
    previous=NOTHING,
    next=NOTHING,
    first=NOTHING,
    last=NOTHING,
    self=NOTHING,
    punctuation=NOTHING,
    duplicate=NOTHING,
    entropy=NOTHING,
    entropy_normalized=NOTHING,
    distance=NOTHING,
    diagonal_argmax=NOTHING,
    diagonal_chance=0.1,
    duplicate_chance=0.1,
    punctuation_share=0.1,
)
COPIES = CopyTest(40, 30, NOTHING, NOTHING, 0.016)


def labels(
    patterns: Patterns = PATTERNS, copies: CopyTest = COPIES, *scores: RelationScore
) -> dict[str, list[str]]:
    return {str(found.head): list(found.labels) for found in label_heads(HEADS, patterns, copies, scores)}


@pytest.mark.parametrize(
    ("name", "label", "threshold"),
    [
        ("previous", "previous-token", 0.5),
        ("next", "next-token", 0.5),
        ("first", "first-token", 0.5),
        ("last", "last-token", 0.5),
        ("self", "self", 0.5),
        ("entropy_normalized", "broad", 0.9),
    ],
)
def test_labels_require_values_above_their_threshold(name: str, label: str, threshold: float) -> None:
    changed: dict[str, Any] = {name: np.array([threshold, threshold + 0.001])}
    assert labels(dataclasses.replace(PATTERNS, **changed)) == {"L0H1": [label]}
    assert str(threshold) in RULES[label]


def test_duplicate_token_heads_must_pass_both_tests() -> None:
    on_text = dataclasses.replace(PATTERNS, duplicate=np.array([0.21, 0.19]))
    on_random = dataclasses.replace(COPIES, earlier_copy=np.array([0.21, 0.21]))
    assert labels(on_text, on_random) == {"L0H0": ["duplicate-token"]}
    assert labels(on_text) == {}


def test_induction_requires_attention_to_the_token_after_the_copy() -> None:
    assert labels(PATTERNS, dataclasses.replace(COPIES, induction=np.array([0.2, 0.21]))) == {
        "L0H1": ["induction"]
    }


def score(found: int, number: int, offset_scored: float) -> RelationScore:
    interval = wilson_interval(found, number)
    return RelationScore(
        "obj", Head(0, 1), "to_head", 200, 0.7, number, found / number, interval, -2, offset_scored
    )


@pytest.mark.parametrize(
    ("relation", "wins"),
    [
        (score(60, 100, 0.35), True),
        (score(59, 99, 0.35), False),  # too few words
        (score(600, 1000, 0.51), False),  # margin of 9 points
        (score(50, 100, 0.41), False),  # 41 % is within the interval
    ],
)
def test_syntax_labels_require_a_clear_margin_over_a_fixed_distance(
    relation: RelationScore, wins: bool
) -> None:
    assert is_winner(relation) == wins
    assert labels(PATTERNS, COPIES, relation) == ({"L0H1": ["syntax:obj"]} if wins else {})
