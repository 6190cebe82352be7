"""Records the matrix products and softmaxes that a layer computes, without changes to the layer.

The recorder sits below autograd, so it also sees the operators inside `scaled_dot_product_attention` and
`nn.MultiheadAttention`.

Shape legend: B batch, T tokens, H heads, K head size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_MASKED = -1e3
"""Scores below this value are treated as masked."""

_SAME = 1e-4
"""Relative difference up to which numbers are the same."""

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
    """One softmax, or those of all heads: input, normalized axis (counted from the end) and output."""

    scores: Tensor
    axis: int
    weights: Tensor


@dataclass(frozen=True)
class Product:
    """One matrix product, (..., N, K) x (..., K, M)."""

    left: Tensor
    right: Tensor
    result: Tensor

    def transposed(self) -> "Product":
        """Return the same product as (..., M, K) x (..., K, N)."""
        return Product(self.right.mT, self.left.mT, self.result.mT)


@dataclass(frozen=True)
class Attention:
    """The attention of a layer.

    Attributes:
        softmax: The softmax of the scores, or None if weights were computed without one.
        scoring: The product of queries and keys, of which the scores are a multiple, or None.
        context: The product of weights and values, or None.
        is_repeated: Whether a softmax is applied to the result of the softmax.
    """

    softmax: Softmax | None
    scoring: Product | None
    context: Product | None
    is_repeated: bool = False


@dataclass
class Trace:
    """Operators in the order of execution, for `num_texts` texts of `num_tokens` tokens."""

    num_texts: int
    num_tokens: int
    softmaxes: list[Softmax] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)

    def attention(self, *, has_heads: bool = True) -> Attention:
        """Return the first attention of the layer.

        Args:
            has_heads: Whether softmaxes of one map for each text are heads of one attention.
        """
        softmaxes = [each for each in self.softmaxes if self._is_square(each.scores)]
        if not softmaxes:
            return self._without_softmax()
        first = softmaxes[0]
        is_repeated = any(_equal(each.scores, first.weights, visible(each.scores)) for each in softmaxes[1:])
        if not has_heads or first.scores.numel() != self.num_texts * self.num_tokens**2:
            softmaxes = [first]
        softmaxes = [each for each in softmaxes if each.scores.shape == first.scores.shape]
        scoring, contexts = [self._scoring(each) for each in softmaxes], list[Product | None]()
        for softmax in softmaxes:
            contexts.append(self._context(softmax, [each for each in contexts if each is not None]))
        if len(softmaxes) == 1 or is_repeated:
            return Attention(first, scoring[0], contexts[0], is_repeated)
        merged = Softmax(
            torch.stack([each.scores for each in softmaxes], dim=1),
            first.axis,
            torch.stack([each.weights for each in softmaxes], dim=1),
        )
        return Attention(merged, _merged(scoring), _merged(contexts))

    def _is_square(self, tensor: Tensor) -> bool:
        return tensor.shape[-2:] == (self.num_tokens, self.num_tokens)

    def _without_softmax(self) -> Attention:
        """Return the attention of a layer that computes weights itself: their logarithms are scores."""
        contexts = (
            each
            for product in self.products
            for each in (product, product.transposed())
            if self._is_square(each.left) and each.right.shape[-1] != self.num_tokens
        )
        context = next(contexts, None)
        if context is None:
            return Attention(None, None, None)
        weights = context.left
        for axis in (-1, -2):
            if bool((weights >= 0).all()) and _equal(weights.sum(dim=axis), torch.ones(())):
                softmax = Softmax(weights.log(), axis, weights)
                return Attention(softmax, self._scoring(softmax), context)
        return Attention(None, None, context)

    def _scoring(self, softmax: Softmax) -> Product | None:
        matches = (
            product
            for product in reversed(self.products)
            if product.result.numel() == softmax.scores.numel() and self._is_square(product.result)
            if self._slope(product.result, softmax.scores) is not None
        )
        return next(matches, None)

    def _context(self, softmax: Softmax, used: list[Product]) -> Product | None:
        """Return the product with the weights, else the first unused one with a factor of their shape."""
        size = softmax.weights.numel()
        matches = [
            each
            for product in self.products
            for each in (product, product.transposed())
            if self._is_square(each.left)
            and each.left.numel() == size
            and all(each.left is not other.left for other in used)
        ]
        exact = (each for each in matches if _equal(each.left.flatten(), softmax.weights.flatten()))
        return next(exact, matches[0] if matches else None)

    def scale(self, attention: Attention) -> float | None:
        """Return the factor between (projected query) x (projected key) and the scores.

        The factor may be applied to the query, to the key, to the product or to several of these.

        Returns:
            None if scores are not a multiple of such a product.
        """
        if attention.softmax is None or attention.scoring is None:
            return None
        factor = self._slope(attention.scoring.result, attention.softmax.scores)
        queries, keys = attention.scoring.left, attention.scoring.right.mT
        query, key = self.projection_ratio(queries), self.projection_ratio(keys)
        if factor is None:
            return None
        if query is not None and key is not None:
            return factor * query * key
        # Normalized queries and keys have the norm sqrt(K), if they have no weight.
        sizes = [_only(each.norm(dim=-1)) for each in (queries, keys)]
        if sizes[0] is None or sizes[1] is None:
            return None
        head_size = queries.shape[-1]
        scale = factor * sizes[0] * sizes[1] / head_size
        is_known = any(math.isclose(scale, each, rel_tol=1e-3) for each in (1.0, head_size**-0.5))
        return scale if is_known else None

    def projection_ratio(self, heads: Tensor) -> float | None:
        """Return a factor of (B * H, T, K) queries or keys: heads = factor * projection.

        They are recognized as the output of a linear layer by their sorted values, which do not depend on how
        heads are split, or by the norm of each head, which a rotation does not change.
        """
        projections = [product.result for product in self.products]
        chunks = [chunk for projection in projections for chunk in _chunks(projection)]
        ratio = _first(lambda each: _ratio(heads, each), chunks)
        return _first(lambda each: self._norm_ratio(heads, each), projections) if ratio is None else ratio

    def is_rotated(self, heads: Tensor) -> bool:
        """Return whether (B * H, T, K) queries or keys have the norms, but not the values of a projection."""
        found = (self._match(heads, product.result) for product in self.products)
        return next((is_rotated for each in found if each is not None for is_rotated in [each[1]]), False)

    def _norm_ratio(self, heads: Tensor, projection: Tensor) -> float | None:
        match = self._match(heads, projection)
        return None if match is None else match[0]

    def _match(self, heads: Tensor, projection: Tensor) -> tuple[float, bool] | None:
        """Compare the norm of each head with that of K adjacent features of a projection, in all tokens.

        Returns:
            a with |head| = a * |features|, and whether their values differ; or None if the norms differ.
        """
        num_rows, size = self.num_texts * self.num_tokens, heads.shape[-1]
        if projection.numel() % num_rows or (projection.numel() // num_rows) % size:
            return None
        actual = self.heads(heads).double()  # (B, H, T, K)
        for rows in self._rows(projection):  # (B, T, N)
            parts = rows.reshape(*rows.shape[:2], -1, size).double().transpose(1, 2)  # (B, N / K, T, K)
            ratios = actual.norm(dim=-1)[:, :, None] / parts.norm(dim=-1)[:, None]  # (B, H, N / K, T)
            ratios = ratios.transpose(0, 1).transpose(1, 2).flatten(2)  # (H, N / K, B * T)
            same = (ratios - ratios[..., :1]).abs().amax(dim=-1) <= _SAME * ratios[..., 0]  # (H, N / K)
            if not bool(same.any(dim=-1).all()):
                continue
            chosen = same.double().argmax(dim=-1)  # (H,)
            ratio = _only(ratios[torch.arange(len(chosen)), chosen, 0])
            if ratio is not None:
                expected = ratio * parts[:, chosen]
                return ratio, not _equal(actual.sort(dim=-1).values, expected.sort(dim=-1).values)
        return None

    def _rows(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, T, ...) views of a tensor whose rows are ordered by text, and by token."""
        shape = (self.num_texts, self.num_tokens)
        return tensor.reshape(*shape, -1), tensor.reshape(*reversed(shape), -1).transpose(0, 1)

    def heads(self, operand: Tensor) -> Tensor:
        """(B * H, ..., ...) -> (B, H, ..., ...)."""
        return operand.reshape(self.num_texts, -1, *operand.shape[-2:])

    def is_factor(self, matrix: Tensor) -> bool:
        """Return whether a matrix, or its transpose, is a factor of a product with all tokens."""
        return any(
            each.shape == product.right.shape and bool(each.equal(product.right))
            for product in self.products
            for each in (matrix, matrix.mT)
        )

    def joining(self, context: Product, output: Tensor) -> "Joining":
        """Return how the contexts of heads become one vector for each token, projected or not."""
        heads = self.heads(context.result)
        expected = heads.transpose(1, 2).flatten(2).sort(dim=-1).values  # (B, T, H * K)
        for candidate in [*(product.left for product in self.products), output]:
            is_one_head = heads.shape[1] > 1 and candidate.numel() == heads[:, 0].numel()
            if is_one_head and _ratio(candidate, heads.sum(dim=1)) is not None:
                return Joining.ADDED
            if candidate.numel() != heads.numel() or candidate.shape[-1] != expected.shape[-1]:
                continue
            if any(_equal(rows.sort(dim=-1).values, expected) for rows in self._rows(candidate)):
                return Joining.CONCATENATED
            if _equal(candidate.flatten().sort().values, expected.flatten().sort().values):
                return Joining.MIXED
        return Joining.UNKNOWN

    def _slope(self, product: Tensor, scores: Tensor) -> float | None:
        """Return a with scores = a * product + b wherever scores are not masked, or None.

        b may depend on the query, which the softmax cancels, or be the same for all texts, such as a bias by
        distance.
        """
        shape = (self.num_texts, -1, self.num_tokens, self.num_tokens)
        keep = visible(scores).reshape(shape)
        x, y = product.reshape(shape).double(), scores.reshape(shape).double()
        fits = [_fit(x, y, keep), _fit(centered(x, keep), centered(y, keep), keep)]
        if self.num_texts > 1:
            both = keep[0] & keep[1]
            x, y = centered(x[0] - x[1], both), centered(y[0] - y[1], both)
            fits.append(_fit(x, y, both))
        return next((fit for fit in fits if fit is not None), None)


