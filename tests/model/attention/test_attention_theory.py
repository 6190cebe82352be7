"""Two common claims about attention: why scores are scaled, and when tokens attend most to themselves."""

import math

import torch
from torch import Tensor, nn

from attention_reference import sizes
from attnlens_model import (
    ATTENTION_WEIGHTS,
    MultiHeadSelfAttention,
    SoftmaxAttentionConfig,
    attention_weights,
)


def softmax_jacobian_norm(weights: Tensor) -> float:
    """Return the median over rows p of the Frobenius norm of d softmax / d scores = diag(p) - p p^T."""
    jacobians = torch.diag_embed(weights) - weights[..., :, None] * weights[..., None, :]
    return float(jacobians.flatten(-2).norm(dim=-1).median())


def test_without_scaling_the_softmax_gradient_vanishes_for_large_heads() -> None:
    # Vaswani et al. 2017, section 3.2.1: with unit-variance queries and keys the scores have variance d_k.
    generator = torch.Generator().manual_seed(0)
    scaled, unscaled = [], []
    for head_dim in (16, 64, 256, 1024):
        shape = (2, 32, 4, 16, head_dim)
        query, key = torch.randn(shape, generator=generator, dtype=torch.float64)
        scaled.append(softmax_jacobian_norm(attention_weights(query, key, None, 1 / math.sqrt(head_dim))))
        unscaled.append(softmax_jacobian_norm(attention_weights(query, key, None, 1.0)))
    assert max(scaled) / min(scaled) < 1.05
    assert unscaled == sorted(unscaled, reverse=True)
    assert unscaled[-1] < 1e-3 * unscaled[0]
    assert unscaled[-1] < 1e-3 * scaled[-1]


def is_diagonal_the_row_maximum(weights: Tensor) -> Tensor:
    """Return (B, H, T): whether a token attends to itself at least as much as to any other token."""
    return weights.diagonal(dim1=-2, dim2=-1) >= weights.amax(dim=-1) - 1e-12


def single_head(seed: int) -> MultiHeadSelfAttention:
    torch.manual_seed(seed)
    return MultiHeadSelfAttention(SoftmaxAttentionConfig(num_heads=1), sizes(16)).double()


def test_tokens_do_not_generally_attend_most_to_themselves() -> None:
    hidden = torch.randn(8, 12, 16, dtype=torch.float64)
    weights = single_head(0)(hidden)[1][ATTENTION_WEIGHTS]
    share = is_diagonal_the_row_maximum(weights).double().mean()
    assert share < 0.5


def test_tied_projections_and_equal_norms_make_the_diagonal_the_row_maximum() -> None:
    # With tied projections, score(i, j) = <u_i, u_j> for u = W x. By Cauchy-Schwarz, it is at most
    # |u_i| |u_j|, so the diagonal |u_i|^2 is the row maximum if all u have the same norm, as for unit x and
    # orthogonal W.
    module = single_head(0)
    nn.init.orthogonal_(module.query.weight)
    module.key.load_state_dict(module.query.state_dict())
    hidden = nn.functional.normalize(torch.randn(8, 12, 16, dtype=torch.float64), dim=-1)
    weights = module(hidden)[1][ATTENTION_WEIGHTS]
    assert is_diagonal_the_row_maximum(weights).all()


def test_tied_projections_alone_guarantee_only_the_row_of_the_longest_query() -> None:
    # With unequal norms, a short u_i and a longer u_j may have <u_i, u_j> > |u_i|^2. Cauchy-Schwarz bounds
    # only the row of the longest u.
    module = single_head(0)
    module.key.load_state_dict(module.query.state_dict())
    hidden = torch.randn(64, 12, 16, dtype=torch.float64)
    weights = module(hidden)[1][ATTENTION_WEIGHTS]
    is_maximum = is_diagonal_the_row_maximum(weights)[:, 0]  # (B, T)
    longest = module.query(hidden).norm(dim=-1).argmax(dim=-1, keepdim=True)
    assert is_maximum.gather(1, longest).all()
    assert not is_maximum.all()
