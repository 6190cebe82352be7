"""Shares of near and distant tokens in handcrafted attention maps."""

import numpy as np
import numpy.typing as npt
import pytest

from attnlens_analysis.heads.distances import Distances, DistanceSums
from hand_made_maps import made_maps, pointing

C = 12  # content tokens, between [CLS] and [SEP]
T = C + 2
PLACES = np.arange(T)
# Tokens within a distance of 2: 3 for the tokens at both ends, 4 for their neighbors, 5 for the others.
LOCAL = (2 * 3 + 2 * 4 + 8 * 5) / C**2
# Pairs at a distance of 4 to 11.
LONG_RANGE = 2 * sum(C - distance for distance in range(4, C)) / C**2


def measured(*heads: npt.NDArray[np.float32]) -> Distances:
    sums = DistanceSums()
    sums.add(made_maps(range(5, 5 + C), heads))
    found = sums.means()
    assert found is not None
    return found


def test_uniform_attention_matches_the_baselines() -> None:
    found = measured(np.full((T, T), 1 / T, dtype=np.float32))
    assert (found.num_texts, found.num_rows) == (1, C)
    assert found.content[0] == pytest.approx(C / T)
    assert found.local.share[0] == pytest.approx(found.local.uniform) == pytest.approx(LOCAL)
    assert found.long_range.share[0] == pytest.approx(found.long_range.uniform) == pytest.approx(LONG_RANGE)
    for share in (found.local, found.long_range):
        assert share.ratio[0] == pytest.approx(1)
        assert share.interval[:, 0] == pytest.approx([1, 1])


def test_distances_are_counted_between_content_tokens() -> None:
    def at_distance(distance: int) -> npt.NDArray[np.float32]:
        targets = np.where(PLACES - distance >= 1, PLACES - distance, PLACES + distance)
        return pointing(np.clip(targets, 1, C).tolist())

    found = measured(*(at_distance(distance) for distance in range(6)))
    assert found.local.share.tolist() == [1, 1, 1, 0, 0, 0]
    assert found.long_range.share.tolist() == [0, 0, 0, 0, 1, 1]
    assert found.local.ratio[0] == pytest.approx(1 / LOCAL)
    assert found.long_range.ratio[5] == pytest.approx(1 / LONG_RANGE)


def test_long_range_depends_on_the_number_of_content_tokens() -> None:
    """A quarter of 15 content tokens is less than 4, a quarter of all 17 tokens is more."""
    targets = [0, *(row - 4 if row > 4 else row + 4 for row in range(1, 16)), 0]
    sums = DistanceSums()
    sums.add(made_maps(range(5, 20), [pointing(targets)]))
    found = sums.means()
    assert found is not None
    assert found.long_range.share[0] == 1


def test_special_tokens_are_excluded_and_weights_normalized() -> None:
    near = pointing(np.clip(PLACES, 1, C).tolist())
    mostly_special = 0.25 * near + 0.5 * pointing([0] * T) + 0.25 * pointing([T - 1] * T)
    found = measured(near, mostly_special.astype(np.float32))
    np.testing.assert_allclose(found.content, [1, 0.25])
    np.testing.assert_allclose(found.local.share, [1, 1])


def test_rows_without_weight_on_content_tokens_are_excluded() -> None:
    only_special, partly = pointing([0] * T), pointing([0] * T)
    partly[4] = pointing([4] * T)[0]  # the fourth content token, with 5 of 12 tokens nearby
    found = measured(only_special, partly)
    assert np.isnan([found.local.share[0], found.local.ratio[0], *found.local.interval[:, 0]]).all()
    assert found.local.share[1] == 1
    assert found.local.ratio[1] == pytest.approx(12 / 5)
    assert found.content.tolist() == pytest.approx([0, 1 / C])


def test_texts_are_weighted_by_their_number_of_rows() -> None:
    sums = DistanceSums()
    near, distant = pointing(PLACES.tolist()), pointing([*range(14, 26), *range(14)])
    sums.add(made_maps(range(5, 5 + C), [near]))
    sums.add(made_maps(range(5, 5 + 24), [distant]))
    found = sums.means()
    assert found is not None
    assert (found.num_texts, found.num_rows) == (2, 36)
    # Row 11 of the longer text attends to [SEP], and row 12 to [CLS]; both are excluded.
    assert found.local.share[0] == pytest.approx(12 / (12 + 22))
    assert found.local.interval[0, 0] < found.local.ratio[0] < found.local.interval[1, 0]


def test_short_texts_are_ignored() -> None:
    sums = DistanceSums()
    sums.add(made_maps(range(5, 4 + C), [pointing([0] * (T - 1))]))
    assert sums.means() is None
