"""Coreference scores of handcrafted predictions and weights."""

from collections.abc import Sequence
from typing import cast
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from attnlens_analysis.heads.coreference import measure_coreference, nearest_noun, score_pronouns
from attnlens_analysis.heads.intervals import wilson_interval
from attnlens_analysis.heads.maps import Head, MapSource
from attnlens_analysis.heads.probes import PronounItem, pronoun_items
from hand_made_maps import WordSource, pointing

HEADS = (Head(0, 0), Head(0, 1))
WORDS = ("Ann", "met", "Tom", "before", "he", "left", ".")


def item(group: int, antecedent: int, *distractors: int, kind: str = "gender") -> PronounItem:
    return PronounItem(group, kind, WORDS, 4, antecedent, distractors)


def test_best_head_is_selected_on_odd_groups_and_scored_on_even_groups() -> None:
    items = [item(1, 2, 0), item(1, 2, 0), item(2, 0, 2), item(2, 2, 0), item(2, 2, 0)]
    hits = np.array([[1, 0], [1, 1], [1, 1], [0, 1], [0, 1]], dtype=np.bool_)
    found = score_pronouns(HEADS, items, hits)
    assert found is not None
    total, gender = found.scores
    assert (total.kind, gender.kind) == ("all", "gender")
    assert (total.head, total.num_chosen, total.chosen) == (Head(0, 0), 2, 1)
    assert total.num_scored == 3
    assert total.scored == pytest.approx(1 / 3)
    assert total.interval == wilson_interval(1, 3)
    assert total.offset == -2
    assert total.offset_scored == pytest.approx(2 / 3)
    assert total.nearest_scored == pytest.approx(2 / 3)
    np.testing.assert_allclose(found.accuracy, [3 / 5, 4 / 5])


def test_each_kind_has_its_own_best_head() -> None:
    items = [item(group, 0, 2, kind=kind) for group in (1, 2) for kind in ("gender", "number", "meaning")]
    hits = np.array([[1, 0], [0, 1], [0, 0]] * 2, dtype=np.bool_)
    found = score_pronouns(HEADS, items, hits)
    assert found is not None
    assert [(score.kind, score.head.head, score.scored) for score in found.scores[1:]] == [
        ("gender", 0, 1),
        ("number", 1, 1),
        ("meaning", 0, 0),
    ]


def test_kinds_that_are_missing_from_a_half_are_not_scored() -> None:
    items = [item(1, 2, 0), item(2, 2, 0), item(3, 2, 0, kind="number")]
    found = score_pronouns(HEADS, items, np.ones((3, 2), dtype=np.bool_))
    assert found is not None
    assert [score.kind for score in found.scores] == ["all", "gender"]
    assert score_pronouns(HEADS, items[:1], np.ones((1, 2), dtype=np.bool_)) is None
    assert score_pronouns(HEADS, [], np.ones((0, 2), dtype=np.bool_)) is None


def test_nearest_noun_may_follow_the_pronoun() -> None:
    assert nearest_noun(item(1, 2, 0)) == 2
    assert nearest_noun(item(1, 5, 0)) == 5
    assert nearest_noun(item(1, 6, 2)) == 2  # equal distances


def test_predictions_are_the_strongest_attention_between_words() -> None:
    """Head 0 attends to the antecedent and to special tokens, head 1 to the word before the pronoun."""
    items = {each.words: each for each in pronoun_items()}

    def weights_of(words: Sequence[str]) -> npt.NDArray[np.float32]:
        found = items[tuple(words)]
        size = len(words) + 2
        antecedent, previous = np.zeros((size, size), np.float32), pointing([0] * size)
        antecedent[:, [0, -1, 1 + found.antecedent]] = [0.5, 0.3, 0.2]
        previous[1 + found.pronoun] = pointing([max(found.pronoun, 1)] * size)[0]
        return np.stack([antecedent, previous])

    source = cast("MapSource", WordSource(weights_of, 2))
    found = measure_coreference(source, lambda *_: None)
    assert found is not None
    assert found.accuracy.tolist() == [1, 0]
    assert [score.kind for score in found.scores] == ["all", "gender", "number", "meaning"]
    assert all((score.head.head, score.scored) == (0, 1) for score in found.scores)
    assert found.scores[0].num_chosen + found.scores[0].num_scored == len(items)


def test_models_without_capacity_are_not_tested() -> None:
    source = cast("MapSource", WordSource(lambda _: np.zeros((1, 2, 2), np.float32), 1))
    with mock.patch.object(source, "encode", lambda texts: [None] * len(texts)):
        assert measure_coreference(source, lambda *_: None) is None
