"""Which bundles are measured."""

from collections.abc import Callable
from pathlib import Path

import pytest

from attnlens.bundle import FORMAT_VERSION, write_manifest
from attnlens.v1.manifest_pb2 import Graph, Manifest, Precision
from bench.cases import MINILM
from bench.contestants import STRICT, contestants
from bench.made.bundles import find_int8_bundle
from bench.setting import BASE, QUICK, QUICK_BASE, Setting


def write_bundle(directory: Path, *precisions: Precision.ValueType) -> Path:
    """Write a manifest that names a graph in each precision."""
    directory.mkdir()
    write_manifest(
        directory,
        Manifest(
            format_version=FORMAT_VERSION, graphs=[Graph(precision=precision) for precision in precisions]
        ),
    )
    return directory


@pytest.fixture
def exported() -> list[Path]:
    return []


@pytest.fixture
def export(exported: list[Path]) -> Callable[[Path], None]:
    """An exporter that notes what it was asked for."""

    def write(directory: Path) -> None:
        exported.append(write_bundle(directory, Precision.PRECISION_FP32, Precision.PRECISION_INT8))

    return write


def test_a_bundle_with_int8_is_measured_itself(
    export: Callable[[Path], None], exported: list[Path], tmp_path: Path
) -> None:
    bundle = write_bundle(tmp_path / "bundle", Precision.PRECISION_FP32, Precision.PRECISION_INT8)
    assert find_int8_bundle(bundle, tmp_path / "own", export) == bundle
    assert exported == []


def test_for_a_bundle_without_int8_one_is_exported_once(
    export: Callable[[Path], None], exported: list[Path], tmp_path: Path
) -> None:
    bundle = write_bundle(tmp_path / "bundle", Precision.PRECISION_FP32)
    own = tmp_path / "own"
    assert find_int8_bundle(bundle, own, export) == own
    assert find_int8_bundle(bundle, own, export) == own
    assert exported == [own]


def make_setting(tmp_path: Path, model: str, sizes: dict[str, int]) -> Setting:
    names = ("bundle", "int8", "strict")
    bundle, int8, strict = (write_bundle(tmp_path / name) for name in names)
    return Setting(model, bundle, int8, strict if model == MINILM else None, tmp_path, 2, 1, 0.5, sizes, ())


def test_each_precision_of_ours_takes_its_own_bundle_and_graph(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, MINILM, QUICK)
    taken = {
        contestant.label.removeprefix("attnlens engine"): contestant.arguments()[:3]
        for contestant in contestants(setting)
        if contestant.name.startswith("attnlens")
    }
    assert taken == {
        " fp32": (setting.bundle, "onnxruntime", "fp32"),
        " int8": (setting.int8_bundle, "onnxruntime", "int8"),
        ", OpenVINO fp32": (setting.bundle, "openvino", "fp32"),
        ", OpenVINO bf16": (setting.bundle, "openvino", "bf16"),
        ", OpenVINO int8": (setting.int8_bundle, "openvino", "int8"),
        f" {STRICT}": (setting.strict_bundle, "onnxruntime", "int8"),
        f", OpenVINO {STRICT}": (setting.strict_bundle, "openvino", "int8"),
    }


def test_a_model_has_only_rows_with_texts_that_are_measured_on_it(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, BASE, QUICK_BASE)
    keys = [key for contestant in contestants(setting) for key in contestant.keys(setting)]
    assert {(key.model, key.what, key.workload) for key in keys} == {(BASE, "embed", "passages")}
    assert {key.name for key in keys} == {
        "attnlens engine",
        "attnlens engine, OpenVINO",
        "openvino-genai",
        "sentence-transformers OpenVINO",
        "sentence-transformers torch",
        "fastembed",
    }
