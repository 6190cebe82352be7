"""The weights of scaled dot-product attention, as a pure function.

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V

Vaswani et al. 2017, "Attention Is All You Need", section 3.2. It is written out instead of calling a fused
kernel because the weights are a result here.

Letters in shapes: B batch, T tokens, H heads, K head width.
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
        keep_mask: True or 1 where a query may attend to a key, else False or 0; broadcastable to
            (B, H, T, T). An `AttentionMask` is one that was prepared before. None keeps all.
        scale: what the dot products are multiplied by: 1 / sqrt(K) in the paper.
        position_bias: same dtype, broadcastable to (B, H, T, T); None adds nothing.

    Returns:
        (B, H, T, T), same dtype. A row sums to 1, is exactly 0 at masked keys, and all 0 if every key is
        masked.
    """
    scaled = query if scale == 1.0 else query * scale
    scores = scaled @ key.transpose(-2, -1)  # (B, H, T, T)
    if position_bias is not None:
        scores = scores + position_bias
    return masked_softmax(scores, keep_mask)


def masked_softmax(scores: Tensor, keep_mask: Tensor | AttentionMask | None) -> Tensor:
    """Return softmax(scores) over the keys that the mask keeps; both are as in `attention_weights`."""
    if keep_mask is None:
        return scores.softmax(dim=-1)
    mask = keep_mask if isinstance(keep_mask, AttentionMask) else prepare_mask(keep_mask, scores.dtype)
    # The softmax of a fully masked row is not zero: the product makes it so and changes no other row.
    return (scores + mask.bias).softmax(dim=-1) * mask.keep
