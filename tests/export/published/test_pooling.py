"""How token vectors become embeddings: read from a checkpoint, written to a bundle."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from attnlens.v1.manifest_pb2 import Activation, Dense, Pooling, PoolingDefaults
from attnlens_export import SourceError
from attnlens_export.published.pooling import POOLINGS, read_pooling, write_pooling
from attnlens_model import CheckpointError
from small_files import read, write

MEAN, CLS, MAX = Pooling.POOLING_MEAN, Pooling.POOLING_CLS, Pooling.POOLING_MAX


def write_modules(source: Path, pooling: dict[str, object], *kinds: str) -> None:
    names = ("Transformer", "Pooling", *kinds)
    types = [f"sentence_transformers.models.{name}" for name in names]
    paths = ["" if index == 0 else f"{index}_{name}" for index, name in enumerate(names)]
    write(source / "modules.json", [{"path": p, "type": t} for p, t in zip(paths, types, strict=True)])
    write(source / "1_Pooling" / "config.json", pooling)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, MEAN),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, CLS),
        ({"pooling_mode_max_tokens": True}, MAX),
        ({"pooling_mode": "cls"}, CLS),
        ({"pooling_mode": ["max"]}, MAX),
        ({"embedding_dimension": 48}, MEAN),
        ({"pooling_mode_lasttoken": True}, Pooling.POOLING_LAST_TOKEN),
        ({"pooling_mode": "lasttoken"}, Pooling.POOLING_LAST_TOKEN),
        ({"pooling_mode_weightedmean_tokens": True}, Pooling.POOLING_WEIGHTED_MEAN),
        ({"pooling_mode": "weightedmean"}, Pooling.POOLING_WEIGHTED_MEAN),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, Pooling.POOLING_MEAN_SQRT_LENGTH),
        ({"pooling_mode": ["mean_sqrt_len_tokens"]}, Pooling.POOLING_MEAN_SQRT_LENGTH),
    ],
)
def test_pooling_matches_sentence_transformers(
    settings: dict[str, object], expected: Pooling.ValueType, source: Path
) -> None:
    write_modules(source, settings)
    assert read_pooling(source, 48) == PoolingDefaults(pooling=expected, normalize=False)
    write_modules(source, settings, "Normalize")
    assert read_pooling(source, 48) == PoolingDefaults(pooling=expected, normalize=True)


def test_without_pooling_files_it_is_the_mean_not_normalized(source: Path) -> None:
    assert read_pooling(None, 48) == PoolingDefaults(pooling=MEAN)
    assert read_pooling(source, 48) == PoolingDefaults(pooling=MEAN)


def test_pooling_and_normalize_can_be_overridden(source: Path) -> None:
    write_modules(source, {"pooling_mode": "mean"}, "Normalize")
    assert read_pooling(source, 48, "max", None) == PoolingDefaults(pooling=MAX, normalize=True)
    assert read_pooling(source, 48, None, normalize=False) == PoolingDefaults(pooling=MEAN, normalize=False)
    assert read_pooling(None, 48, "cls", normalize=True) == PoolingDefaults(pooling=CLS, normalize=True)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"pooling_mode": "median"}, "median"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "max + mean"),
        ({"pooling_mode": ["mean", "lasttoken"]}, "mean + lasttoken"),
        ({"pooling_mode": 5}, "pools by 5"),
        ({"pooling_mode": [{"a": 1}]}, "pools by {'a': 1}"),
        ({"pooling_mode": {"mean": True}}, "pools by {'mean': True}"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_median_tokens": True}, "median_tokens"),
    ],
)
def test_pooling_that_a_bundle_cannot_express_is_rejected_with_a_way_to_go_on(
    settings: dict[str, object], named: str, source: Path
) -> None:
    write_modules(source, settings)
    with pytest.raises(SourceError) as caught:
        read_pooling(source, 48)
    assert named in str(caught.value)
    assert "--pooling mean|cls|max|last_token|weighted_mean|mean_sqrt_length" in str(caught.value)
    assert read_pooling(source, 48, "cls").pooling == CLS


def test_unknown_pooling_is_rejected() -> None:
    with pytest.raises(SourceError, match="unknown pooling 'median': choose one with --pooling mean"):
        read_pooling(None, 48, "median")


@pytest.mark.parametrize(("stated", "kept"), [(8, 8), (47, 47), (48, 0), (768, 0), (None, 0)])
def test_number_of_kept_components_matches_the_publisher(stated: int | None, kept: int, source: Path) -> None:
    write(source / "config_sentence_transformers.json", {"truncate_dim": stated})
    assert read_pooling(source, 48).truncate_dim == kept
    assert read_pooling(source, 48, "cls", normalize=True).truncate_dim == kept


@pytest.mark.parametrize("stated", [0, -1, 8.0, "8", True, [8]])
def test_number_of_components_that_is_none_is_rejected(stated: object, source: Path) -> None:
    write(source / "config_sentence_transformers.json", {"truncate_dim": stated})
    with pytest.raises(SourceError, match=r"truncate_dim is .*: use an integer from 1 to 48"):
        read_pooling(source, 48)


@pytest.mark.parametrize(
    "kind", ["LayerNorm", "WeightedLayerPooling", "CNN", "LSTM", "BoW", "Asym", "Router", "WordWeights"]
)
def test_module_that_a_bundle_cannot_apply_is_named_and_can_be_skipped(kind: str, source: Path) -> None:
    write_modules(source, {"pooling_mode": "cls"}, kind, "Normalize")
    with pytest.raises(
        SourceError, match=f"has the module {kind}, which bundles do not support. --skip-module {kind} omits"
    ):
        read_pooling(source, 48)
    with pytest.raises(SourceError, match=f"has the module {kind}"):
        read_pooling(source, 48, "cls")
    assert read_pooling(source, 48, skipped=[kind]) == PoolingDefaults(pooling=CLS, normalize=True)


def test_class_of_the_checkpoints_own_is_not_taken_for_that_of_the_library(source: Path) -> None:
    entries = [("", "sentence_transformers.models.Transformer"), ("1_Pooling", "custom.Pooling")]
    write(source / "modules.json", [{"path": path, "type": name} for path, name in entries])
    with pytest.raises(SourceError, match=r"has the module custom\.Pooling, which bundles"):
        read_pooling(source, 48)
    assert read_pooling(source, 48, "max", skipped=["custom.Pooling"]).pooling == MAX


@pytest.mark.parametrize("kind", ["Dense", "Normalize", "Pooling", "Transformer"])
def test_only_existing_modules_except_pooling_can_be_skipped(kind: str, source: Path) -> None:
    write_modules(source, {}, "LayerNorm")
    with pytest.raises(SourceError, match=f"--skip-module {kind}: the checkpoint lists Pooling, LayerNorm"):
        read_pooling(source, 48, skipped=["LayerNorm", kind])


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (
            ["Dense", "Pooling"],
            "has the module Dense where bundles do not support it .they support one Pooling",
        ),
        (["Pooling", "Pooling"], "has the module Pooling where bundles do not support it"),
        (["Dense"], "has the module Dense for token vectors, without pooling"),
    ],
)
def test_modules_in_another_order_are_rejected(kinds: list[str], message: str, source: Path) -> None:
    """Late-interaction models have a Dense without any pooling."""
    types = [f"sentence_transformers.models.{kind}" for kind in ["Transformer", *kinds]]
    write(source / "modules.json", [{"path": str(i), "type": name} for i, name in enumerate(types)])
    with pytest.raises(SourceError, match=message):
        read_pooling(source, 48)


def test_missing_pooling_file_does_not_mean_mean_pooling(source: Path) -> None:
    write_modules(source, {})
    (source / "1_Pooling" / "config.json").unlink()
    with pytest.raises(
        SourceError, match=r"1_Pooling/config\.json is missing, although modules\.json lists the module"
    ):
        read_pooling(source, 48)
    assert read_pooling(source, 48, "max", None).pooling == MAX


def test_file_of_endless_brackets_is_named(source: Path) -> None:
    (source / "modules.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(SourceError, match=r"modules\.json can't be read as JSON"):
        read_pooling(source, 48)


def test_broken_modules_file_is_named(source: Path) -> None:
    write(source / "modules.json", {"0": "Transformer"})
    with pytest.raises(SourceError, match=r"modules\.json is not a list of modules"):
        read_pooling(source, 48)


def write_dense(directory: Path, inputs: int, outputs: int, **settings: object) -> dict[str, torch.Tensor]:
    """Write a Dense module with random weights in half precision, as sentence-transformers does."""
    published: dict[str, object] = {"in_features": inputs, "out_features": outputs, "bias": True}
    published["activation_function"] = "torch.nn.modules.activation.Tanh"
    write(directory / "config.json", published | settings)
    weights = {
        "linear.weight": torch.randn(outputs, inputs).half(),
        "linear.bias": torch.randn(outputs).half(),
    }
    save_file(weights, directory / "model.safetensors")
    return weights


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("exclude_prompt", [True, False])
def test_written_pooling_reads_back(
    pooling: str, normalize: bool, exclude_prompt: bool, tmp_path: Path
) -> None:
    value = POOLINGS[pooling]
    defaults = PoolingDefaults(pooling=value, normalize=normalize, exclude_prompt=exclude_prompt)
    write_pooling(tmp_path, None, 48, defaults, 33)
    assert read_pooling(tmp_path, 48) == defaults
    assert read(tmp_path / "sentence_bert_config.json") == {"max_seq_length": 33}
    assert read(tmp_path / "1_Pooling" / "config.json")["word_embedding_dimension"] == 48


@pytest.mark.parametrize("as_pickle", [True, False])
def test_dense_layers_are_copied_in_their_order_as_fp32(
    as_pickle: bool, source: Path, tmp_path: Path
) -> None:
    """A Dropout does nothing outside of training."""
    write_modules(source, {}, "Dropout", "Normalize", "Dense", "Dense", "Normalize")
    weights = write_dense(source / "4_Dense", 48, 24)
    short: dict[str, object] = {"activation_function": "torch.nn.ReLU", "bias": True}
    write_dense(source / "5_Dense", 24, 7, **short)
    if as_pickle:
        (source / "4_Dense" / "model.safetensors").unlink()
        torch.save(weights, source / "4_Dense" / "pytorch_model.bin")
    first = Dense(path="4_Dense", in_features=48, out_features=24, bias=True, normalize_input=True)
    first.activation = Activation.ACTIVATION_TANH
    second = Dense(path="5_Dense", in_features=24, out_features=7, bias=True)
    second.activation = Activation.ACTIVATION_RELU
    found = read_pooling(source, 48)
    assert found == PoolingDefaults(pooling=MEAN, normalize=True, dense=[first, second])
    bundle = tmp_path / "bundle"
    write_pooling(bundle, source, 48, found, 33)
    types = [entry["type"].rpartition(".")[2] for entry in read(bundle / "modules.json")]
    assert types == ["Transformer", "Pooling", "Normalize", "Dense", "Dense", "Normalize"]
    first.path, second.path = "3_Dense", "4_Dense"
    assert read_pooling(bundle, 48) == PoolingDefaults(pooling=MEAN, normalize=True, dense=[first, second])
    written = load_file(bundle / "3_Dense" / "model.safetensors")
    assert {name: array.dtype for name, array in written.items()} == dict.fromkeys(weights, np.float32)
    for name, tensor in weights.items():
        np.testing.assert_array_equal(written[name], tensor.float().numpy())


def test_options_replace_the_pooling_and_the_last_scaling_and_leave_the_layers(source: Path) -> None:
    write_modules(source, {}, "Normalize", "Dense", "Normalize")
    write_dense(source / "3_Dense", 48, 24)
    found = read_pooling(source, 48, "max", normalize=False)
    assert (found.pooling, found.normalize) == (MAX, False)
    assert [(layer.out_features, layer.normalize_input) for layer in found.dense] == [(24, True)]
    assert read_pooling(source, 48, skipped=["Dense"]) == PoolingDefaults(pooling=MEAN, normalize=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"in_features": 47}, "in_features is 47, but the vectors have 48 components"),
        ({"out_features": None}, "out_features is None, use a positive integer"),
        ({"out_features": True}, "out_features is True, use a positive integer"),
        ({"out_features": 25}, r"contains the weights .* instead of {'linear.weight': \(25, 48\)"),
        ({"bias": False}, r"instead of {'linear.weight': \(24, 48\)}"),
        ({"use_residual": True}, "use_residual is set, which bundles do not support"),
        ({"activation_function": "torch.nn.modules.activation.Mish"}, "support only .*Tanh, ReLU, GELU"),
        ({"activation_function": "mine.Tanh"}, "activation_function is 'mine.Tanh'"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'"),
    ],
)
def test_dense_layer_that_a_bundle_cannot_apply_is_rejected(
    settings: dict[str, object], message: str, source: Path
) -> None:
    write_modules(source, {}, "Dense")
    write_dense(source / "2_Dense", 48, 24, **settings)
    with pytest.raises(SourceError, match=message) as caught:
        read_pooling(source, 48)
    assert "2_Dense" in str(caught.value)


def test_dense_layer_without_its_files_is_rejected(source: Path) -> None:
    write_modules(source, {}, "Dense")
    with pytest.raises(SourceError, match=r"2_Dense/config\.json is missing, although modules\.json lists"):
        read_pooling(source, 48)
    weights = write_dense(source / "2_Dense", 48, 24)
    weights["linear.bias"][3] = float("nan")
    save_file(weights, source / "2_Dense" / "model.safetensors")
    with pytest.raises(SourceError, match=r"linear\.bias contains NaN or infinity"):
        read_pooling(source, 48)
    (source / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="2_Dense contains no weights"):
        read_pooling(source, 48)
