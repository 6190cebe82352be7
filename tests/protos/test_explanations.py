"""Explanation formulas on random arrays."""

import math

import numpy as np
import pytest

from attnlens.explanations import (
    exclude_token,
    interaction_matrix,
    leave_one_out_effects,
    output_matrix,
    output_shares,
    pool_weighted,
    pooling_weights,
    rank_correlation,
    received_attention,
    rollout,
    sum_over_words,
    to_unit_length,
)
from attnlens.pooling import Pooling, pool

LINEAR = [pooling for pooling in Pooling if pooling is not Pooling.MAX]


def vectors(num_tokens: int, seed: int = 0, width: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_tokens, width)).astype(np.float32)


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize(("num_tokens", "num_excluded"), [(1, 0), (7, 0), (7, 3), (7, 6)])
def test_pooling_weights_match_pool(pooling: Pooling, num_tokens: int, num_excluded: int) -> None:
    hidden = vectors(num_tokens)
    weights = pooling_weights(pooling, num_tokens, num_excluded)
    actual = pool_weighted(hidden, weights, pooling)
    np.testing.assert_allclose(actual, pool(hidden, pooling, num_excluded), atol=1e-6)
    assert not weights[:num_excluded].any()


def test_excluding_a_token_keeps_the_positions_of_the_others() -> None:
    hidden = vectors(4)
    others = hidden[[0, 1, 3]]
    for pooling, expected in {
        Pooling.MEAN: others.mean(axis=0),
        Pooling.MEAN_SQRT_LENGTH: others.sum(axis=0) / math.sqrt(3),
        Pooling.WEIGHTED_MEAN: (hidden[0] + 2 * hidden[1] + 4 * hidden[3]) / 7,
        Pooling.MAX: others.max(axis=0),
        Pooling.CLS: hidden[0],
        Pooling.LAST_TOKEN: hidden[3],
    }.items():
        weights = exclude_token(pooling_weights(pooling, 4), pooling, 2)
        assert weights is not None
        np.testing.assert_allclose(pool_weighted(hidden, weights, pooling), expected, atol=1e-6)


@pytest.mark.parametrize(("pooling", "token"), [(Pooling.CLS, 0), (Pooling.LAST_TOKEN, 3), (Pooling.MEAN, 0)])
def test_excluding_the_only_pooled_token_returns_none(pooling: Pooling, token: int) -> None:
    num_tokens = 1 if pooling is Pooling.MEAN else 4
    assert exclude_token(pooling_weights(pooling, num_tokens), pooling, token) is None


@pytest.mark.parametrize("pooling", LINEAR)
def test_output_shares_add_up_to_the_target_with_any_linear_pooling(pooling: Pooling) -> None:
    hidden, direction = vectors(6), vectors(1, seed=1)[0, :3].astype(np.float64)
    weights = pooling_weights(pooling, 6, num_excluded=2)
    embedding = pool_weighted(hidden, weights, pooling)[:3]
    length = float(np.linalg.norm(embedding))
    shares = output_shares(hidden, weights, direction, length)
    assert shares.sum() == pytest.approx(direction @ embedding / length, abs=1e-6)
    assert not shares[:2].any()


def test_output_matrix_adds_up_to_the_cosine_and_its_rows_to_the_output_shares() -> None:
    first, second = vectors(4), vectors(3, seed=1)
    weights = pooling_weights(Pooling.MEAN, 4), pooling_weights(Pooling.WEIGHTED_MEAN, 3)
    a, b = weights[0] @ first[:, :4], weights[1] @ second[:, :4]
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    matrix = output_matrix((first, weights[0]), (second, weights[1]), lengths, 4)
    assert matrix.shape == (4, 3)
    assert matrix.sum() == pytest.approx(a @ b / lengths, abs=1e-6)
    shares = output_shares(first, weights[0], to_unit_length(b), float(np.linalg.norm(a)))
    np.testing.assert_allclose(matrix.sum(axis=1), shares, atol=1e-6)


def test_interaction_is_the_second_difference_of_the_cosine() -> None:
    a, b = to_unit_length(vectors(1)[0]), to_unit_length(vectors(1, seed=1)[0])
    without_a, without_b = to_unit_length(vectors(3, seed=2)), to_unit_length(vectors(2, seed=3))
    without_a[0] = np.nan
    matrix = interaction_matrix((a, without_a), (b, without_b))
    assert np.isnan(matrix[0]).all()
    expected = a @ b - without_a[2] @ b - a @ without_b[1] + without_a[2] @ without_b[1]
    assert matrix[2, 1] == pytest.approx(expected, abs=1e-12)


def test_leaving_out_a_token_lowers_the_own_embedding_target_to_the_cosine() -> None:
    own, masked = to_unit_length(vectors(1)[0]), to_unit_length(vectors(3, seed=2))
    effects = leave_one_out_effects(own, own, masked)
    np.testing.assert_allclose(effects, 1 - masked @ own, atol=1e-12)


def test_rollout_multiplies_later_layers_from_the_left() -> None:
    generator = np.random.default_rng(0)
    layers = [generator.dirichlet(np.ones(4), 4) for _ in range(3)]
    product = np.eye(4)
    for layer in layers:
        product = (0.25 * np.eye(4) + 0.75 * layer) @ product
    weights = pooling_weights(Pooling.WEIGHTED_MEAN, 4)
    np.testing.assert_allclose(rollout(layers, weights, 0.25), weights @ product, atol=1e-7)
    assert rollout(layers, weights).sum() == pytest.approx(1)
    assert rollout(layers, pooling_weights(Pooling.MEAN_SQRT_LENGTH, 4)).sum() == pytest.approx(1)
    np.testing.assert_allclose(received_attention(layers[-1]), layers[-1].sum(axis=0))


def test_word_scores_are_sums_along_either_axis_and_propagate_nan() -> None:
    scores = np.array([np.nan, 1.0, 2.0, 4.0])
    words = [0, 1, 1, 2]
    np.testing.assert_array_equal(sum_over_words(scores, words), [np.nan, 3, 4])
    matrix = np.arange(8.0).reshape(2, 4)
    np.testing.assert_array_equal(sum_over_words(matrix, words, axis=1), [[0, 3, 3], [4, 11, 7]])


def test_rank_correlation_equals_spearmans() -> None:
    assert rank_correlation(np.array([1.0, 5.0, 3.0]), np.array([10.0, 30.0, 20.0])) == pytest.approx(1)
    assert rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: covariance 4.5, variances 4.5 and 5.
    tied = rank_correlation(np.array([1.0, 2.0, 2.0, 9.0]), np.array([0.0, 7.0, 1.0, 8.0]))
    assert tied == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    with_gaps = np.array([np.nan, 1.0, 2.0, 3.0, np.nan])
    assert rank_correlation(np.array([99.0, 1.0, 2.0, 3.0, -99.0]), with_gaps) == pytest.approx(1)
    assert math.isnan(rank_correlation(with_gaps[:3], np.zeros(3)))
    assert math.isnan(rank_correlation(np.ones(4), np.arange(4.0)))
