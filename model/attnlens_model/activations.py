"""Activation functions, written in forms that many ONNX runtimes support."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]


def gelu(x: Tensor) -> Tensor:
    """Gaussian error linear unit, exact: x * Phi(x) (Hendrycks & Gimpel 2016)."""
    # Keep this order: ONNX Runtime fuses it, and other orders crash or slow down other runtimes.
    return x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of `gelu` (Hendrycks & Gimpel 2016)."""
    return x * 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def silu(x: Tensor) -> Tensor:
    """Sigmoid linear unit: x * sigmoid(x) (Hendrycks & Gimpel 2016; "swish")."""
    return x * torch.sigmoid(x)


def gelu_before_product(x: Tensor) -> Tensor:
    """`gelu` in a form that no runtime fuses.

    OpenCV 5.0 crashes when it loads a graph in which `gelu` or `gelu_tanh` as above is a factor of a product.
    """
    return x * 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))


def gelu_tanh_before_product(x: Tensor) -> Tensor:
    """`gelu_tanh` in a form that no runtime fuses. See `gelu_before_product`."""
    scale = math.sqrt(2.0 / math.pi)
    return x * 0.5 * (1.0 + torch.tanh(x * (scale + 0.044715 * scale * x * x)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": torch.relu,
    "silu": silu,
    "tanh": torch.tanh,
}

# Activations whose result is multiplied by another projection.
GATE_ACTIVATIONS = ACTIVATIONS | {"gelu": gelu_before_product, "gelu_tanh": gelu_tanh_before_product}
