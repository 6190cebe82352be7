"""The arithmetic that a text needs; padding does not count."""

from collections.abc import Iterable

from attnlens.v1.manifest_pb2 import Architecture


def text_flops(architecture: Architecture, num_tokens: int) -> int:
    """Return the floating point operations of the matrix products for one text; a multiply-add counts as two.

    With s tokens, width D and F units in the feed-forward part, each layer has four projections of
    2 * s * D * D, two feed-forward products of 2 * s * D * F, and the products of queries with keys and of
    weights with values, 2 * s * s * D each. As in Kaplan et al. 2020 (arXiv:2001.08361), table 1, except
    that every token attends to all s.
    """
    width, units = architecture.hidden_size, architecture.intermediate_size
    projections = 4 * 2 * num_tokens * width * width
    feed_forward = 2 * 2 * num_tokens * width * units
    attention = 2 * 2 * num_tokens * num_tokens * width
    return architecture.num_layers * (projections + feed_forward + attention)


def total_flops(architecture: Architecture, lengths: Iterable[int]) -> int:
    """Return the operations of texts of these numbers of tokens."""
    return sum(text_flops(architecture, length) for length in lengths)
