"""Contributions from PyTorch's automatic differentiation, with which the contribution graph is compared.

A contribution is a token embedding times the gradient of the target at it, with attention weights, the
deviations of norms and the ratios of activations held constant. `HeldConstant` detaches these values while
the encoder runs. It has the rules of `contributions.flow`, for PyTorch functions in place of operators.

Shapes: B texts in a batch, T tokens, D hidden size, E embedding size, L layers, H heads.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from attnlens.dense import DenseLayer
from attnlens_export.contributions.flow import Flow
from attnlens_export.graph.names import (
    DIRECTION,
    HEAD_GATES,
    NUM_DIMENSIONS,
    POOLING_WEIGHTS,
    TAKES_MAXIMUM,
    TOWARDS_ITSELF,
)
from attnlens_export.parity.grid import Inputs
from attnlens_export.parity.reference import TOLERANCE, differentiable
from attnlens_export.parity.sessions import trim_memory
from attnlens_model import Encoder, ModuleEncoder
from attnlens_model.attention.composed import Composition
from attnlens_model.portable_functions import PortableFunctions

Float64Array = npt.NDArray[np.float64]

# Functions by name, without underscores.
_ELEMENTWISE = frozenset({"mul", "multiply"})
_PRODUCTS = _ELEMENTWISE | {"matmul", "mm", "bmm", "einsum"}
_QUOTIENTS = frozenset({"div", "divide", "true_divide"})
_WITH_PARAMETERS = frozenset({"linear", "conv1d", "conv2d", "addmm"})
_AFFINE = _WITH_PARAMETERS | {"add", "sub", "rsub", "subtract", "cat", "concat", "stack"}
_SQUARES = frozenset({"pow", "square"})
_RECIPROCALS = frozenset({"reciprocal", "rsqrt"})
_ACTIVATIONS = frozenset({"relu", "tanh", "gelu", "silu"})


@dataclass(frozen=True)
class Contributions:
    """Parts of d . p, which are contributions times |p|.

    Attributes:
        tokens: Parts of tokens (B, T).
        heads: Parts of heads (B, L, H), or None for a user's module.
    """

    tokens: Float64Array
    heads: Float64Array | None


@dataclass(frozen=True)
class Reference:
    """Contributions that PyTorch computes, and how exact they are.

    Attributes:
        fp32: Contributions in fp32.
        token_error: Largest rounding error of a token's contribution, for each text (B,).
        head_error: Largest rounding error of a head's contribution, for each text (B,).
    """

    fp32: Contributions
    token_error: Float64Array
    head_error: Float64Array


def reference_contributions(
    encoder: Encoder | ModuleEncoder,
    inputs: Inputs,
    feed: Mapping[str, npt.NDArray[np.generic]],
    dense: Sequence[DenseLayer],
) -> Reference | None:
    """Compute the contributions for the inputs `feed` of the contribution graph.

    Args:
        encoder: Encoder in fp32.
        inputs: Tokens, which `feed` contains too.
        feed: Inputs of the contribution graph.
        dense: Dense layers after the pooling.

    Returns:
        The contributions. None for a user's module whose embeddings are unknown.
    """
    if isinstance(encoder, ModuleEncoder) and not encoder.embeddings:
        return None
    fp32, has_kinks = _differentiate(encoder, inputs, feed, dense, torch.float32)
    # Near the kink of ReLU and for nearly equal maxima, any rounding error changes what is held constant.
    margins = (0.0, TOLERANCE, -TOLERANCE) if has_kinks else (0.0,)
    exact = [_differentiate(encoder, inputs, feed, dense, torch.float64, margin)[0] for margin in margins]
    differences = [difference(*pair) for pair in ((fp32, exact[0]), *itertools.combinations(exact[1:], 2))]
    return Reference(fp32, *(np.max(errors, axis=0) for errors in zip(*differences, strict=True)))


def difference(first: Contributions, second: Contributions) -> tuple[Float64Array, Float64Array]:
    """Return the largest difference of a token and of a head, for each text (B,)."""
    of_tokens = np.abs(first.tokens - second.tokens).max(axis=1)
    if first.heads is None or second.heads is None:
        return of_tokens, np.zeros_like(of_tokens)
    return of_tokens, np.abs(first.heads - second.heads).max(axis=(1, 2))


def _differentiate(
    encoder: Encoder | ModuleEncoder,
    inputs: Inputs,
    feed: Mapping[str, npt.NDArray[np.generic]],
    dense: Sequence[DenseLayer],
    dtype: torch.dtype,
    margin: float = 0.0,
) -> tuple[Contributions, bool]:
    """Return the contributions, and whether they depend on `margin`, see `HeldConstant`."""
    trim_memory()  # of the previous run
    held = HeldConstant(margin)
    leaves: list[Tensor] = []
    with differentiable(encoder, inputs, dtype):
        gates = torch.ones(feed[HEAD_GATES].shape, dtype=dtype, requires_grad=True)
        tensors = {name: torch.from_numpy(array) for name, array in inputs.feed().items()}
        with _observed(encoder, leaves, gates, held), held, PortableFunctions():
            hidden = encoder(**tensors).last_hidden_state
        total = _target(hidden, feed, dense, margin).sum()
        of_tokens, of_heads = torch.autograd.grad(total, [leaves[0], gates], allow_unused=True)
    tokens = (of_tokens * leaves[0].detach()).sum(dim=-1).double().numpy()
    heads = None if of_heads is None else of_heads.double().numpy()
    return Contributions(tokens, heads), held.has_kinks or bool(feed[TAKES_MAXIMUM].any())


@contextmanager
def _observed(
    encoder: Encoder | ModuleEncoder, leaves: list[Tensor], gates: Tensor, held: "HeldConstant"
) -> Iterator[None]:
    """Within the context, append token embeddings to `leaves` and multiply outputs of heads by `gates`."""
    layers = itertools.count()

    def replace(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        leaves.append(leaf)
        copy = leaf.clone()  # some modules change it in place
        held.mark(copy, Flow.LINEAR)
        return copy

    def multiply(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        layer = next(layers)
        num_heads = encoder.config.layer_attentions[layer].num_heads
        of_layer = gates[:, layer, :num_heads].repeat_interleave(args[0].shape[-1] // num_heads, dim=1)
        return (args[0] * of_layer[:, None],)

    if isinstance(encoder, ModuleEncoder):
        hooks = [encoder.module.get_submodule(encoder.embeddings).register_forward_hook(replace)]
    else:
        hooks = [encoder.embeddings.register_forward_hook(replace)]
        # Their attention weights are linear in the embeddings.
        compositions = (module for module in encoder.modules() if isinstance(module, Composition))
        hooks += [each.register_forward_hook(lambda _m, _a, out: held.freeze(out)) for each in compositions]
        outputs = (layer.get_submodule("attention.output") for layer in encoder.layers)
        hooks += [output.register_forward_pre_hook(multiply) for output in outputs]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _target(
    hidden: Tensor, feed: Mapping[str, npt.NDArray[np.generic]], dense: Sequence[DenseLayer], margin: float
) -> Tensor:
    """Return d . p (B,), with all factors of the pooled vectors held constant."""
    given = {
        name: torch.from_numpy(feed[name]).to(hidden.dtype)
        for name in (POOLING_WEIGHTS, TAKES_MAXIMUM, DIRECTION, TOWARDS_ITSELF)
    }
    weights, fixed = given[POOLING_WEIGHTS][..., None], hidden.detach()  # (B, T, 1), (B, T, D)
    candidates = fixed.masked_fill(weights == 0, -torch.inf)
    least = candidates.amax(dim=1, keepdim=True) - max(margin, 0.0) * fixed.abs().amax()
    is_maximum = (candidates >= least).to(hidden.dtype)
    shares = is_maximum / is_maximum.sum(dim=1, keepdim=True)
    takes_maximum = given[TAKES_MAXIMUM][:, None, None] == 1
    vector = (torch.where(takes_maximum, shares, weights) * hidden).sum(dim=1)  # (B, D)
    for layer in dense:
        vector = _apply(layer, vector)
    num_dimensions = torch.from_numpy(feed[NUM_DIMENSIONS])[:, None]
    vector = vector * (torch.arange(vector.shape[1]) < num_dimensions)  # (B, E)
    length = vector.detach().norm(dim=1, keepdim=True)
    direction = given[DIRECTION] + given[TOWARDS_ITSELF][:, None] * vector.detach() / length
    target: Tensor = (direction * vector).sum(dim=1)
    return target


def _apply(layer: DenseLayer, vector: Tensor) -> Tensor:
    """Apply a dense layer, with the ratio of its activation held constant: (B, I) -> (B, O)."""

    def constant(array: npt.NDArray[np.floating]) -> Tensor:
        return torch.from_numpy(np.asarray(array)).to(vector.dtype)

    if layer.normalize_input:
        vector = vector / vector.detach().norm(dim=1, keepdim=True)
    result = vector @ constant(layer.weight).T
    result = result if layer.bias is None else result + constant(layer.bias)
    inputs = result.detach().numpy()
    start = layer.activation(np.zeros_like(inputs))
    ratio = np.divide(layer.activation(inputs) - start, inputs, out=np.zeros_like(inputs), where=inputs != 0)
    result = constant(start) + result * constant(ratio)
    if layer.norm is None:
        return result
    weight, bias = map(constant, layer.norm)
    return _layer_norm(result, result.shape[-1:], weight, bias, layer.norm_epsilon)


def _layer_norm(
    tensor: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    centered = tensor - tensor.mean(dim=axes, keepdim=True)
    deviation = torch.sqrt((centered * centered).mean(dim=axes, keepdim=True) + eps).detach()
    result = centered / deviation
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "").strip("_")


def _is_reciprocal(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether a function divides 1 by a power of its argument."""
    name = _name(func)
    is_negative = name == "pow" and isinstance(args[1], float | int) and args[1] < 0
    return name in _RECIPROCALS or is_negative


