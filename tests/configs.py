"""Configurations of small encoders, from paths and values."""

from collections.abc import Mapping
from typing import Any

from attnlens_model import EncoderConfig
from attnlens_model.config_part import nested


def small_config(values: Mapping[str, Any] | None = None) -> EncoderConfig:
    """Return the configuration of a two-layer BERT, with `values` overridden by path."""
    sizes = {
        "hidden_size": 48,
        "num_layers": 2,
        "embeddings.vocab_size": 101,
        "positions.max_position_embeddings": 40,
        "attention.kind": "softmax",
        "attention.num_heads": 4,
        "feed_forward.intermediate_size": 56,
    }
    return EncoderConfig.from_dict(_changed(sizes, values or {}))


def changed(config: EncoderConfig, values: Mapping[str, Any]) -> EncoderConfig:
    """Return the configuration with values replaced, such as {"attention.num_heads": 3}."""
    return EncoderConfig.from_dict(_changed(config.by_path(), values))


def _changed(before: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    def is_replaced(path: str) -> bool:
        return any(path.startswith(f"{new}.") or new.startswith(f"{path}.") for new in values)

    kept = {path: value for path, value in before.items() if not is_replaced(path)}
    return nested({**kept, **values})
