"""Reads and writes Dense modules of sentence-transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from attnlens.v1.manifest_pb2 import Activation, Dense
from attnlens_export.errors import SourceError
from attnlens_export.json_files import read_object, write_json
from attnlens_model.checkpoint.tensor_files import read_tensors

Weights = dict[str, npt.NDArray[np.float32]]

# Class names in the format of sentence-transformers.
_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": Activation.ACTIVATION_IDENTITY,
    "torch.nn.modules.activation.Tanh": Activation.ACTIVATION_TANH,
    "torch.nn.modules.activation.ReLU": Activation.ACTIVATION_RELU,
    "torch.nn.modules.activation.GELU": Activation.ACTIVATION_GELU,
    "torch.nn.modules.activation.Sigmoid": Activation.ACTIVATION_SIGMOID,
    "torch.nn.modules.activation.SiLU": Activation.ACTIVATION_SILU,
    # Used only in classification heads.
    "transformers.activations.NewGELUActivation": Activation.ACTIVATION_GELU_TANH,
}
_SHORT_NAMES = {name.rpartition(".")[2]: value for name, value in _ACTIVATIONS.items()}
# Used only in classification heads.
NORM_WEIGHTS = ("norm.weight", "norm.bias")
_SKIP = "or omit the module with --skip-module Dense"


def read_dense(directory: Path, path: str, in_features: int, *, normalize_input: bool) -> Dense:
    """Read the Dense module in `directory / path` and check its weights.

    Args:
        directory: Checkpoint or bundle directory.
        path: Module directory, relative to `directory`.
        in_features: Size of the vectors that the module receives.
        normalize_input: Whether a Normalize module precedes this one.

    Raises:
        SourceError: A file is missing or invalid, or a setting is unsupported.
    """
    file = directory / path / "config.json"
    if not file.is_file():
        raise SourceError(
            f"{file} is missing, although modules.json lists the module: download the file, {_SKIP}"
        )
    settings = read_object(file)
    if settings.get("use_residual"):
        raise SourceError(f"{file}: use_residual is set, which bundles do not support: {_SKIP[3:]}")
    dense = Dense(
        path=path,
        in_features=_size(file, settings, "in_features"),
        out_features=_size(file, settings, "out_features"),
        bias=bool(settings.get("bias", True)),
        activation=_activation(file, settings.get("activation_function", "torch.nn.modules.activation.Tanh")),
        normalize_input=normalize_input,
        norm_epsilon=settings.get("norm_epsilon", 0.0),
    )
    if dense.in_features != in_features:
        raise SourceError(
            f"{file}: in_features is {dense.in_features}, but the vectors have {in_features} components: the "
            f"file belongs to another model, {_SKIP[3:]}"
        )
    read_weights(directory, dense)
    return dense


def read_weights(directory: Path, dense: Dense) -> Weights:
    """Return the weights of a layer, as described in `attnlens.v1.Dense`.

    Raises:
        CheckpointError: The weights file is missing or corrupt.
        SourceError: The file contains unexpected tensors or non-finite values.
    """
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (dense.out_features, dense.in_features)}
    if dense.bias:
        shapes["linear.bias"] = (dense.out_features,)
    if dense.norm_epsilon:
        shapes |= dict.fromkeys(NORM_WEIGHTS, (dense.out_features,))
    weights = {name: tensor.float().numpy() for name, tensor in read_tensors(directory / dense.path).items()}
    found = {name: array.shape for name, array in weights.items()}
    if found != shapes:
        raise SourceError(f"{directory / dense.path} contains the weights {found} instead of {shapes}")
    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise SourceError(f"{directory / dense.path}: {name} contains NaN or infinity")
    return weights


def write_dense(directory: Path, path: str, dense: Dense, weights: Weights) -> None:
    """Write the module to `directory / path` as sentence-transformers does."""
    names = {value: name for name, value in _ACTIVATIONS.items()}
    settings = {
        "in_features": dense.in_features,
        "out_features": dense.out_features,
        "bias": dense.bias,
        "activation_function": names[dense.activation],
    }
    if dense.norm_epsilon:
        settings["norm_epsilon"] = dense.norm_epsilon
    write_json(directory / path / "config.json", settings)
    # `save_file` would create a file that only its owner can read.
    (directory / path / "model.safetensors").write_bytes(safetensors.numpy.save(weights))


def _size(file: Path, settings: dict[str, Any], key: str) -> int:
    size = settings.get(key)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise SourceError(f"{file}: {key} is {size!r}, use a positive integer")
    return size


def _activation(file: Path, name: object) -> Activation.ValueType:
    # `torch.nn.Tanh` is an alias of `torch.nn.modules.activation.Tanh`.
    text = str(name)
    short = text.rpartition(".")[2]
    if text not in _ACTIVATIONS and (not text.startswith("torch.nn.") or short not in _SHORT_NAMES):
        known = ", ".join(_SHORT_NAMES)
        raise SourceError(
            f"{file}: activation_function is {text!r}, but bundles support only {known} from torch.nn: "
            f"{_SKIP[3:]}"
        )
    return _SHORT_NAMES[short]
