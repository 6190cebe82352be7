"""Scaled dot-product attention weights, as a pure function.

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V

Vaswani et al. 2017, "Attention Is All You Need", section 3.2. Fused attention kernels are not used because
they do not return the weights.

Shape legend: B batch, T tokens, H heads, K head size.
"""

from torch import Tensor

from attnlens_model.attention.parts.masks import AttentionMask, prepare_mask


def attention_weights(
    query: Tensor,
    key: Tensor,
    keep_mask: Tensor | AttentionMask | None,
    scale: float,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Return softmax(query key^T * scale + position_bias) over the keys that the mask keeps.

    Args:
        query: (B, H, T, K), floating point.
        key: (B, H, T, K), same dtype.
        keep_mask: True or 1 if the query may attend to the key, broadcastable to (B, H, T, T), or a prepared
            `AttentionMask`. If None, all keys are kept.
        scale: Factor applied to the dot products, 1 / sqrt(K) in the paper.
        position_bias: Bias added to the scores, same dtype, broadcastable to (B, H, T, T).

    Returns:
        (B, H, T, T), same dtype. Each row sums to 1 and is exactly 0 at masked keys. If all keys are masked,
        the row is 0.
    """
    scaled = query if scale == 1.0 else query * scale
    scores = scaled @ key.transpose(-2, -1)  # (B, H, T, T)
    if position_bias is not None:
        scores = scores + position_bias
    return masked_softmax(scores, keep_mask)


def masked_softmax(scores: Tensor, keep_mask: Tensor | AttentionMask | None) -> Tensor:
    """Return the softmax of scores (B, H, T, T) over the keys kept by the mask. See `attention_weights`."""
    if keep_mask is None:
        return scores.softmax(dim=-1)
    mask = keep_mask if isinstance(keep_mask, AttentionMask) else prepare_mask(keep_mask, scores.dtype)
    # The softmax of a fully masked row is not 0. The product sets it to 0 and changes no other row.
    return (scores + mask.bias).softmax(dim=-1) * mask.keep
