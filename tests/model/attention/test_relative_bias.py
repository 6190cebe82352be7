"""Relative position bias: buckets against hand-computed values and the formula in float64."""

import math

import pytest
import torch

from attnlens_model.attention.parts.relative_bias import (
    RelativeBiasConfig,
    RelativePositionBias,
    relative_position_bucket,
)

CONFIG = RelativeBiasConfig(num_buckets=32)


def test_buckets_match_hand_computed_values_for_published_sizes() -> None:
    # 8 * (128 / 8) ** (step / 8) = 8 * 2 ** (step / 2): 8, 11.3, 16, 22.6, 32, 45.3, 64, 90.5
    first_of_bucket = [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
    for bucket, first in enumerate(first_of_bucket):
        assert relative_position_bucket(-first, 32, 128) == bucket
        if first:
            assert relative_position_bucket(1 - first, 32, 128) == bucket - 1
            assert relative_position_bucket(first, 32, 128) == bucket + 16
    assert relative_position_bucket(-10_000, 32, 128) == 15
    assert relative_position_bucket(10_000, 32, 128) == 31


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (4, 2), (6, 20), (64, 100), (256, 512)])
def test_buckets_of_other_sizes_follow_the_formula(num_buckets: int, max_distance: int) -> None:
    half = num_buckets // 2
    exact = half // 2
    for distance in range(exact, 700):
        step = math.log(distance / exact) / math.log(max_distance / exact) * (half - exact)
        # If the logarithm is an integer, its float64 value may be rounded to either side.
        if abs(step - round(step)) > 1e-9:
            expected = min(exact + math.floor(step), half - 1)
            assert relative_position_bucket(-distance, num_buckets, max_distance) == expected


@pytest.mark.parametrize("num_tokens", [1, 2, 150])
def test_bias_is_looked_up_by_key_position_minus_query_position(num_tokens: int) -> None:
    module = RelativePositionBias(CONFIG, num_heads=3, max_tokens=150)
    bias = module(num_tokens)
    assert bias.shape == (1, 3, num_tokens, num_tokens)
    for query in range(0, num_tokens, 7):
        for key in range(num_tokens):
            bucket = relative_position_bucket(key - query, 32, 128)
            assert torch.equal(bias[0, :, query, key], module.bias.weight[bucket])


def test_buckets_have_values_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = RelativePositionBias(CONFIG, num_heads=3, max_tokens=3)
    assert module.buckets.flatten().tolist() == [2, 1, 0, 17, 18]
    assert list(module.state_dict()) == ["bias.weight"]
