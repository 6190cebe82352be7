"""UltraBERT's `config.json` before its class was in transformers."""

from typing import Any

import pytest
from transformers import UltrabertConfig

from attnlens_model import ConfigError, EncoderConfig

SIZES: dict[str, Any] = {
    "model_type": "ultrabert",
    "vocab_size": 300,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "intermediate_size": 160,
    "max_position_embeddings": 64,
}
WINDOWS = {"attention_windows": [7, 7, 0, 7]}
THETAS = {"rope_theta": [70.0, 70.0, 900.0, 70.0]}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        WINDOWS,
        {"attention_windows": [None, 7, None, 7]},
        WINDOWS | THETAS,
        THETAS | {"sliding_window": 9},
        THETAS | {"rope_parameters": UltrabertConfig().rope_parameters},
    ],
    ids=str,
)
def test_older_files_are_read_like_in_transformers(changes: dict[str, Any]) -> None:
    written = UltrabertConfig(**SIZES | changes).to_dict()
    assert not {"attention_windows", "rope_theta"} & set(written)
    assert EncoderConfig.from_dict(SIZES | changes) == EncoderConfig.from_dict(written)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_windows": [7, 5, 0, 7]}, "the windows must be equal"),
        ({"attention_windows": [7, 0]}, "must list a number for each layer"),
        ({"rope_theta": 10_000.0}, "must list a number for each layer"),
        ({"sliding_window": 0}, "sliding_window=0 is not supported: it must be an integer of at least 1"),
        ({"layer_types": ["chunked_attention"] * 4}, "it must list full_attention or sliding_attention"),
    ],
)
def test_unsupported_values_are_rejected_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.from_dict(SIZES | changes)
