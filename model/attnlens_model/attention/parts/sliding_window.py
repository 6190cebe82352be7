"""Sliding-window attention in blocks of queries, in O(T * w) instead of O(T^2) time and memory.

Each block of b consecutive queries is multiplied with the keys of its own block, the r previous blocks and
the r next blocks, where r = ceil(w / b). Global tokens are additional keys of every block. The last block may
be
incomplete: positions outside the input are masked.

Shape legend: B batch, T tokens, H heads, K head size, G global tokens, w window, b block size, C = ceil(T /
b) blocks, S = G + (2r + 1) b keys per block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attnlens_model.attention.parts.masks import AttentionMask, prepare_mask

# Smaller blocks make matrix products too small to be fast; larger ones compute more scores that are masked.
MAX_BLOCK_SIZE = 32


class GlobalTokens(NamedTuple):
    """The first G non-padding tokens, which attend to, and are attended to by, every token."""

    selector: Tensor
    """(B, G, T), floating point: 1 if token t is the g-th global token, otherwise 0."""
    exist: Tensor
    """(B, G, 1), floating point: 1 if the text has a g-th token, otherwise 0."""
    mask: AttentionMask
    """Keys that global tokens attend to: `keep` is (B, 1, G, T), `bias` is (B, 1, 1, T)."""


class Windows(NamedTuple):
    """Queries and keys of each block, with their mask."""

    queries: Tensor
    """(C, b) int64: token positions."""
    key_blocks: Tensor
    """(C, 2r + 1) int64: indices of key blocks in the input padded with r empty blocks on each side."""
    bias: Tensor
    """(B, 1, C, b, S), floating point: 0 if the query may attend to the key, otherwise `MASKED_SCORE`."""
    ones: Tensor
    """(C, 1, 1), floating point."""
    window: int
    num_global: int


def block_size(window: int) -> int:
    """Return b, the number of queries per block, for a window of `window` tokens on each side."""
    return min(window, MAX_BLOCK_SIZE)


def find_global_tokens(attention_mask: Tensor, num_global: int, dtype: torch.dtype) -> GlobalTokens:
    """Return the first G = `num_global` non-padding tokens.

    Args:
        attention_mask: (B, T) int64, 1 or 0.
        num_global: G, at least 1.
        dtype: Floating-point dtype of the result.
    """
    counts = attention_mask.cumsum(dim=1)[:, None]  # (B, 1, T): n for the n-th token
    # fp16 and bfloat16 round large differences, but these remain greater than 1.
    numbers = torch.arange(1, num_global + 1)[:, None]  # (G, 1)
    ranks = counts * attention_mask[:, None]  # 0 for padding
    selector = (1.0 - (ranks - numbers).to(dtype).abs()).clamp(0.0, 1.0)  # (B, G, T)
    exist = ((counts[:, :, -1:] - numbers).to(dtype) + 1.0).clamp(0.0, 1.0)  # (B, G, 1)
    live = prepare_mask(attention_mask[:, None, None, :], dtype)
    return GlobalTokens(selector, exist, AttentionMask(live.keep * exist[:, None], live.bias))


def local_tokens(attention_mask: Tensor, num_global: int, dtype: torch.dtype) -> Tensor:
    """Return (B, T): 1 for tokens that are not global, 0 for global tokens and padding."""
    if num_global == 0:
        return attention_mask.to(dtype)
    ranks = attention_mask.cumsum(dim=1) * attention_mask
    return (ranks - num_global).to(dtype).clamp(0.0, 1.0)


def make_windows(positions: Tensor, local: Tensor, tokens: GlobalTokens | None, window: int) -> Windows:
    """Return the blocks for an input of T tokens.

    Args:
        positions: (T,) int64, the numbers 0 to T - 1.
        local: (B, T), the result of `local_tokens`.
        tokens: Global tokens, if any.
        window: w, at least 1.
    """
    size = block_size(window)
    reach = -(-window // size) * size  # r * b
    num_global = 0 if tokens is None else tokens.selector.shape[1]
    num_keys = 2 * reach + size
    # A strided slice would need no arithmetic on lengths, but not every runtime supports one of dynamic
    # length.
    num_blocks = (local.shape[1] + size - 1) // size  # C
    starts = positions[:num_blocks, None] * size  # (C, 1)
    column = torch.arange(num_global + num_keys)
    # Indices into the concatenation of G global tokens, r * b zeros, T tokens, and zeros.
    indices = starts * (column >= num_global).to(torch.int64) + column  # (C, S)
    zeros = torch.zeros(size - 1, dtype=torch.int64)
    queries = torch.cat([positions, zeros])[starts + torch.arange(size)]  # (C, b)
    key_blocks = positions[:num_blocks, None] + torch.arange(2 * reach // size + 1)  # (C, 2r + 1)

    keep = torch.cat([_make_zeros(local, reach), local, _make_zeros(local, reach + size - 1)], dim=1)
    if tokens is not None:
        keep = torch.cat([tokens.exist[..., 0], keep], dim=1)
    live = keep[:, indices][:, :, None]  # (B, C, 1, S)
    distance = column[None, :] - num_global - reach - torch.arange(size)[:, None]  # (b, S)
    in_window = (distance.abs() <= window) | (column < num_global)
    bias = prepare_mask(live * in_window.to(keep.dtype), keep.dtype).bias  # (B, C, b, S)
    # Computed this way because tract loses the axis of a product with 0.
    ones = (starts + 1).to(local.dtype).clamp(0.0, 1.0)[..., None]
    return Windows(queries, key_blocks, bias[:, None], ones, window, num_global)


def keys_of_blocks(tokens: Tensor, global_tokens: Tensor | None, windows: Windows) -> Tensor:
    """Return the keys (or values) for each block of queries.

    Only whole blocks are gathered, so in the contributions graph the transpose of the gather sums over blocks
    rather than over tokens.

    Args:
        tokens: (B, H, T, K), floating point.
        global_tokens: (B, H, G, K), same dtype. None if there are no global tokens.
        windows: Blocks of the input.

    Returns:
        (B, H, C, S, K), same dtype: global tokens, then the keys of the window, padded with zeros.
    """
    size = block_size(windows.window)
    reach = -(-windows.window // size) * size  # r * b
    # Multiply by zeros instead of expanding, because some runtimes lack Expand.
    left, right = (
        tokens[:, :, :1] * torch.zeros(length, 1, dtype=tokens.dtype) for length in (reach, reach + size - 1)
    )
    padded = torch.cat([left, tokens, right], dim=2)
    num_blocks = (tokens.shape[2] + size - 1) // size  # C
    padded = padded.narrow(2, 0, num_blocks * size + 2 * reach)
    blocks = torch.unflatten(padded, 2, (-1, size))  # (B, H, C + 2r, b, K)
    near = blocks[:, :, windows.key_blocks].flatten(3, 4)  # (B, H, C, (2r + 1) b, K)
    if global_tokens is None:
        return near
    return torch.cat([global_tokens[:, :, None] * windows.ones, near], dim=3)


def window_weights(query: Tensor, keys: Tensor, windows: Windows, scale: float) -> Tensor:
    """Return softmax(query key^T * scale) over the global keys and the keys in the window.

    Args:
        query: (B, H, T, K), floating point.
        keys: (B, H, C, S, K), same dtype, the result of `keys_of_blocks`.
        windows: Blocks of the input.
        scale: Factor applied to the dot products.

    Returns:
        (B, H, C, b, S), same dtype. The row of a query with at least one unmasked key sums to 1 and is
        exactly 0 at masked keys. All other rows are undefined.
    """
    queries = (query * scale)[:, :, windows.queries]  # (B, H, C, b, K)
    return (queries @ keys.transpose(-2, -1) + windows.bias).softmax(dim=-1)


def window_context(weights: Tensor, values: Tensor, num_tokens: int) -> Tensor:
    """Return the concatenated heads (B, T, H * K) for weights (B, H, C, b, S) and values (B, H, C, S, K)."""
    heads = weights @ values  # (B, H, C, b, K)
    concatenated = heads.permute(0, 2, 3, 1, 4).flatten(-2)  # (B, C, b, H * K)
    return concatenated.flatten(1, 2)[:, :num_tokens]


def window_rows(weights: Tensor, windows: Windows, num_tokens: int) -> Tensor:
    """Convert weights (B, H, C, b, S) to rows by relative position, (B, H, T, G + 2w + 1).

    From one row of a block to the next, the key at a given relative position moves one column to the right.
    Reshaping the block to rows that are one element longer compensates for this, so each column has the same
    relative position in all rows.
    """
    size, num_columns = weights.shape[-2:]
    num_global, window = windows.num_global, windows.window
    flat = weights.flatten(-2)
    # The appended elements only fill up the last row and are not read.
    skewed = torch.unflatten(torch.cat([flat, flat[..., :size]], dim=-1), -1, (size, num_columns + 1))
    first = num_global + (num_columns - num_global - size) // 2 - window
    rows = skewed[..., first : first + 2 * window + 1]  # (B, H, C, b, 2w + 1)
    if num_global:
        rows = torch.cat([weights[..., :num_global], rows], dim=-1)
    return rows.flatten(2, 3)[:, :, :num_tokens]


def _make_zeros(tensor: Tensor, length: int) -> Tensor:
    """Return (B, length) zeros for a tensor (B, T): a product, because some runtimes lack Expand."""
    return tensor[:, :1] * torch.zeros(1, length, dtype=tensor.dtype)
