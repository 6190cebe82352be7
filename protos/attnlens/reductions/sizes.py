"""What a reduction brings and takes, in bytes, known before it runs.

Letters: K heads that are chosen, h 1 where they are averaged, else K, T tokens, U units, R rows.
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
    """Return the bytes of what comes of one layer, or of several together; of a threshold, at most.

    Args:
        reduction: what is asked for.
        num_heads: h.
        num_units: U.
        value_bytes: of a weight: 4 in fp32, 2 in fp16.
        is_distribution: no row sums to more than 1, and no weight is negative.
    """
    num_rows = 1 if reduction.mean_over_rows else len(reduction.rows) or num_units
    rows = num_heads * num_rows
    lost = rows * value_bytes if reduction.special_tokens == "drop" else 0
    match reduction.form:
        case Statistics() as asked:
            return lost + value_bytes * (num_heads * num_units * asked.received + rows * asked.entropy)
        case TopK(k):
            return lost + rows * (min(k, num_units) * (INDEX_BYTES + value_bytes) + value_bytes)
        case Threshold(threshold):
            entries = max_entries(threshold, num_units, is_distribution=is_distribution)
            return lost + rows * (entries * (INDEX_BYTES + value_bytes) + INDEX_BYTES + value_bytes)
        case SqrtUint8():
            return lost + rows * num_units
    return lost + rows * num_units * value_bytes


def working_bytes(reduction: AttentionReduction, num_heads: int, num_tokens: int) -> int:
    """Return the bytes that a reduction takes while it runs, beside its result and the graph's outputs.

    Args:
        reduction: what is asked for.
        num_heads: K.
        num_tokens: T; words and texts without special tokens take less.
    """
    one_map = 4 * num_tokens**2
    # The chosen heads of one layer, and what the next step makes of them.
    maps = num_heads * one_map
    size = 2 * maps
    if reduction.has_units:
        size += maps
    if reduction.joins_layers:
        size += 6 * one_map if reduction.layers == "rollout" else maps
    match reduction.form:
        case TopK():
            size += 9 * one_map  # of one head: keys, their copies, indices, the rest
        case Threshold():
            size += 8 * maps  # three coordinates in int64 where all are kept, a mask, a copy
        case Statistics():
            size += maps + 2 * one_map
        case SqrtUint8():
            size += 2 * maps
    return size
