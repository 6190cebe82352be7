"""Dense layers, compared with PyTorch, and rejection of invalid layers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from attnlens.bundle import BundleError
from attnlens.dense import open_dense
from attnlens.v1.manifest_pb2 import Activation, Architecture, BundleFile, Dense, Manifest, PoolingDefaults

MODULES = {
    Activation.ACTIVATION_IDENTITY: torch.nn.Identity(),
    Activation.ACTIVATION_TANH: torch.nn.Tanh(),
    Activation.ACTIVATION_RELU: torch.nn.ReLU(),
    Activation.ACTIVATION_GELU: torch.nn.GELU(),
    Activation.ACTIVATION_SIGMOID: torch.nn.Sigmoid(),
    Activation.ACTIVATION_SILU: torch.nn.SiLU(),
    Activation.ACTIVATION_GELU_TANH: torch.nn.GELU(approximate="tanh"),
}


def make_manifest(**dense: Any) -> Manifest:
    values: dict[str, Any] = {"path": "2_Dense", "in_features": 3, "out_features": 4, "bias": True}
    return Manifest(
        architecture=Architecture(hidden_size=3),
        pooling=PoolingDefaults(
            dense=[Dense(**values | {"activation": Activation.ACTIVATION_TANH} | dense)],
        ),
        files=[BundleFile(path="2_Dense/model.safetensors")],
    )


def write_weights(directory: Path, **weights: np.ndarray) -> None:
    (directory / "2_Dense").mkdir()
    named = {f"linear.{name}": array for name, array in weights.items()}
    safetensors.numpy.save_file(named, directory / "2_Dense" / "model.safetensors")


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def test_all_activations_of_layers_are_compared() -> None:
    not_of_layers = {Activation.ACTIVATION_UNSPECIFIED, Activation.ACTIVATION_SOFTMAX}
    assert MODULES.keys() == set(Activation.values()) - not_of_layers


@pytest.mark.parametrize("activation", MODULES)
def test_activations_equal_pytorch(activation: Activation.ValueType, tmp_path: Path) -> None:
    write_weights(tmp_path, weight=3 * random(4, 3), bias=random(4))
    [layer] = open_dense(tmp_path, make_manifest(activation=activation))
    vectors = np.concatenate(
        [random(5, 3), np.full((1, 3), 1e4, np.float32), np.full((1, 3), -1e4, np.float32)]
    )
    linear = torch.nn.Linear(3, 4)
    linear.weight.data, linear.bias.data = torch.tensor(3 * random(4, 3)), torch.tensor(random(4))
    with torch.no_grad():
        expected = MODULES[activation](linear(torch.tensor(vectors))).numpy()
    actual = layer(vectors)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_normalize_input_scales_vectors_first(tmp_path: Path) -> None:
    write_weights(tmp_path, weight=random(4, 3))
    manifest = make_manifest(bias=False, normalize_input=True, activation=Activation.ACTIVATION_IDENTITY)
    [layer] = open_dense(tmp_path, manifest)
    np.testing.assert_allclose(layer(5 * random(2, 3)), layer(random(2, 3)), rtol=1e-5)


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        ({"in_features": 5}, "2_Dense expects 5 input features, but the previous step returns 3"),
        ({"activation": 0}, "has an activation that this version of attnlens does not support"),
        ({"path": "../elsewhere"}, "has no hash for the weights ../elsewhere"),
        ({"bias": False}, "instead of {'linear.weight': (4, 3)} in fp32"),
        ({"out_features": 5}, "instead of {'linear.weight': (5, 3)"),
    ],
)
def test_invalid_layer_is_rejected_by_name(dense: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_weights(tmp_path, weight=random(4, 3), bias=random(4))
    with pytest.raises(BundleError) as caught:
        open_dense(tmp_path, make_manifest(**dense))
    assert message in str(caught.value)


def test_weights_of_a_different_type_are_rejected(tmp_path: Path) -> None:
    write_weights(tmp_path, weight=random(4, 3).astype(np.float16), bias=random(4))
    with pytest.raises(BundleError, match="in fp32"):
        open_dense(tmp_path, make_manifest())
    safetensors.torch.save_file(
        {"linear.weight": torch.ones(4, 3, dtype=torch.bfloat16)},
        tmp_path / "2_Dense" / "model.safetensors",
    )
    # NumPy only has bfloat16 if another imported package registered it.
    with pytest.raises(BundleError, match=r"cannot be read|in fp32"):
        open_dense(tmp_path, make_manifest(bias=False))
    (tmp_path / "2_Dense" / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(BundleError, match="cannot be read"):
        open_dense(tmp_path, make_manifest())


@pytest.mark.parametrize("weight", [np.full((4, 3), np.nan, np.float32), np.ones((0, 3), np.float32)])
def test_empty_and_non_finite_weights_are_rejected(weight: np.ndarray, tmp_path: Path) -> None:
    write_weights(tmp_path, weight=weight)
    with pytest.raises(BundleError, match="is empty or contains NaN or infinity"):
        open_dense(tmp_path, make_manifest(bias=False, out_features=len(weight)))
