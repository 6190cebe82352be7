"""One small configuration per attention mechanism, shared by all tests so that each is traced once."""

from typing import Any

from attnlens_model import EncoderConfig

_SOFTMAX = {"kind": "softmax", "num_heads": 3}
_LONGFORMER = {"kind": "longformer", "num_heads": 3, "window": 4, "num_global_tokens": 2}
# Texts of up to 28 tokens have full attention.
_BIG_BIRD = {
    "kind": "big_bird",
    "num_heads": 3,
    "block_size": 4,
    "num_random_blocks": 1,
    "table_tokens": 64,
}
LAYERS: dict[str, list[dict[str, Any]]] = {
    "longformer": [_LONGFORMER, _SOFTMAX, _LONGFORMER],
    "big_bird": [_BIG_BIRD, _SOFTMAX, _BIG_BIRD],
    "heads": [
        {"kind": "overlapping", "num_heads": 4, "overlap": 2},
        {"kind": "mixture", "num_heads": 4, "shared_heads": 1, "active_heads": 2},
        {"kind": "composed", "num_heads": 4},
        {"kind": "softmax", "num_heads": 4},
    ],
}


def mechanism_config(name: str) -> EncoderConfig:
    """Return the configuration with the layers of `LAYERS[name]`."""
    return config_with(LAYERS[name])


def config_with(layers: list[dict[str, Any]]) -> EncoderConfig:
    """Return a small configuration. Its vocabulary is that of tests/data/tokenizers/wordpiece."""
    return EncoderConfig.from_dict(
        {
            "family": "attnlens",
            "hidden_size": 24,
            "num_layers": len(layers),
            "embeddings": {"vocab_size": 300},
            "positions": {"max_position_embeddings": 64},
            "attention": layers,
            "feed_forward": {"intermediate_size": 20},
        }
    )
