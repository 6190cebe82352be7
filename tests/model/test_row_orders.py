"""Rows that a checkpoint keeps in another order than our projections."""

import torch
from torch import Tensor

from attnlens_model.attention.parts.rotary import RotaryConfig, RotaryTables, rotate
from attnlens_model.families.row_orders import (
    halves_of_pairs,
    parts_within_heads,
    rotated_parts_within_heads,
)
from neobert_oracle import turned

HEADS, WIDTH, TOKENS = 3, 8, 11


def reordered(vectors: Tensor) -> Tensor:
    """(B, T, H * K) -> the same, each head's components in the order of halves."""
    return vectors[..., halves_of_pairs(HEADS, torch.arange(HEADS * WIDTH))]


def heads_of(vectors: Tensor) -> Tensor:
    return torch.unflatten(vectors, -1, (HEADS, WIDTH)).transpose(1, 2)  # (B, H, T, K)


def test_halves_give_the_same_scores_as_adjacent_pairs() -> None:
    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(2, 5, TOKENS, HEADS * WIDTH, generator=generator, dtype=torch.float64)
    expected = turned(heads_of(query)) @ turned(heads_of(key)).transpose(-2, -1)
    rotation = RotaryTables(RotaryConfig(theta=10_000.0), WIDTH, TOKENS).double()(TOKENS)
    halves = [rotate(heads_of(reordered(vectors)), rotation) for vectors in (query, key)]
    assert (halves[0] @ halves[1].transpose(-2, -1) - expected).abs().max() < 1e-12
    unordered = [rotate(heads_of(vectors), rotation) for vectors in (query, key)]
    assert (unordered[0] @ unordered[1].transpose(-2, -1) - expected).abs().max() > 0.1


def test_parts_within_heads_come_out_one_after_the_other() -> None:
    # Two heads of two components: q0 q1 k0 k1 v0 v1 of the first, then of the second.
    assert parts_within_heads(2, torch.arange(12)).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


def test_of_rotated_parts_query_and_key_are_halves_and_value_is_not() -> None:
    found = rotated_parts_within_heads(1, torch.arange(12)).tolist()
    assert found == [0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11]
