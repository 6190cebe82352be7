"""Comparisons of related words, with handcrafted weights."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from attnlens_analysis.heads.probes import WordPairItem, word_pair_items
from attnlens_analysis.heads.relatedness import compare_words, measure_relatedness, pair_weight
from attnlens_analysis.heads.words import NO_WORD
from hand_made_maps import WordSource

if TYPE_CHECKING:
    from attnlens_analysis.heads.maps import MapSource


def test_differences_are_relative_to_the_unrelated_word() -> None:
    #                  same, synonym, unrelated; two heads, two items
    weights = np.array(
        [[[0.5, 0.1], [0.3, 0.1], [0.1, 0.1]], [[0.7, 0.1], [0.5, 0.3], [0.1, 0.1]]], dtype=np.float64
    )
    found = compare_words(weights)
    assert found is not None
    assert found.num_items == 2
    assert found.unrelated.tolist() == pytest.approx([0.1, 0.1])
    assert found.same_word.weight.tolist() == pytest.approx([0.6, 0.1])
    assert found.same_word.difference.tolist() == pytest.approx([0.5, 0])
    assert found.synonym.difference.tolist() == pytest.approx([0.3, 0.1])
    # Samples of two items contain one of them twice, or both.
    assert found.synonym.interval[:, 0].tolist() == pytest.approx([0.2, 0.4])
    assert found.same_word.interval[:, 1].tolist() == pytest.approx([0, 0])


def test_items_with_a_missing_variant_are_excluded() -> None:
    weights = np.full((3, 3, 1), 0.2)
    weights[1, 2] = np.nan
    weights[0, 1] = 0.4
    found = compare_words(weights)
    assert found is not None
    assert found.num_items == 2
    assert found.synonym.difference[0] == pytest.approx(0.1)
    assert compare_words(np.full((2, 3, 1), np.nan)) is None


def test_weight_of_split_words_is_a_sum_over_columns_and_a_mean_over_rows() -> None:
    item = WordPairItem("noun", ("a", "b", "a"), 0, 2, "c", "d")
    token_words = np.array([NO_WORD, 0, 0, 1, 2, 2])
    weights = np.zeros((1, 6, 6), dtype=np.float32)
    weights[0, 4, [1, 2]] = [0.25, 0.5]
    weights[0, 5, 2] = 0.25
    weights[0, 1, 4] = 0.5  # from the first to the second word
    assert pair_weight(weights, token_words, item).tolist() == [0.5]


def test_each_variant_of_the_included_texts_is_measured() -> None:
    """Head 0 attends from the second word to the first if they are related, head 1 in every variant."""
    items = {words: item for item in word_pair_items() for words in item.variants}

    def weights_of(words: Sequence[str]) -> npt.NDArray[np.float32]:
        item = items[tuple(words)]
        size, row, column = len(words) + 2, 1 + item.second, 1 + item.first
        weights = np.zeros((2, size, size), dtype=np.float32)
        earlier = words[item.first]
        related = {item.words[item.first]: 0.75, item.synonym: 0.5, item.unrelated: 0.25}
        weights[:, row, column] = related[earlier], 0.5
        return weights

    source = cast("MapSource", WordSource(weights_of, 2))
    found = measure_relatedness(source, lambda *_: None)
    assert found is not None
    assert found.num_items == 74
    assert found.unrelated.tolist() == [0.25, 0.5]
    assert found.same_word.difference.tolist() == [0.5, 0]
    assert found.synonym.difference.tolist() == [0.25, 0]
    assert found.synonym.interval.tolist() == [[0.25, 0], [0.25, 0]]


def test_models_without_capacity_are_not_tested() -> None:
    source = cast("MapSource", WordSource(lambda _: np.zeros((1, 2, 2), np.float32), 1))
    with mock.patch.object(source, "encode", lambda texts: [None] * len(texts)):
        assert measure_relatedness(source, lambda *_: None) is None