class Joining(Enum):
    """How the contexts of heads become one vector for each token."""

    CONCATENATED = "concatenated"
    ADDED = "added"
    MIXED = "mixed with those of other tokens"
    UNKNOWN = "unknown"


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that records into `trace`."""

    def __init__(self, num_texts: int, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace(num_texts, num_tokens)

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


def centered(values: Tensor, keep: Tensor) -> Tensor:
    """Return (..., T, T) values minus the mean of their row over the kept ones."""
    values = values.where(keep, 0.0)
    return values - values.sum(dim=-1, keepdim=True) / keep.sum(dim=-1, keepdim=True).clamp(min=1)


def _fit(x: Tensor, y: Tensor, keep: Tensor) -> float | None:
    """Return a with y = a * x for all kept values, or None."""
    x, y = x[keep], y[keep]
    if not x.numel() or not bool(x.any()):
        return None
    slope = float(x @ y / (x @ x))
    error = float((y - slope * x).abs().max())
    return slope if error <= _SAME * float(y.abs().max()) else None


def _equal(first: Tensor, second: Tensor, keep: Tensor | None = None) -> bool:
    """Return whether two tensors are equal, or only their kept values."""
    if first.shape != second.shape and second.ndim:
        return False
    second = second.to(first.dtype).expand_as(first)
    if keep is not None:
        first, second = first[keep], second[keep]
    return bool(torch.allclose(first, second, rtol=_SAME, atol=_SAME / 10))


def _only(values: Tensor) -> float | None:
    """Return the value that all values equal, or None."""
    value = float(values.flatten()[0])
    return value if bool(((values - value).abs() <= _SAME * abs(value)).all()) else None


def _merged(products: Sequence[Product | None]) -> Product | None:
    """Return (B, T, ...) products of single heads as one of (B * H, T, ...), or None."""
    found = [each for each in products if each is not None]
    if len(found) != len(products) or len({each.result.shape for each in found}) > 1:
        return None
    parts = [(each.left, each.right, each.result) for each in found]
    return Product(*(torch.stack(part, dim=1).flatten(0, 1) for part in zip(*parts, strict=True)))


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
    return ratio if math.isfinite(ratio) and error <= _SAME * float(actual.abs().max()) else None


def _first(ratio: Callable[[Tensor], float | None], projections: Sequence[Tensor]) -> float | None:
    return next((found for each in projections if (found := ratio(each)) is not None), None)
