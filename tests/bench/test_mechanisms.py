"""Lengths at which one encoder becomes faster than another."""

from dataclasses import replace

import pytest

from attnlens_model import EncoderConfig
from bench.studies import mechanisms

LENGTHS = (128, 256, 512, 1024)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([300 / length for length in LENGTHS], 300),
        ([0.9, 1.25, 0.8, 0.7], 256 * 2**0.5),  # the last crossing, halfway between equal factors
        ([0.9, 0.8, 0.7, 0.6], 128),
        ([0.9, 0.8, 0.7, 1.0], None),
    ],
)
def test_crossing_is_the_length_from_which_all_ratios_are_below_one(
    ratios: list[float], expected: float | None
) -> None:
    assert mechanisms.crossing(LENGTHS, ratios) == pytest.approx(expected)


def long_config(name: str) -> EncoderConfig:
    return mechanisms.configuration(mechanisms.LONG_TEXTS[name], mechanisms.LONG_LENGTHS[-1])


@pytest.mark.parametrize("name", [name for name in mechanisms.LONG_TEXTS if name != mechanisms.PLAIN])
def test_encoders_of_long_texts_differ_only_in_attention_and_accept_the_longest_text(name: str) -> None:
    plain, config = long_config(mechanisms.PLAIN), long_config(name)
    assert config.positions.max_position_embeddings == mechanisms.LONG_LENGTHS[-1]
    assert replace(config, attention=plain.attention) == plain
