"""Confidence intervals, compared with scipy."""

import numpy as np
import pytest
from scipy.stats import binomtest, bootstrap

from attnlens_analysis.heads.intervals import bootstrap_ratio, wilson_interval


@pytest.mark.parametrize(("found", "number"), [(0, 10), (5, 10), (81, 263), (10, 10)])
def test_wilson_interval_matches_scipy(found: int, number: int) -> None:
    expected = binomtest(found, number).proportion_ci(method="wilson")
    assert wilson_interval(found, number) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_bootstrap_interval_of_means_matches_scipy() -> None:
    values = np.random.default_rng(5).normal(0.3, 1, (80, 2))
    found = bootstrap_ratio(values, np.ones((80, 1)))
    assert found.shape == (2, 2)
    for column in range(2):
        expected = bootstrap((values[:, column],), np.mean, method="percentile", n_resamples=4000, rng=0)
        assert found[:, column] == pytest.approx(tuple(expected.confidence_interval), abs=0.03)


def test_bootstrap_resamples_numerators_and_denominators_together() -> None:
    denominators = np.random.default_rng(6).integers(1, 9, (30, 2)).astype(float)
    found = bootstrap_ratio(denominators * [2, 3], denominators)
    np.testing.assert_allclose(found, [[2, 3], [2, 3]])


def test_bootstrap_without_denominators_has_no_interval() -> None:
    found = bootstrap_ratio(np.ones((5, 2)), np.array([[0.0, 1.0]] * 5))
    assert np.isnan(found[:, 0]).all()
    assert found[:, 1].tolist() == [1, 1]
