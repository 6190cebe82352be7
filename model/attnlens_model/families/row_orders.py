"""Row orders of the projection weights in checkpoints.

Shape legend: H heads, K head size.
"""

import torch
from torch import Tensor


def parts_within_heads(num_heads: int, rows: Tensor) -> Tensor:
    """Reorder fused rows from (head, query/key/value) to (query/key/value, head).

    Args:
        num_heads: H.
        rows: Row indices, shape (H * 3 * K,).

    Returns:
        Shape (3 * H * K,).
    """
    return rows.view(num_heads, 3, -1).transpose(0, 1).flatten()


def halves_of_pairs(num_heads: int, rows: Tensor) -> Tensor:
    """Move the first row of each adjacent pair to the first half of its head, the second to the other half.

    Some checkpoints rotate adjacent pairs; `attnlens_model.attention.parts.rotary` rotates components i and
    i + K/2. Reordering both queries and keys leaves their dot products unchanged.

    Args:
        num_heads: H.
        rows: Row indices, shape (H * K,).

    Returns:
        Shape (H * K,).
    """
    return rows.view(num_heads, -1, 2).transpose(1, 2).flatten()


def rotated_parts_within_heads(num_heads: int, rows: Tensor) -> Tensor:
    """Apply `parts_within_heads`, then `halves_of_pairs` to the query and key rows."""
    query, key, value = parts_within_heads(num_heads, rows).chunk(3)
    return torch.cat([halves_of_pairs(num_heads, query), halves_of_pairs(num_heads, key), value])
