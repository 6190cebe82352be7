"""Result size and working memory of a reduction in bytes, computed before it runs.

Dimension names: K selected heads, h is 1 if heads are averaged and K otherwise, T tokens, U units, R rows.
"""

from attnlens.reductions.choices import (
    AttentionReduction,
    SqrtUint8,
    Statistics,
    Threshold,
    TopK,
    max_entries,
)

INDEX_BYTES = 4


def data_bytes(
    reduction: AttentionReduction,
    num_heads: int,
    num_units: int,
    *,
    value_bytes: int,
    is_distribution: bool,
) -> int:
    """Return the size of the result for one layer, or for all combined layers.

    The size is exact, except for a threshold, where it is an upper bound.

    Args:
        reduction: Reduction to apply.
        num_heads: h.
        num_units: U.
        value_bytes: Size of a weight: 4 for fp32, 2 for fp16.
        is_distribution: Whether weights are non-negative and no row sums to more than 1.
    """
    num_rows = 1 if reduction.mean_over_rows else len(reduction.rows) or num_units
    rows = num_heads * num_rows
    mass_bytes = rows * value_bytes if reduction.special_tokens == "drop" else 0
    match reduction.form:
        case Statistics(received=received, entropy=entropy):
            return mass_bytes + value_bytes * (num_heads * num_units * received + rows * entropy)
        case TopK(k):
            return mass_bytes + rows * (min(k, num_units) * (INDEX_BYTES + value_bytes) + value_bytes)
        case Threshold(threshold):
            entries = max_entries(threshold, num_units, is_distribution=is_distribution)
            return mass_bytes + rows * (entries * (INDEX_BYTES + value_bytes) + INDEX_BYTES + value_bytes)
        case SqrtUint8():
            return mass_bytes + rows * num_units
    return mass_bytes + rows * num_units * value_bytes


def working_bytes(reduction: AttentionReduction, num_heads: int, num_tokens: int) -> int:
    """Return an upper bound for the memory that a reduction needs besides its result and the graph outputs.

    Args:
        reduction: Reduction to apply.
        num_heads: K.
        num_tokens: T. Words and dropped special tokens need less memory.
    """
    one_map = 4 * num_tokens**2
    maps = num_heads * one_map
    size = 2 * maps  # the selected heads of one layer, and the result of the next step
    if reduction.has_units:
        size += maps
    if reduction.joins_layers:
        size += 6 * one_map if reduction.layers == "rollout" else maps
    match reduction.form:
        case TopK():
            size += 9 * one_map  # per head: keys, their copies, indices, the other weights
        case Threshold():
            size += 8 * maps  # three int64 coordinates per weight if all are kept, a mask, a copy
        case Statistics():
            size += maps + 2 * one_map
        case SqrtUint8():
            size += 2 * maps
    return size
