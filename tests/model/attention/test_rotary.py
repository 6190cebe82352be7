"""Rotary position embedding and window masks: formula, precision and storage."""

import copy
import math

import pytest
import torch

from attnlens_model import Encoder, new_encoder
from attnlens_model.attention.parts.masks import window_keep_mask
from attnlens_model.attention.parts.rotary import RotaryConfig, RotaryTables, rotate
from configs import small_config

CONFIG = small_config(
    {
        "embeddings.vocab_size": 50,
        "hidden_size": 24,
        "num_layers": 4,
        "feed_forward.intermediate_size": 40,
        "positions.max_position_embeddings": 3000,
        "embeddings.type_vocab_size": 0,
        "positions.scheme": "none",
        "norm.placement": "pre",
        "attention": [
            {"kind": "softmax", "num_heads": 4, "rotary": {"theta": 700.0}},
            {"kind": "softmax", "num_heads": 4, "rotary": {"theta": 90.0}, "window": 3},
        ],
    }
)


def test_pair_is_rotated_by_its_frequency_times_the_position() -> None:
    tables = RotaryTables(RotaryConfig(theta=50.0, divisor=2.5), head_dim=6, max_tokens=9)
    vector = torch.tensor([1.0, 2.0, -3.0, 0.5, -0.25, 4.0])
    rotated = rotate(vector.expand(1, 1, 9, 6), tables(9))[0, 0]
    for position in range(9):
        for pair in range(3):
            angle = position * 50.0 ** (-2 * pair / 6) / 2.5
            a, b = float(vector[pair]), float(vector[pair + 3])
            assert float(rotated[position, pair]) == pytest.approx(
                a * math.cos(angle) - b * math.sin(angle), abs=1e-6
            )
            assert float(rotated[position, pair + 3]) == pytest.approx(
                b * math.cos(angle) + a * math.sin(angle), abs=1e-6
            )


def test_scores_depend_only_on_relative_positions() -> None:
    tables = RotaryTables(RotaryConfig(theta=10_000.0), head_dim=16, max_tokens=40).double()
    query, key = torch.randn(2, 16, dtype=torch.float64)
    rotated = [rotate(vector.expand(1, 1, 40, 16), tables(40))[0, 0] for vector in (query, key)]
    scores = rotated[0] @ rotated[1].T
    for distance in (-20, -1, 0, 7):
        diagonal = scores.diagonal(distance)
        assert (diagonal - diagonal[0]).abs().max() < 1e-12
    assert not torch.allclose(scores.diagonal(1)[:5], scores.diagonal(2)[:5])


@pytest.mark.parametrize(("layer", "theta"), [(0, 700.0), (1, 90.0)])
def test_tables_of_any_dtype_are_rounded_once_from_float64(layer: int, theta: float) -> None:
    encoder = new_encoder(CONFIG, seed=0)
    name = f"shared.{layer}.rotary.cosines"
    frequencies = theta ** -(torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    exact = (torch.arange(3000, dtype=torch.float64)[:, None] * frequencies).cos().repeat(1, 2)
    doubled = copy.deepcopy(encoder).half().float().double()
    assert (doubled.get_buffer(name) - exact).abs().max() < 1e-12
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(encoder.to(dtype).get_buffer(name), exact.to(dtype))


def test_tables_have_values_on_the_meta_device_and_are_not_saved() -> None:
    with torch.device("meta"):
        encoder = Encoder(CONFIG)
    exact = RotaryTables(RotaryConfig(theta=700.0), 6, 3000)
    assert torch.equal(encoder.get_buffer("shared.0.rotary.sines"), exact.sines)
    assert not any("rotary" in name for name in encoder.state_dict())


@pytest.mark.parametrize("window", [1, 3, 4096])
def test_window_mask_is_symmetric(window: int) -> None:
    positions = torch.arange(0, 9000, 37)
    distance = (positions[:, None] - positions[None, :]).abs()
    assert torch.equal(window_keep_mask(positions, window), (distance <= window).float())


def test_local_layers_attend_within_the_window_and_global_layers_to_all_tokens() -> None:
    encoder = new_encoder(CONFIG, seed=1)
    ids = torch.randint(0, 50, (2, 11))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        attentions = encoder(ids, mask, output_attentions=True).attentions
    positions = torch.arange(11)
    near = (positions[:, None] - positions[None, :]).abs() <= 3
    for layer, weights in enumerate(attentions):
        visible = near if layer % 2 else torch.ones_like(near)
        for row in range(2):
            allowed = visible & (mask[row] == 1)[None, :]
            assert ((weights[row] > 0) == allowed).all()


def test_window_is_exact_in_fp16_at_large_positions() -> None:
    encoder = new_encoder(CONFIG, seed=1).half()
    ids = torch.randint(0, 50, (1, 2100))
    with torch.no_grad():
        weights = encoder(ids, torch.ones_like(ids), output_attentions=True).attentions[1]
    # fp16 cannot represent all integers above 2048.
    assert ((weights[0, :, 2080] > 0).nonzero()[:, 1].unique() - 2080).tolist() == [-3, -2, -1, 0, 1, 2, 3]
