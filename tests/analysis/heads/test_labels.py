"""Label rules at their thresholds."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from attnlens_analysis.heads.copies import CopyTest
from attnlens_analysis.heads.coreference import Coreference, PronounScore
from attnlens_analysis.heads.distances import Distances, Share
from attnlens_analysis.heads.intervals import wilson_interval
from attnlens_analysis.heads.labels import RULES, is_coreference, is_winner, label_heads
from attnlens_analysis.heads.maps import Head
from attnlens_analysis.heads.patterns import Patterns
from attnlens_analysis.heads.relatedness import Comparison, Relatedness
from attnlens_analysis.heads.syntax import RelationScore

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


def pronouns(
    found: int, number: int, kind: str = "gender", fixed: float = 0.1, nearest: float = 0.5
) -> PronounScore:
    interval = wilson_interval(found, number)
    return PronounScore(
        kind,
        Head(0, 1),
        60,
        0.8,
        number,
        found / number,
        interval,
        -2,
        offset_scored=fixed,
        nearest_scored=nearest,
    )


@pytest.mark.parametrize(
    ("pronoun_score", "wins"),
    [
        (pronouns(48, 60), True),
        (pronouns(20, 25), True),
        (pronouns(20, 24), False),  # too few pronouns
        (pronouns(59, 100), False),  # margin of 9 points
        (pronouns(16, 26), False),  # 50 % is within the interval
        (pronouns(48, 60, fixed=0.75), False),
        (pronouns(48, 60, nearest=0.75), False),
        (pronouns(60, 60, "all"), False),  # gender may account for all of it
    ],
)
def test_coreference_labels_require_a_clear_margin_over_both_baselines(
    pronoun_score: PronounScore, wins: bool
) -> None:
    assert is_coreference(pronoun_score) == wins
    coreference = Coreference((pronoun_score,), NOTHING)
    found = label_heads(HEADS, PATTERNS, COPIES, (), coreference=coreference)
    assert [(str(head.head), head.labels) for head in found] == (
        [("L0H1", ("coreference:gender",))] if wins else []
    )


def share(*lowest: float) -> Share:
    low = np.array(lowest)
    return Share(low / 4, 0.25, low + 0.1, np.array([low, low + 0.2]))


@pytest.mark.parametrize(
    ("local", "long_range", "content", "expected"),
    [
        ((2, 2.001), (0.5, 0.5), (0.9, 0.9), {"L0H1": ["local"]}),
        ((0.5, 0.5), (1.201, 1.2), (0.9, 0.9), {"L0H0": ["long-range"]}),
        ((3, 3), (0.5, 0.5), (0.5, 0.501), {"L0H1": ["local"]}),
        ((0.5, 0.5), (1.5, 1.5), (0.501, 0.5), {"L0H0": ["long-range"]}),
        ((float("nan"), 0.5), (float("nan"), 0.5), (0, 0.9), {}),
    ],
)
def test_local_and_long_range_heads_exceed_uniform_attention(
    local: tuple[float, float],
    long_range: tuple[float, float],
    content: tuple[float, float],
    expected: dict[str, list[str]],
) -> None:
    distances = Distances(10, 200, np.array(content), share(*local), share(*long_range))
    found = label_heads(HEADS, PATTERNS, COPIES, (), distances)
    assert {str(head.head): list(head.labels) for head in found} == expected


def test_semantic_heads_attend_to_synonyms_more_than_to_unrelated_words() -> None:
    lowest = np.array([0.02, 0.021])
    synonym = Comparison(NOTHING + 0.1, NOTHING + 0.05, np.array([lowest, lowest + 0.1]))
    same_word = Comparison(NOTHING + 0.5, NOTHING + 0.4, np.array([NOTHING + 0.3, NOTHING + 0.5]))
    relatedness = Relatedness(74, NOTHING + 0.05, same_word, synonym)
    found = label_heads(HEADS, PATTERNS, COPIES, (), relatedness=relatedness)
    assert [(str(head.head), head.labels) for head in found] == [("L0H1", ("semantic",))]