class HeldConstant(TorchFunctionMode):
    """Detaches the values that contributions hold constant from the gradient.

    Args:
        margin: An input of ReLU counts as positive above this share of the largest input.

    Attributes:
        has_kinks: Whether ReLU was computed.
    """

    def __init__(self, margin: float = 0.0) -> None:
        super().__init__()
        self._margin = margin
        self._flows: MutableMapping[Tensor, Flow] = WeakTensorKeyDictionary()
        self._reciprocals: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self.has_kinks = False

    def mark(self, tensor: Tensor, flow: Flow) -> None:
        """Set the dependence of a tensor on the token embeddings."""
        self._flows[tensor] = flow

    def freeze(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is held constant."""
        tensor = tensor.detach()
        self.mark(tensor, Flow.FROZEN)
        return tensor

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - result of any function
        """Compute a function, and detach the result if it is frozen."""
        del types
        kwargs = dict(kwargs or {})
        flows = [self._flow(value) for value in pytree.tree_leaves((args, kwargs))]
        if any(flow.is_linear for flow in flows):
            result, flow = self._compute(func, args, kwargs, flows)
        elif Flow.FROZEN in flows:
            result, flow = func(*args, **kwargs), Flow.FROZEN
        else:
            return func(*args, **kwargs)
        result = self._marked(result, flow)
        if _is_reciprocal(func, args):
            self._reciprocals[result] = True
        return result

    def _compute(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        flows: list[Flow],
    ) -> tuple[Any, Flow]:
        """Compute a function of a linear tensor, and return the result with its flow."""
        name = _name(func)
        flow = Flow.LINEAR if Flow.LINEAR in flows else Flow.ACTIVATED
        if name in _PRODUCTS:
            return self._multiply(func, args, kwargs, name)
        if name in _QUOTIENTS:
            divisor = args[1] if len(args) > 1 else kwargs["other"]
            return func(*args, **kwargs), Flow.FROZEN if self._flow(divisor).is_linear else flow
        is_square = name in _SQUARES and flows[0].is_activated and args[1:] in ((), (2,))
        if name in _ACTIVATIONS or is_square:
            return self._activate(args[0], func(*args, **kwargs), is_relu=name == "relu"), Flow.ACTIVATED
        if name == "layer_norm":
            return _layer_norm(*args, **kwargs), Flow.LINEAR
        if name in _AFFINE:
            return func(*args, **kwargs), Flow.LINEAR if name in _WITH_PARAMETERS else flow
        return self._compute_other(func, args, kwargs, flow)

    def _multiply(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> tuple[Any, Flow]:
        """Multiply. The activated factor of two linear factors is held constant, as in gated layers."""
        flows = [self._flow(factor) for factor in args]
        linear = [flow for flow in flows if flow.is_linear]
        is_elementwise = name in _ELEMENTWISE
        if len(linear) == 1:
            is_division = any(isinstance(factor, Tensor) and factor in self._reciprocals for factor in args)
            is_activation = is_elementwise and not {Flow.FROZEN, Flow.OFFSET}.isdisjoint(flows)
            is_activation = is_activation and not is_division
            flow = Flow.ACTIVATED if is_activation else linear[0] if is_elementwise else Flow.LINEAR
            return func(*args, **kwargs), flow
        if not is_elementwise or linear.count(Flow.ACTIVATED) != 1:
            return func(*args, **kwargs), Flow.FROZEN
        fixed = tuple(
            factor.detach() if flow.is_activated else factor for factor, flow in zip(args, flows, strict=True)
        )
        return func(*fixed, **kwargs), Flow.ACTIVATED

    def _activate(self, tensor: Tensor, result: Tensor, *, is_relu: bool) -> Tensor:
        """Return the product of a tensor and the ratio of its activation, which is held constant."""
        fixed, result = tensor.detach(), result.detach()
        if is_relu:
            self.has_kinks = True
            return tensor * (fixed > self._margin * fixed.abs().amax())
        return tensor * torch.where(fixed == 0, torch.ones_like(fixed), result / fixed)

    def _compute_other(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], flow: Flow
    ) -> tuple[Any, Flow]:
        """Compute any other function. It is linear if f(-2x) = -2 f(x): scaling by 2 does not round."""
        result = func(*args, **kwargs)
        if not all(isinstance(tensor, Tensor) for tensor in pytree.tree_leaves(result)):
            return result, flow  # sizes and other properties
        if getattr(func, "__name__", "").endswith("_") and result is args[0]:
            return result, flow  # in place

        def scaled(value: Any) -> Any:  # noqa: ANN401 - any argument
            return -2 * value.detach() if self._flow(value).is_linear else value

        with torch.no_grad():
            of_scaled = func(*pytree.tree_map(scaled, args), **pytree.tree_map(scaled, kwargs))
        pairs = zip(pytree.tree_leaves(of_scaled), pytree.tree_leaves(result), strict=True)
        is_linear = all(torch.equal(other, -2 * each.detach()) for other, each in pairs)
        return result, flow if is_linear else Flow.FROZEN

    def _flow(self, value: object) -> Flow:
        if isinstance(value, Tensor) and value in self._flows:
            return self._flows[value]
        return Flow.CONSTANT

    def _marked(self, result: Any, flow: Flow) -> Any:  # noqa: ANN401 - result of any function
        """Mark the tensors of a result. Frozen tensors are detached."""

        def mark(value: Any) -> Any:  # noqa: ANN401 - part of any result
            if not isinstance(value, Tensor):
                return value
            if not (flow.is_linear and value.requires_grad):
                return self.freeze(value)
            self.mark(value, flow)
            return value

        return pytree.tree_map(mark, result)
