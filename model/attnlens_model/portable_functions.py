"""Functions of PyTorch that users call in attention, rewritten for portable ONNX graphs.

PyTorch merges the batch and the heads into one axis in `nn.MultiheadAttention` and `einsum`, and computes
shapes in the graph of `scaled_dot_product_attention`. Most runtimes need constant targets of Reshape, and
contributions need an axis of heads. Means are sums, because ReduceMean of opset 18, in which PyTorch exports,
has no form in opset 17.

B batch, T tokens, D hidden size, H heads, K head size.
"""

import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_NUM_FACTORS = 2
_MAX_COPIES = 64
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
    if dropout_p:
        return None
    if enable_gqa:
        key, value = (
            part.repeat_interleave(query.shape[-3] // part.shape[-3], dim=-3) for part in (key, value)
        )
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


def _einsum(equation: str, *operands: Any) -> Tensor | None:  # noqa: ANN401 - tensors, or one list of them
    """Multiply tensors from the left to the right."""
    factors: list[Tensor] = list(operands[0] if isinstance(operands[0], (list, tuple)) else operands)
    found = _axes(equation, factors)
    if found is None or len(factors) < _NUM_FACTORS:
        return None
    *terms, result = found
    product, axes = factors[0], terms[0]
    for index in range(1, len(factors)):
        later = {*result}.union(*terms[index + 1 :])
        is_last = index == len(factors) - 1
        kept = (
            result
            if is_last
            else "".join(dict.fromkeys(each for each in axes + terms[index] if each in later))
        )
        product, axes = _product(product, axes, factors[index], terms[index], kept), kept
    return product


def _axes(equation: str, factors: Sequence[Tensor]) -> list[str] | None:
    """Return the letters of the axes of each factor and of the result, or None if an axis is repeated."""
    given, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = given.replace(".", "").replace(",", "")
        result = "..." + "".join(sorted(each for each in {*letters} if letters.count(each) == 1))
    terms = given.split(",")
    unused = "".join(each for each in string.ascii_letters if each not in equation)
    counts = [tensor.ndim - len(term.replace(".", "")) for term, tensor in zip(terms, factors, strict=True)]
    dots = unused[: max(counts)]  # for the axes that an ellipsis stands for, which end at the same axis
    terms = [
        term.replace("...", dots[len(dots) - count :]) for term, count in zip(terms, counts, strict=True)
    ]
    sizes: dict[str, object] = {}
    for term, tensor in zip(terms, factors, strict=True):
        if len({*term}) < tensor.ndim:
            return None
        for axis, size in zip(term, tensor.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                return None
    return [*terms, result.replace("...", dots)]


def _product(first: Tensor, left: str, second: Tensor, right: str, result: str) -> Tensor:
    """Multiply two tensors with the axes `left` and `right`, and sum over those that `result` lacks."""
    first, left = _summed(first, left, right + result)
    second, right = _summed(second, right, left + result)
    both = [axis for axis in left if axis in right and axis in result]
    contracted = [axis for axis in left if axis in right and axis not in result]
    rows = [axis for axis in left if axis not in right]
    columns = [axis for axis in right if axis not in left]
    sizes = [second.shape[right.index(axis)] for axis in columns]
    first = first.permute([left.index(axis) for axis in (*both, *rows, *contracted)])
    first = _merged(first, len(both) + len(rows), len(contracted))
    first = first if rows else first.unsqueeze(-2)
    second = second.permute([right.index(axis) for axis in (*both, *contracted, *columns)])
    second = _merged(second, len(both) + len(contracted), len(columns))
    second = _merged(second, len(both), len(contracted))
    for _ in rows[1:] if both else ():
        second = second.unsqueeze(len(both))
    product = first @ second if contracted else first * second
    if len(columns) != 1:
        product = product.reshape(*product.shape[:-1], *sizes)
    product = product if rows else product.squeeze(len(both))
    axes = [*both, *rows, *columns]
    return product.permute([axes.index(axis) for axis in result])


def _summed(tensor: Tensor, axes: str, kept: str) -> tuple[Tensor, str]:
    dropped = [index for index, axis in enumerate(axes) if axis not in kept]
    return (tensor.sum(dropped) if dropped else tensor), "".join(axis for axis in axes if axis in kept)


def _merged(tensor: Tensor, start: int, count: int) -> Tensor:
    """Merge adjacent axes into one, which is new if there are none."""
    return tensor.flatten(start, start + count - 1) if count else tensor.unsqueeze(start)


def _repeat(tensor: Tensor, *repeats: Any) -> Tensor | None:  # noqa: ANN401 - numbers, or one sequence of them
    """Concatenate copies, such as those of keys and values that several heads share."""
    counts = repeats[0] if isinstance(repeats[0], (list, tuple)) else repeats
    if len(counts) != tensor.ndim or not all(
        type(each) is int and 0 < each <= _MAX_COPIES for each in counts
    ):
        return None
    for axis, count in enumerate(counts):
        tensor = torch.cat([tensor] * count, dim=axis) if count > 1 else tensor
    return tensor


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
    Tensor.repeat: _repeat,
    torch.mean: _mean,
    Tensor.mean: _mean,
    torch.var: _variance,
    Tensor.var: _variance,
    torch.std: _standard_deviation,
    Tensor.std: _standard_deviation,
}
