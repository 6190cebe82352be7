"""Mistakes in mechanisms, and small encoders in which to make them."""

from typing import Any

from attention_mistakes.heads import COMPOSED, MIXTURE, OVERLAPPING
from attention_mistakes.mistake import Mistake
from attention_mistakes.sparse import BIG_BIRD, LONGFORMER

MISTAKES: dict[str, tuple[Mistake, ...]] = {
    "longformer": LONGFORMER,
    "big_bird": BIG_BIRD,
    "overlapping": OVERLAPPING,
    "mixture": MIXTURE,
    "composed": COMPOSED,
}

_BLOCKS = {"kind": "big_bird", "num_heads": 3, "block_size": 3, "num_random_blocks": 1, "table_tokens": 40}
ATTENTION: dict[str, Any] = {
    # A window of more than a block of queries, and others of its size have the same blocks.
    "longformer": {"kind": "longformer", "num_heads": 4, "window": 34, "num_global_tokens": 2},
    # Up to 21 tokens attend to all. None of its lengths is in the grid of every encoder.
    "big_bird": [_BLOCKS | {"seed": seed} for seed in (0, 1)],
    "overlapping": {"kind": "overlapping", "num_heads": 4, "overlap": 2},
    "mixture": {"kind": "mixture", "num_heads": 6, "shared_heads": 2, "active_heads": 2},
    "composed": {"kind": "composed", "num_heads": 3},
}
"""`attention` of a configuration with two layers of width 24, by mechanism."""
