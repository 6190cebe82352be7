"""Reference for token contributions: PyTorch gradients in float64, independent of the exported graph.

Values that the contribution graph holds constant are detached from the gradient as the encoder runs.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnlens_model import Encoder
from attnlens_model.attention.composed import Composition
from attnlens_model.attention.mixture import _Router
from attnlens_model.experts import Experts
from attnlens_model.feed_forward import FeedForward


def _layer_norm(x: Tensor, _shape: object, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    deviation = torch.sqrt((centred * centred).mean(dim=-1, keepdim=True) + eps).detach()
    result = centred / deviation * weight
    return result if bias is None else result + bias


class Frozen(TorchFunctionMode):
    """Replaces nonlinear functions by linear ones with constant factors computed from the text."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "layer_norm":
            with torch._C.DisableTorchFunctionSubclass():
                return _layer_norm(*args, **kwargs)
        if name == "relu":
            return args[0] * (args[0].detach() > 0)
        result = func(*args, **kwargs)
        return result.detach() if name in {"softmax", "erf", "sigmoid", "sqrt", "tanh"} else result


@contextmanager
def _cut_off(encoder: nn.Module) -> Iterator[None]:
    """Detach values that no single function returns: unit gates, head gates, composed weights."""
    kept: list[tuple[FeedForward, Callable[[Tensor], Tensor]]] = []
    hooks = []
    for module in encoder.modules():
        if isinstance(module, FeedForward) and module.gate is not None:
            activation = module.activation
            kept.append((module, activation))
            module.activation = _detached(activation)
        if isinstance(module, Composition):
            hooks.append(module.register_forward_hook(lambda _m, _a, output: output.detach()))
        if isinstance(module, _Router):
            hooks.append(
                module.register_forward_hook(lambda _m, _a, out: out._replace(gates=out.gates.detach()))
            )
        if isinstance(module, Experts):
            gates = module.gates
            module.gates = _detached(gates)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        for module, activation in kept:
            module.activation = activation
        for hook in hooks:
            hook.remove()


def _detached(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x).detach()


class Contributions(NamedTuple):
    """Contributions for each text of a batch."""

    tokens: np.ndarray
    """(B, T)."""
    heads: np.ndarray
    """(B, L, H), H the largest of any layer."""
    total: np.ndarray
    """(B,): direction . p / |p|."""


def contributions(
    encoder: Encoder,
    feed: dict[str, np.ndarray],
    finish: Callable[[Tensor], Tensor] = lambda pooled: pooled,
) -> Contributions:
    """Expected outputs of the contributions graph for the inputs `feed`. Apply `finish` after pooling."""
    encoder = copy.deepcopy(encoder).double()
    leaf: list[Tensor] = []
    gates = torch.ones(feed["head_gates"].shape, dtype=torch.float64, requires_grad=True)

    def replace(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        leaf.append(output.detach().requires_grad_())
        return leaf[0]

    encoder.embeddings.register_forward_hook(replace)
    times = encoder.config.times_in_a_row
    counts = [0] * len(encoder.layers)

    def gate(index: int) -> Callable[..., Any]:
        def multiply(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            layer = index * times + counts[index]
            counts[index] += 1
            heads = encoder.config.layer_attentions[layer].num_heads
            width = args[0].shape[-1] // heads
            return (args[0] * gates[:, layer, :heads].repeat_interleave(width, dim=1)[:, None],)

        return multiply

    for index, layer in enumerate(encoder.layers):
        output: Any = layer.get_submodule("attention.output")
        output.register_forward_pre_hook(gate(index))
    inputs = {
        name: torch.from_numpy(feed[name])
        for name in ("input_ids", "attention_mask", "token_type_ids")
        if name in feed
    }
    with Frozen(), _cut_off(encoder):
        hidden = encoder(**inputs).last_hidden_state
        vector = finish(_pool(hidden, feed))
    size = vector.shape[1]
    kept = torch.arange(size) < torch.from_numpy(feed["num_dimensions"])[:, None]
    vector = vector * kept
    length = vector.detach().norm(dim=1)
    unit = vector.detach() / length[:, None]
    direction = torch.from_numpy(feed["direction"]).double()
    direction = direction + torch.from_numpy(feed["towards_itself"]).double()[:, None] * unit
    total = (direction * vector).sum(dim=1) / length
    by_token, by_head = torch.autograd.grad(total.sum(), [leaf[0], gates])
    scores = (by_token * leaf[0]).sum(dim=-1)
    return Contributions(scores.detach().numpy(), by_head.numpy(), total.detach().numpy())


def _pool(hidden: Tensor, feed: dict[str, np.ndarray]) -> Tensor:
    weights = torch.from_numpy(feed["pooling_weights"]).double()
    mean = (weights[..., None] * hidden).sum(dim=1)
    largest = hidden.masked_fill((weights == 0)[..., None], -torch.inf).amax(dim=1)
    takes = torch.from_numpy(feed["takes_maximum"]).bool()[:, None]
    return torch.where(takes, largest, mean)
