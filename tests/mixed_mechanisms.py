"""A small encoder with another attention in each layer, of which the first three can be taken apart."""

from typing import Any

from attnlens_model import EncoderConfig

SENTENCE = "It rained, so the street was wet."
LAYERS: list[dict[str, Any]] = [
    {
        "kind": "softmax",
        "num_heads": 4,
        "num_key_value_heads": 2,
        "rotary": {"theta": 100.0},
        "head_norm": True,
    },
    {
        "kind": "softmax",
        "num_heads": 4,
        "relative_bias": {"num_buckets": 8, "max_distance": 16},
        "scale": 1.0,
    },
    {"kind": "softmax", "num_heads": 2, "alibi": True, "window": 3},
    {"kind": "longformer", "num_heads": 4, "window": 2},
]


def mixed_config(placement: str = "pre") -> EncoderConfig:
    """Its configuration; `placement` is that of the norms."""
    return EncoderConfig.from_dict(
        {
            "family": "attnlens",
            "hidden_size": 24,
            "num_layers": len(LAYERS),
            "embeddings": {"vocab_size": 400},
            "positions": {"max_position_embeddings": 64},
            "norm": {"placement": placement},
            "attention": LAYERS,
            "feed_forward": {"intermediate_size": 20, "kind": "gated"},
        }
    )
