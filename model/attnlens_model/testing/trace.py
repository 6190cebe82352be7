"""Records the matrix products and softmaxes that a layer computes, without changes to the layer.

The recorder sits below autograd, so it also sees the operators inside `scaled_dot_product_attention` and
`nn.MultiheadAttention`.

Shape legend: B batch, T tokens, H heads, K head size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_MASKED = -1e3
"""Scores below this value are treated as masked."""

_SOFTMAXES = {torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default}  # noqa: SLF001
# The last two arguments are the factors. The first argument of addmm and baddbmm is a summand.
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
}


@dataclass(frozen=True)
class Softmax:
    """One softmax: its input, the normalized axis (counted from the end) and its output."""

    scores: Tensor
    axis: int
    weights: Tensor


@dataclass(frozen=True)
class Product:
    """One matrix product, (..., N, K) x (..., K, M)."""

    left: Tensor
    right: Tensor
    result: Tensor


@dataclass
class Trace:
    """Operators in the order of execution."""

    softmaxes: list[Softmax] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)

    def attention(self, num_tokens: int) -> Softmax | None:
        """Return the first softmax of a (..., T, T) tensor, or None."""
        shape = (num_tokens, num_tokens)
        return next((softmax for softmax in self.softmaxes if softmax.scores.shape[-2:] == shape), None)

    def score_product(self, softmax: Softmax) -> Product | None:
        """Return the product of queries and keys, of which the scores are a multiple, or None."""
        matches = [
            product
            for product in self.products
            if product.result.numel() == softmax.scores.numel()
            and product.result.shape[-2:] == softmax.scores.shape[-2:]
        ]
        return next(
            (product for product in reversed(matches) if _slope(product.result, softmax.scores) is not None),
            None,
        )

    def value_product(self, softmax: Softmax) -> Product | None:
        """Return the first product whose left factor has the shape of the weights, or None."""
        shape, size = softmax.weights.shape[-2:], softmax.weights.numel()
        matches = (
            product
            for product in self.products
            if product.left.shape[-2:] == shape and product.left.numel() == size
        )
        return next(matches, None)

    def scale(self, softmax: Softmax) -> float | None:
        """Return the factor between (projected query) x (projected key) and the scores.

        The factor may be applied to the query, to the key, to the product or to several of these. Queries and
        keys are recognized as the outputs of linear layers by their sorted values, which do not depend on how
        heads are split.

        Returns:
            None if scores are not a multiple of such a product, e.g. because of rotary position embedding.
        """
        product = self.score_product(softmax)
        if product is None:
            return None
        factor = _slope(product.result, softmax.scores)
        projections = [chunk for other in self.products for chunk in _chunks(other.result)]
        query = _first(lambda each: _ratio(product.left, each), projections)
        key = _first(lambda each: _ratio(product.right, each), projections)
        return None if factor is None or query is None or key is None else factor * query * key


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that records into `trace`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - as in TorchDispatchMode
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - as in TorchDispatchMode
        """Run an operator and record it."""
        del types
        result = func(*args, **(kwargs or {}))
        # Tensors are copied, since layers may change them in place afterwards.
        if func in _SOFTMAXES:
            scores, axis = args[0], args[1]
            axis = axis if axis < 0 else axis - scores.ndim
            self.trace.softmaxes.append(Softmax(scores.detach().clone(), axis, result.detach().clone()))
        elif func in _PRODUCTS:
            left, right = args[-2:]
            tensors = (left.detach().clone(), right.detach().clone(), result.detach().clone())
            self.trace.products.append(Product(*tensors))
        return result


def visible(scores: Tensor) -> Tensor:
    """Return a bool tensor: whether a score is not masked."""
    return scores > _MASKED


def _slope(product: Tensor, scores: Tensor) -> float | None:
    """Return a with scores = a * product wherever scores are not masked, or None."""
    keep = visible(scores).flatten()
    x, y = product.flatten()[keep].double(), scores.flatten()[keep].double()
    slope = float(x @ y / (x @ x))
    error = float((y - slope * x).abs().max())
    return slope if error <= 1e-4 * float(y.abs().max()) else None


def _chunks(projection: Tensor) -> list[Tensor]:
    """Return a projection and, since layers may fuse query, key and value, its thirds."""
    thirds = projection.chunk(3, dim=-1) if projection.shape[-1] % 3 == 0 else ()
    return [projection, *thirds]


def _ratio(operand: Tensor, projection: Tensor) -> float | None:
    """Return a with sort(operand) = a * sort(projection), or None. Heads may repeat the projection."""
    repeats, rest = divmod(operand.numel(), projection.numel())
    if rest or repeats == 0:
        return None
    actual = operand.flatten().double().sort().values
    expected = projection.flatten().double().sort().values.repeat_interleave(repeats)
    ratio = float(actual.norm() / expected.norm())
    error = float((actual - ratio * expected).abs().max())
    return ratio if math.isfinite(ratio) and error <= 1e-4 * float(actual.abs().max()) else None


def _first(ratio: Callable[[Tensor], float | None], projections: Sequence[Tensor]) -> float | None:
    return next((found for each in projections if (found := ratio(each)) is not None), None)
