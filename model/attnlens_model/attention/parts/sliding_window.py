"""Attention in a sliding window, in blocks of queries: O(T w) time and memory in place of O(T^2).

b consecutive queries are computed together with the keys that any of them can see, those of the r blocks
before and the r after theirs, r = ceil(w / b). Tokens that all attend to (global ones) are keys of every
block. T need not be a multiple of b: positions beyond the ends are masked.

Letters in shapes: B batch, T tokens, H heads, K head width, G global tokens, w window, b block size,
C = ceil(T / b) blocks, S = G + (2r + 1) b keys of a block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attnlens_model.attention.parts.masks import AttentionMask, prepare_mask

# Fewer queries would make products of matrices too small to be fast, more would see more keys in vain.
MAX_BLOCK_SIZE = 32


class GlobalTokens(NamedTuple):
    """The first G tokens that are no padding: they attend to all, and all attend to them."""

    selector: Tensor
    """(B, G, T), floating point: 1 where token t is the g-th of them, else 0."""
    exist: Tensor
    """(B, G, 1), floating point: 0 where a text has no g-th token, else 1."""
    mask: AttentionMask
    """What they attend to: (B, 1, G, T) where it is multiplied, (B, 1, 1, T) where it is added."""


class Windows(NamedTuple):
    """Which queries and keys make a block, and which of these may attend to which."""

    queries: Tensor
    """(C, b) int64: places among T tokens."""
    key_blocks: Tensor
    """(C, 2r + 1) int64: blocks of keys of each block of queries, among r empty blocks, C blocks, and r empty
    blocks."""
    bias: Tensor
    """(B, 1, C, b, S), floating point: 0 where a query may attend to a key, else `MASKED_SCORE`."""
    ones: Tensor
    """(C, 1, 1), floating point."""
    window: int
    num_global: int


def block_size(window: int) -> int:
    """Return b, how many queries are computed together where each sees `window` places on each side."""
    return min(window, MAX_BLOCK_SIZE)


def find_global_tokens(attention_mask: Tensor, num_global: int, dtype: torch.dtype) -> GlobalTokens:
    """Return the first G = `num_global` tokens that are no padding, wherever they stand.

    Args:
        attention_mask: (B, T) int64, 1 or 0.
        num_global: G, at least 1.
        dtype: of the result.
    """
    counts = attention_mask.cumsum(dim=1)[:, None]  # (B, 1, T): the n-th token has n
    # Numbers that fp16 and bfloat16 round are still far from those of the global tokens.
    numbers = torch.arange(1, num_global + 1)[:, None]  # (G, 1)
    ranks = counts * attention_mask[:, None]  # padding has 0
    selector = (1.0 - (ranks - numbers).to(dtype).abs()).clamp(0.0, 1.0)  # (B, G, T)
    exist = ((counts[:, :, -1:] - numbers).to(dtype) + 1.0).clamp(0.0, 1.0)  # (B, G, 1)
    live = prepare_mask(attention_mask[:, None, None, :], dtype)
    return GlobalTokens(selector, exist, AttentionMask(live.keep * exist[:, None], live.bias))


def local_tokens(attention_mask: Tensor, num_global: int, dtype: torch.dtype) -> Tensor:
    """Return (B, T), 1 for a token that is neither padding nor one of the first `num_global`, else 0."""
    if num_global == 0:
        return attention_mask.to(dtype)
    ranks = attention_mask.cumsum(dim=1) * attention_mask
    return (ranks - num_global).to(dtype).clamp(0.0, 1.0)


def make_windows(positions: Tensor, local: Tensor, tokens: GlobalTokens | None, window: int) -> Windows:
    """Return the blocks of T tokens.

    Args:
        positions: (T,) int64: 0, 1, 2 ...
        local: (B, T), floating point: 1 for keys of the window, 0 for padding and global tokens.
        tokens: the global ones; None: there are none.
        window: w, at least 1.
    """
    size = block_size(window)
    reach = -(-window // size) * size  # r * b
    num_global = 0 if tokens is None else tokens.selector.shape[1]
    num_keys = 2 * reach + size
    # A slice in steps would do without arithmetic on lengths; not every runtime has one of unknown length.
    num_blocks = (local.shape[1] + size - 1) // size  # C
    starts = positions[:num_blocks, None] * size  # (C, 1)
    column = torch.arange(num_global + num_keys)
    # Places in a row of G global tokens, r * b of nothing, T tokens, and nothing again.
    places = starts * (column >= num_global).to(torch.int64) + column  # (C, S)
    nothing = torch.zeros(size - 1, dtype=torch.int64)
    queries = torch.cat([positions, nothing])[starts + torch.arange(size)]  # (C, b)
    key_blocks = positions[:num_blocks, None] + torch.arange(2 * reach // size + 1)  # (C, 2r + 1)

    keep = torch.cat([_zeros(local, reach), local, _zeros(local, reach + size - 1)], dim=1)
    if tokens is not None:
        keep = torch.cat([tokens.exist[..., 0], keep], dim=1)
    live = keep[:, places][:, :, None]  # (B, C, 1, S)
    distance = column[None, :] - num_global - reach - torch.arange(size)[:, None]  # (b, S)
    in_window = (distance.abs() <= window) | (column < num_global)
    bias = prepare_mask(live * in_window.to(keep.dtype), keep.dtype).bias  # (B, C, b, S)
    # tract drops the axis of a product with 0.
    ones = (starts + 1).to(local.dtype).clamp(0.0, 1.0)[..., None]
    return Windows(queries, key_blocks, bias[:, None], ones, window, num_global)


def keys_of_blocks(tokens: Tensor, global_tokens: Tensor | None, windows: Windows) -> Tensor:
    """Return the keys, or the values, of each block of queries.

    Every step only moves whole blocks, and the only step that copies a token several times looks blocks up.
    Its transpose, which the graph of contributions needs, therefore sums over blocks, not over tokens.

    Args:
        tokens: (B, H, T, K), floating point.
        global_tokens: (B, H, G, K), same dtype; None if there are no global tokens.
        windows: see there.

    Returns:
        (B, H, C, S, K), same dtype: global tokens, then those of the window; 0 beyond the ends.
    """
    size = block_size(windows.window)
    reach = -(-windows.window // size) * size  # r b
    # Products, since Expand is not in every runtime.
    before, behind = (
        tokens[:, :, :1] * torch.zeros(length, 1, dtype=tokens.dtype) for length in (reach, reach + size - 1)
    )
    padded = torch.cat([before, tokens, behind], dim=2)
    num_blocks = (tokens.shape[2] + size - 1) // size  # C
    padded = padded.narrow(2, 0, num_blocks * size + 2 * reach)
    blocks = torch.unflatten(padded, 2, (-1, size))  # (B, H, C + 2r, b, K)
    near = blocks[:, :, windows.key_blocks].flatten(3, 4)  # (B, H, C, (2r + 1) b, K)
    if global_tokens is None:
        return near
    return torch.cat([global_tokens[:, :, None] * windows.ones, near], dim=3)


def window_weights(query: Tensor, keys: Tensor, windows: Windows, scale: float) -> Tensor:
    """Return softmax(query key^T * scale) over the global keys and those of the window.

    Args:
        query: (B, H, T, K), floating point.
        keys: (B, H, C, S, K), same dtype, see `keys_of_blocks`.
        windows: see there.
        scale: what the dot products are multiplied by.

    Returns:
        (B, H, C, b, S), same dtype. The row of a query that may attend to a key sums to 1 and is exactly 0 at
        all that it may not attend to. The rows of others have no meaning.
    """
    queries = (query * scale)[:, :, windows.queries]  # (B, H, C, b, K)
    return (queries @ keys.transpose(-2, -1) + windows.bias).softmax(dim=-1)


def window_context(weights: Tensor, values: Tensor, num_tokens: int) -> Tensor:
    """Return (B, T, H * K) of weights (B, H, C, b, S) and values (B, H, C, S, K), as keys are."""
    heads = weights @ values  # (B, H, C, b, K)
    merged = heads.permute(0, 2, 3, 1, 4).flatten(-2)  # (B, C, b, H * K)
    return merged.flatten(1, 2)[:, :num_tokens]


def window_rows(weights: Tensor, windows: Windows, num_tokens: int) -> Tensor:
    """Return weights (B, H, C, b, S) by query and distance: (B, H, T, G + 2w + 1).

    The key of a distance stands one column farther right in each further row of a block. Read with rows that
    are one longer, each row starts one farther left, and a distance is a column.
    """
    size, num_columns = weights.shape[-2:]
    num_global, window = windows.num_global, windows.window
    flat = weights.flatten(-2)
    # What makes up the length is never read.
    skewed = torch.unflatten(torch.cat([flat, flat[..., :size]], dim=-1), -1, (size, num_columns + 1))
    first = num_global + (num_columns - num_global - size) // 2 - window
    rows = skewed[..., first : first + 2 * window + 1]  # (B, H, C, b, 2w + 1)
    if num_global:
        rows = torch.cat([weights[..., :num_global], rows], dim=-1)
    return rows.flatten(2, 3)[:, :, :num_tokens]


def _zeros(tensor: Tensor, number: int) -> Tensor:
    """Return (B, number) zeros beside (B, T): a product, since Expand is not in every runtime."""
    return tensor[:, :1] * torch.zeros(1, number, dtype=tensor.dtype)
