"""A small encoder with a different attention mechanism in each layer."""

from functools import cache
from typing import Any

import torch

from attnlens_export.graph.trace import TracedGraph, trace
from attnlens_model import Encoder, EncoderConfig, new_encoder

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
    """Return the configuration with the given norm placement. Only "pre" has all layers."""
    layers = LAYERS if placement == "pre" else LAYERS[:1]
    return EncoderConfig.from_dict(
        {
            "family": "attnlens",
            "hidden_size": 24,
            "num_layers": len(layers),
            "embeddings": {"vocab_size": 400},
            "positions": {"max_position_embeddings": 64},
            "norm": {"placement": placement},
            "attention": layers,
            "feed_forward": {"intermediate_size": 20, "kind": "gated"},
        }
    )


def random_encoder(config: EncoderConfig) -> Encoder:
    """Return a random encoder in which no norm is the identity and no bias is zero."""
    encoder = new_encoder(config, seed=3).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return encoder


@cache
def traced_mixed(placement: str) -> tuple[Encoder, TracedGraph]:
    """Return the encoder of `mixed_config` with its attention graph. Tracing takes seconds."""
    config = mixed_config(placement)
    encoder = random_encoder(config)
    return encoder, trace(encoder, config)
