"""ALiBi: slopes and biases against BLOOM and hand-computed values."""

from typing import Any

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from attnlens_model import ConfigError, Encoder, SoftmaxAttentionConfig, new_encoder
from attnlens_model.attention.parts.alibi import AlibiBias, alibi_slopes
from configs import small_config
from oracles.jina_bert import slopes


def test_slopes_match_the_paper() -> None:
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(2) == [1 / 16, 1 / 256]
    assert alibi_slopes(1) == [1 / 256]
    assert alibi_slopes(3) == [1 / 16, 1 / 256, 1 / 4]


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 7, 8, 12, 16, 20, 24, 31])
def test_slopes_match_bloom_and_the_authors_code(num_heads: int) -> None:
    ours = torch.tensor(alibi_slopes(num_heads))
    # BLOOM returns slope * key position.
    bloom = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    assert torch.allclose(ours, bloom, rtol=1e-6, atol=0)
    assert alibi_slopes(num_heads) == pytest.approx(slopes(num_heads), rel=1e-13)


@pytest.mark.parametrize("num_tokens", [1, 2, 30])
def test_bias_is_minus_slope_times_distance(num_tokens: int) -> None:
    bias = AlibiBias(3, max_tokens=30)(num_tokens)
    assert bias.shape == (1, 3, num_tokens, num_tokens)
    for head, slope in enumerate(alibi_slopes(3)):
        for query in range(num_tokens):
            for key in range(num_tokens):
                assert bias[0, head, query, key] == -slope * abs(query - key)


def test_buffers_grow_linearly_with_the_maximum_length() -> None:
    with torch.device("meta"):
        module = AlibiBias(12, max_tokens=8192)
    assert sum(buffer.numel() for buffer in module.buffers()) == 8192 + 12
    assert not module.state_dict()
    assert module(3)[0, 0].tolist() == [[0, -0.5, -1], [-0.5, 0, -0.5], [-1, -0.5, 0]]


def test_small_distances_are_exact_in_fp16_at_large_positions() -> None:
    bias = AlibiBias(8, max_tokens=8192).half()(8192)[0, 0]
    assert bias.dtype == torch.float16
    assert torch.equal(bias.diagonal(1), torch.full((8191,), -0.5, dtype=torch.float16))
    assert torch.equal(bias.diagonal(-3), torch.full((8189,), -1.5, dtype=torch.float16))
    assert bias.isfinite().all()


def test_slopes_cast_to_float64_have_no_fp32_rounding_error() -> None:
    module = AlibiBias(12, max_tokens=4).double()
    assert (-module.slopes).flatten().tolist() == alibi_slopes(12)
    assert module.float().slopes.dtype == torch.float32


def test_causal_encoder_matches_the_bloom_bias() -> None:
    """BLOOM adds slope * key position, which differs by a constant per query, so the softmax is the same."""
    config = small_config({"attention.alibi": True, "positions.scheme": "none", "is_causal": True})
    encoder = new_encoder(config, seed=0).double()
    ids = torch.arange(9)[None]
    with torch.no_grad():
        ours = encoder(ids, torch.ones_like(ids), output_attentions=True)
        theirs = _with_bloom_bias(encoder)(ids, torch.ones_like(ids), output_attentions=True)
    for weights, expected in zip(ours.attentions, theirs.attentions, strict=True):
        assert (weights - expected).abs().max() < 1e-14


def _with_bloom_bias(encoder: Encoder) -> Encoder:
    bloom = torch.tensor(alibi_slopes(4), dtype=torch.float64)[:, None, None] * torch.arange(9)  # (H, 1, T)
    shared: Any = encoder.shared[0]
    shared.alibi.forward = lambda _num_tokens: bloom[None]
    return encoder


def test_alibi_and_relative_bias_cannot_be_combined() -> None:
    with pytest.raises(ConfigError, match=r"attention\.alibi=True: must be false if relative_bias is set"):
        small_config({"attention.alibi": True, "attention.relative_bias": {"num_buckets": 8}})
    assert SoftmaxAttentionConfig(num_heads=2, alibi=True).operators == {"Abs"}
