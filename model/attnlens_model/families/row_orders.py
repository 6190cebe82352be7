"""The orders in which checkpoints keep the rows of projections to heads.

Letters in shapes: H heads, K head width.
"""

import torch
from torch import Tensor


def parts_within_heads(num_heads: int, rows: Tensor) -> Tensor:
    """Return the rows of one part after the other; the tensor has query, key and value within each head.

    `rows` is (H * 3 * K,) and stays of that shape.
    """
    return rows.view(num_heads, 3, -1).transpose(0, 1).flatten()


def halves_of_pairs(num_heads: int, rows: Tensor) -> Tensor:
    """Return, of each head, the first rows of all pairs of neighbours, then the second ones.

    Some checkpoints rotate such pairs; here component i and i + K/2 are one, see
    `attnlens_model.attention.parts.rotary`. The dot products of queries and keys stay what they are if both
    are reordered. `rows` is (H * K,).
    """
    return rows.view(num_heads, -1, 2).transpose(1, 2).flatten()


def rotated_parts_within_heads(num_heads: int, rows: Tensor) -> Tensor:
    """Return the rows as `parts_within_heads`, those of query and key as `halves_of_pairs`."""
    query, key, value = parts_within_heads(num_heads, rows).chunk(3)
    return torch.cat([halves_of_pairs(num_heads, query), halves_of_pairs(num_heads, key), value])
