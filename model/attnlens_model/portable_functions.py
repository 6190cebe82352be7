"""Functions of PyTorch that users call in attention, rewritten for portable ONNX graphs.

PyTorch merges the batch and the heads into one axis in `nn.MultiheadAttention` and `einsum`, and computes
shapes in the graph of `scaled_dot_product_attention`. Most runtimes need constant targets of Reshape, and
contributions need an axis of heads. Means are sums, because ReduceMean of opset 18, in which PyTorch exports,
has no form in opset 17.

B batch, T tokens, D hidden size, H heads, K head size.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_NUM_FACTORS = 2
_PER_HEAD_MASK_AXES = 3


class PortableFunctions(TorchFunctionMode):
    """Context manager in which these functions are computed with matrix products of four axes."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - result of any function
        """Call a function, or its portable form if there is one for these arguments."""
        del types
        kwargs = kwargs or {}
        portable = _PORTABLE.get(func)
        result = None if portable is None else portable(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result


class RecordedAttention(TorchFunctionMode):
    """Context manager that records calls of `nn.MultiheadAttention`, which computes weights only on request.

    It also disables the fused operators of PyTorch, which compute none.

    Attributes:
        weights: Weights of each call, (B, H, T, T).
        axes: The first two axes of the query of each call: tokens and texts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []
        self.axes: list[tuple[int, ...]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - result of any function
        """Call a function, and record it if it is that of `nn.MultiheadAttention`."""
        del types
        kwargs = kwargs or {}
        if func is not functional.multi_head_attention_forward:
            return func(*args, **kwargs)
        self.axes.append(tuple(args[0].shape[:2]))
        output, weights = func(*args, **kwargs | {"need_weights": True, "average_attn_weights": False})
        self.weights.append(weights)
        if not kwargs["need_weights"]:
            return output, None
        return output, weights.mean(dim=1) if kwargs["average_attn_weights"] else weights


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if dropout_p or enable_gqa:
        return None
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return _masked(scores, attn_mask).softmax(dim=-1) @ value


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Apply a mask: True for keys to attend to, or numbers to add."""
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    *,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **options: object,
) -> tuple[Tensor, Tensor | None] | None:
    """Compute `F.multi_head_attention_forward` for self-attention, whose inputs are (T, B, D)."""
    del embed_dim_to_check, is_causal
    if in_proj_weight is None or not query is key is value:
        return None
    if bias_k is not None or bias_v is not None or add_zero_attn or training:
        return None
    del dropout_p, options
    hidden_states = query.transpose(0, 1)  # (B, T, D)
    query, key, value = (
        part.view(*part.shape[:-1], num_heads, -1).transpose(1, 2)  # (B, H, T, K)
        for part in functional.linear(hidden_states, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    )
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if attn_mask is not None:  # (T, T) or (B * H, T, T), True for keys to ignore
        if attn_mask.ndim == _PER_HEAD_MASK_AXES:
            attn_mask = attn_mask.view(-1, num_heads, *attn_mask.shape[1:])
        scores = _masked(scores, ~attn_mask if attn_mask.dtype == torch.bool else attn_mask)
    if key_padding_mask is not None:  # (B, T)
        padding = key_padding_mask[:, None, None]
        scores = _masked(scores, ~padding if padding.dtype == torch.bool else padding)
    weights = scores.softmax(dim=-1)
    heads = (weights @ value).transpose(1, 2).flatten(-2)
    output = functional.linear(heads, out_proj_weight, out_proj_bias).transpose(0, 1)
    if not need_weights:
        return output, None
    return output, weights.mean(dim=1) if average_attn_weights else weights


def _einsum(equation: str, *factors: Tensor) -> Tensor | None:
    """Compute products of two tensors with one contracted axis and one free axis each."""
    if len(factors) != _NUM_FACTORS or "->" not in equation or "." in equation:
        return None
    terms, result = equation.replace(" ", "").split("->")
    left, right = terms.split(",")
    both = [axis for axis in left if axis in right and axis in result]
    contracted = [axis for axis in left if axis in right and axis not in result]
    rows = [axis for axis in left if axis not in right]
    columns = [axis for axis in right if axis not in left]
    if not len(contracted) == len(rows) == len(columns) == 1 or len(set(left + right)) != len(both) + 3:
        return None
    first = factors[0].permute([left.index(axis) for axis in (*both, *rows, *contracted)])
    second = factors[1].permute([right.index(axis) for axis in (*both, *contracted, *columns)])
    axes = [*both, *rows, *columns]
    return (first @ second).permute([axes.index(axis) for axis in result])


def _mean(
    tensor: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, **options: object
) -> Tensor | None:
    if dim is None or options:
        return None
    axes = (dim,) if isinstance(dim, int) else tuple(dim)
    return tensor.sum(axes, keepdim) / math.prod(tensor.shape[axis] for axis in axes)


def _variance(
    tensor: Tensor,
    dim: int | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: int | None = None,
) -> Tensor | None:
    if not isinstance(dim, int):
        return None
    count = tensor.shape[dim]
    deviation = tensor - tensor.sum(dim, keepdim=True) / count
    number = count - (int(unbiased) if correction is None else correction)
    return (deviation * deviation).sum(dim, keepdim) / number


def _standard_deviation(*args: Any, **options: Any) -> Tensor | None:  # noqa: ANN401 - as `_variance`
    variance = _variance(*args, **options)
    return None if variance is None else variance.sqrt()


def _rms_norm(
    tensor: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor | None:
    if len(normalized_shape) != 1:
        return None
    eps = torch.finfo(tensor.dtype).eps if eps is None else eps
    normed = tensor / ((tensor * tensor).sum(-1, keepdim=True) / tensor.shape[-1] + eps).sqrt()
    return normed if weight is None else normed * weight


_PORTABLE: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _scaled_dot_product_attention,
    functional.multi_head_attention_forward: _multi_head_attention,
    functional.rms_norm: _rms_norm,
    torch.einsum: _einsum,
    torch.mean: _mean,
    Tensor.mean: _mean,
    torch.var: _variance,
    Tensor.var: _variance,
    torch.std: _standard_deviation,
    Tensor.std: _standard_deviation,
}
