"""Linear biases by distance: the slopes and the bias against BLOOM's and against hand-made ones."""

from typing import Any

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from attnlens_model import ConfigError, Encoder, SoftmaxAttentionConfig, new_encoder
from attnlens_model.attention.parts.alibi import AlibiBias, alibi_slopes
from configs import small_config
from oracles.jina_bert import slopes


def test_the_slopes_of_the_paper() -> None:
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(2) == [1 / 16, 1 / 256]
    assert alibi_slopes(1) == [1 / 256]
    assert alibi_slopes(3) == [1 / 16, 1 / 256, 1 / 4]


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 7, 8, 12, 16, 20, 24, 31])
def test_the_slopes_are_those_of_bloom_and_of_the_publishers_recursion(num_heads: int) -> None:
    ours = torch.tensor(alibi_slopes(num_heads))
    # Of each head, slope * position.
    bloom = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    assert torch.allclose(ours, bloom, rtol=1e-6, atol=0)
    assert alibi_slopes(num_heads) == pytest.approx(slopes(num_heads), rel=1e-13)


@pytest.mark.parametrize("num_tokens", [1, 2, 30])
def test_a_bias_is_the_slope_times_the_distance_on_either_side(num_tokens: int) -> None:
    bias = AlibiBias(3, max_tokens=30)(num_tokens)
    assert bias.shape == (1, 3, num_tokens, num_tokens)
    for head, slope in enumerate(alibi_slopes(3)):
        for query in range(num_tokens):
            for key in range(num_tokens):
                assert bias[0, head, query, key] == -slope * abs(query - key)


def test_what_is_kept_grows_with_the_length_and_not_with_its_square() -> None:
    with torch.device("meta"):
        part = AlibiBias(12, max_tokens=8192)
    assert sum(buffer.numel() for buffer in part.buffers()) == 8192 + 12
    assert not part.state_dict()
    assert part(3)[0, 0].tolist() == [[0, -0.5, -1], [-0.5, 0, -0.5], [-1, -0.5, 0]]


def test_near_distances_are_exact_in_half_precision_far_into_a_text() -> None:
    bias = AlibiBias(8, max_tokens=8192).half()(8192)[0, 0]
    assert bias.dtype == torch.float16
    assert torch.equal(bias.diagonal(1), torch.full((8191,), -0.5, dtype=torch.float16))
    assert torch.equal(bias.diagonal(-3), torch.full((8189,), -1.5, dtype=torch.float16))
    assert bias.isfinite().all()


def test_slopes_follow_the_encoder_to_float64_without_the_rounding_of_fp32() -> None:
    part = AlibiBias(12, max_tokens=4).double()
    assert (-part.slopes).flatten().tolist() == alibi_slopes(12)
    assert part.float().slopes.dtype == torch.float32


def test_in_a_causal_encoder_it_is_blooms() -> None:
    """BLOOM adds slope * position of the key, which differs by what a query has in common for all keys."""
    config = small_config({"attention.alibi": True, "positions.scheme": "none", "is_causal": True})
    encoder = new_encoder(config, seed=0).double()
    ids = torch.arange(9)[None]
    with torch.no_grad():
        ours = encoder(ids, torch.ones_like(ids), output_attentions=True)
        theirs = _with_blooms_bias(encoder)(ids, torch.ones_like(ids), output_attentions=True)
    for mine, other in zip(ours.attentions, theirs.attentions, strict=True):
        assert (mine - other).abs().max() < 1e-14


def _with_blooms_bias(encoder: Encoder) -> Encoder:
    bloom = torch.tensor(alibi_slopes(4), dtype=torch.float64)[:, None, None] * torch.arange(9)  # (H, 1, T)
    shared: Any = encoder.shared[0]
    shared.alibi.forward = lambda _num_tokens: bloom[None]
    return encoder


def test_scores_get_one_bias_by_distance_not_two() -> None:
    with pytest.raises(
        ConfigError, match=r"attention\.alibi=True: must be false where there is a relative_bia"
    ):
        small_config({"attention.alibi": True, "attention.relative_bias": {"num_buckets": 8}})
    assert SoftmaxAttentionConfig(num_heads=2, alibi=True).operators == {"Abs"}
