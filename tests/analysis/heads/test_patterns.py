"""Pattern measures of handcrafted attention maps."""

import numpy as np
import pytest

from attnlens_analysis.heads.patterns import Patterns, PatternSums
from hand_made_maps import made_maps, pointing

T = 8
PLACES = np.arange(T)
NO_MARKS = np.zeros(T, dtype=np.bool_)


def measured(
    *heads: object, content: tuple[int, ...] = (5, 6, 7, 8, 9, 10), marks: object = NO_MARKS
) -> Patterns:
    sums = PatternSums(len(heads))
    sums.add(made_maps(content, heads), np.asarray(marks))  # type: ignore[arg-type] # arrays
    return sums.means()


def test_measures_distinguish_positions() -> None:
    heads = {
        "previous": pointing(np.maximum(PLACES - 1, 0).tolist()),
        "next": pointing(np.minimum(PLACES + 1, T - 1).tolist()),
        "first": pointing([0] * T),
        "last": pointing([T - 1] * T),
        "self": pointing(PLACES.tolist()),
    }
    found = measured(*heads.values())
    for number, name in enumerate(heads):
        values = getattr(found, name)
        assert values[number] == 1
        # The first content token follows the first token, and the last one precedes the last token.
        assert np.delete(values, number).max() <= 1 / 6 + 1e-9
    assert found.diagonal_argmax.tolist() == [0, 0, 0, 0, 1]
    assert found.distance.tolist() == pytest.approx([1, 1, 3.5, 3.5, 0])


def test_rows_of_special_tokens_are_ignored() -> None:
    weights = pointing([3] * T)
    other = weights.copy()
    other[[0, -1]] = pointing([5] * T)[[0, -1]]
    found = measured(weights, other)
    for name in ("previous", "next", "first", "self", "entropy", "distance", "diagonal_argmax"):
        assert getattr(found, name)[0] == getattr(found, name)[1]


def test_uniform_attention_matches_the_baselines() -> None:
    uniform = np.full((T, T), 1 / T)
    marks = np.array([0, 0, 1, 0, 0, 1, 0, 0], dtype=np.bool_)
    found = measured(uniform, content=(5, 6, 5, 8, 5, 10), marks=marks)
    assert found.entropy[0] == pytest.approx(np.log(T))
    assert found.entropy_normalized[0] == pytest.approx(1)
    assert found.punctuation[0] == pytest.approx(found.punctuation_share) == pytest.approx(2 / T)
    # Three rows have two other occurrences each.
    assert found.num_duplicate_rows == 3
    assert found.duplicate[0] == pytest.approx(found.duplicate_chance) == pytest.approx(2 / T)
    assert found.self[0] == pytest.approx(found.diagonal_chance)


def test_duplicate_token_head_attends_only_to_other_occurrences() -> None:
    #                  CLS 5  6  7  5  6  7 SEP
    found = measured(pointing([0, 4, 5, 6, 1, 2, 3, 0]), pointing(PLACES.tolist()), content=(5, 6, 7) * 2)
    assert found.num_duplicate_rows == 6
    assert found.duplicate.tolist() == [1, 0]


def test_texts_are_weighted_by_their_number_of_rows() -> None:
    sums = PatternSums(1)
    sums.add(made_maps((5, 6, 7, 8, 9, 10), [pointing(PLACES.tolist())]), NO_MARKS)
    sums.add(made_maps((5, 6), [pointing([0] * 4)]), np.zeros(4, dtype=np.bool_))
    found = sums.means()
    assert (found.num_texts, found.num_rows) == (2, 8)
    assert found.self[0] == 6 / 8
    assert found.first[0] == 2 / 8


def test_missing_texts_are_rejected() -> None:
    with pytest.raises(ValueError, match="at least 8 tokens"):
        PatternSums(1).means()
