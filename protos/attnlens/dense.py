"""The layers between the pooling and the embedding. N texts, I components in, O components out."""

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


def _sigmoid(x: FloatArray) -> FloatArray:
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * x))  # the same as 1 / (1 + exp(-x)), and never overflows


_ACTIVATIONS: dict[Activation.ValueType, Callable[[FloatArray], FloatArray]] = {
    Activation.ACTIVATION_IDENTITY: lambda x: x,
    Activation.ACTIVATION_TANH: np.tanh,
    Activation.ACTIVATION_RELU: lambda x: np.maximum(x, 0),
    Activation.ACTIVATION_GELU: _gelu,
    Activation.ACTIVATION_SIGMOID: _sigmoid,
    Activation.ACTIVATION_SILU: lambda x: x * _sigmoid(x),
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """y = activation(x W' + b).

    Attributes:
        weight: W, (O, I).
        bias: b, (O,), or None.
        activation: applied component by component.
        normalize_input: scale x to length 1 first.
    """

    weight: FloatArray
    bias: FloatArray | None
    activation: Callable[[FloatArray], FloatArray]
    normalize_input: bool

    def __call__(self, vectors: FloatArray) -> FloatArray:
        """Turn (N, I) into (N, O)."""
        vectors = normalize(vectors) if self.normalize_input else vectors
        result = vectors @ self.weight.T  # (N, O)
        return self.activation(result if self.bias is None else result + self.bias)


def open_dense(directory: Path, manifest: Manifest) -> tuple[DenseLayer, ...]:
    """Load the layers of a finished bundle, whose weights must have a hash in the manifest.

    Raises:
        BundleError: a layer is unknown, or does not fit the layer before it or its weights.
    """
    listed = {file.path for file in manifest.files}
    for dense in manifest.pooling.dense:
        path = _weights_path(dense)
        if path not in listed:
            raise BundleError(f"{directory / MANIFEST_NAME} has no hash for the weights of its layer {path}")
    return open_layers(directory, manifest.pooling.dense, manifest.architecture.hidden_size)


def open_layers(directory: Path, layers: Iterable[Dense], hidden_size: int) -> tuple[DenseLayer, ...]:
    """Load layers from files below `directory`; the first one takes pooled vectors (N, hidden_size).

    Raises:
        BundleError: a layer is unknown, or does not fit the layer before it or its weights.
    """
    width, opened = hidden_size, []
    for dense in layers:
        if dense.activation not in _ACTIVATIONS:
            raise BundleError(
                f"{directory / MANIFEST_NAME}: {dense.path} has no activation that this version knows: "
                "install the version of attnlens that wrote the bundle"
            )
        if dense.in_features != width:
            raise BundleError(
                f"{directory / MANIFEST_NAME}: {dense.path} takes {dense.in_features} components and gets "
                f"{width}: export the bundle again"
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
    try:
        weights: dict[str, npt.NDArray[np.float32]] = safetensors.numpy.load_file(path)
    except (SafetensorError, OSError, KeyError, TypeError, AttributeError) as error:
        # The last three: numpy lacks the element type.
        raise BundleError(f"{path} can't be read: {error}") from error
    found = {name: array.shape for name, array in weights.items()}
    if found != shapes or any(array.dtype != np.float32 for array in weights.values()):
        raise BundleError(f"{path} holds {found} instead of {shapes} in fp32: export the bundle again")
    if not dense.out_features or not all(np.isfinite(array).all() for array in weights.values()):
        raise BundleError(f"{path} is empty, or holds a NaN or an infinity: export the bundle again")
    return DenseLayer(
        weights["linear.weight"],
        weights.get("linear.bias"),
        _ACTIVATIONS[dense.activation],
        dense.normalize_input,
    )
