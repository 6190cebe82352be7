"""Loads and computes the dense layers between pooling and the embedding.

Dimension names: N texts, I input features, O output features.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from attnlens.bundle import MANIFEST_NAME, BundleError
from attnlens.pooling import FloatArray, normalize
from attnlens.v1.manifest_pb2 import Activation, Dense, Manifest

_erf = np.frompyfunc(math.erf, 1, 1)


def _gelu(x: FloatArray) -> FloatArray:
    return np.asarray(x * (0.5 + 0.5 * _erf(x / math.sqrt(2)).astype(np.float32)))


def _gelu_tanh(x: FloatArray) -> FloatArray:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _sigmoid(x: FloatArray) -> FloatArray:
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * x))  # equals 1 / (1 + exp(-x)), but never overflows


_ACTIVATIONS: dict[Activation.ValueType, Callable[[FloatArray], FloatArray]] = {
    Activation.ACTIVATION_IDENTITY: lambda x: x,
    Activation.ACTIVATION_TANH: np.tanh,
    Activation.ACTIVATION_RELU: lambda x: np.maximum(x, 0),
    Activation.ACTIVATION_GELU: _gelu,
    Activation.ACTIVATION_GELU_TANH: _gelu_tanh,
    Activation.ACTIVATION_SIGMOID: _sigmoid,
    Activation.ACTIVATION_SILU: lambda x: x * _sigmoid(x),
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer with an activation: y = activation(x W^T + b), optionally followed by a LayerNorm.

    Attributes:
        weight: W, (O, I).
        bias: b, (O,), or None.
        activation: Component-wise activation.
        normalize_input: Whether to scale x to length 1 first.
        norm: Weight (O,) and bias (O,) of the layer normalization of y, or None.
        norm_epsilon: Its epsilon.
    """

    weight: FloatArray
    bias: FloatArray | None
    activation: Callable[[FloatArray], FloatArray]
    normalize_input: bool
    norm: tuple[FloatArray, FloatArray] | None = None
    norm_epsilon: float = 0.0

    def __call__(self, vectors: FloatArray) -> FloatArray:
        """Transform (N, I) to (N, O)."""
        vectors = normalize(vectors) if self.normalize_input else vectors
        result = vectors @ self.weight.T  # (N, O)
        result = self.activation(result if self.bias is None else result + self.bias)
        if self.norm is None:
            return result
        centered = result - result.mean(axis=1, keepdims=True)
        deviation = np.sqrt((centered**2).mean(axis=1, keepdims=True) + self.norm_epsilon)
        return np.asarray(centered / deviation * self.norm[0] + self.norm[1], dtype=result.dtype)


def open_dense(directory: Path, manifest: Manifest) -> tuple[DenseLayer, ...]:
    """Load the dense layers of a complete bundle. The manifest must contain a hash for each weights file.

    Raises:
        BundleError: The manifest lacks a hash for a layer's weights. See also `open_layers`.
    """
    listed = {file.path for file in manifest.files}
    for dense in manifest.pooling.dense:
        path = _weights_path(dense)
        if path not in listed:
            raise BundleError(
                f"{directory / MANIFEST_NAME} has no hash for the weights {path}: export the bundle again"
            )
    return open_layers(directory, manifest.pooling.dense, manifest.architecture.hidden_size)


def open_layers(directory: Path, layers: Iterable[Dense], hidden_size: int) -> tuple[DenseLayer, ...]:
    """Load dense layers from files in `directory`. The input of the first layer has the size `hidden_size`.

    Raises:
        BundleError: A layer has an unknown activation, inconsistent sizes, or missing or invalid weights.
    """
    width, opened = hidden_size, []
    for dense in layers:
        if dense.activation not in _ACTIVATIONS:
            raise BundleError(
                f"{directory / MANIFEST_NAME}: {dense.path} has an activation that this version of attnlens "
                "does not support: install the version that exported the bundle"
            )
        if dense.in_features != width:
            raise BundleError(
                f"{directory / MANIFEST_NAME}: {dense.path} expects {dense.in_features} input features, but "
                f"the previous step returns {width}: export the bundle again"
            )
        opened.append(_open_layer(directory / _weights_path(dense), dense))
        width = dense.out_features
    return tuple(opened)


def _weights_path(dense: Dense) -> str:
    return f"{dense.path}/model.safetensors"


def _open_layer(path: Path, dense: Dense) -> DenseLayer:
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (dense.out_features, dense.in_features)}
    if dense.bias:
        shapes["linear.bias"] = (dense.out_features,)
    if dense.norm_epsilon:
        shapes |= {"norm.weight": (dense.out_features,), "norm.bias": (dense.out_features,)}
    try:
        weights: dict[str, npt.NDArray[np.float32]] = safetensors.numpy.load_file(path)
    except (SafetensorError, OSError, KeyError, TypeError, AttributeError) as error:
        # KeyError, TypeError and AttributeError: element type that NumPy does not support.
        raise BundleError(f"{path} cannot be read: {error}: export the bundle again") from error
    actual_shapes = {name: array.shape for name, array in weights.items()}
    if actual_shapes != shapes or any(array.dtype != np.float32 for array in weights.values()):
        actual = {name: f"{array.dtype} {array.shape}" for name, array in weights.items()}
        raise BundleError(f"{path} contains {actual} instead of {shapes} in fp32: export the bundle again")
    if not dense.out_features or not all(np.isfinite(array).all() for array in weights.values()):
        raise BundleError(f"{path} is empty or contains NaN or infinity: export the bundle again")
    return DenseLayer(
        weights["linear.weight"],
        weights.get("linear.bias"),
        _ACTIVATIONS[dense.activation],
        dense.normalize_input,
        (weights["norm.weight"], weights["norm.bias"]) if dense.norm_epsilon else None,
        dense.norm_epsilon,
    )
