"""FLOP counts of the encoder, excluding padding."""

from collections.abc import Iterable

from attnlens.v1.manifest_pb2 import Architecture


def text_flops(architecture: Architecture, num_tokens: int) -> int:
    """Return the FLOPs of all matrix products for one text. A multiply-add counts as two.

    For s tokens, hidden size D and intermediate size F, each layer has four projections of 2sD^2, two
    feed-forward products of 2sDF, and two attention products of 2s^2D. Follows Kaplan et al. 2020
    (arXiv:2001.08361), table 1, with full instead of causal attention.
    """
    width, units = architecture.hidden_size, architecture.intermediate_size
    projections = 4 * 2 * num_tokens * width * width
    feed_forward = 2 * 2 * num_tokens * width * units
    attention = 2 * 2 * num_tokens * num_tokens * width
    return architecture.num_layers * (projections + feed_forward + attention)


def total_flops(architecture: Architecture, lengths: Iterable[int]) -> int:
    """Return the FLOPs of texts with the given numbers of tokens."""
    return sum(text_flops(architecture, length) for length in lengths)
