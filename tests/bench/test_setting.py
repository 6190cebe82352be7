"""Selection of bundles and rows for a benchmark run."""

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
    """Write a bundle whose manifest lists one graph per precision."""
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
    """An exporter that records the directories it writes."""

    def write(directory: Path) -> None:
        exported.append(write_bundle(directory, Precision.PRECISION_FP32, Precision.PRECISION_INT8))

    return write


def test_find_int8_bundle_returns_a_bundle_with_an_int8_graph_unchanged(
    export: Callable[[Path], None], exported: list[Path], tmp_path: Path
) -> None:
    bundle = write_bundle(tmp_path / "bundle", Precision.PRECISION_FP32, Precision.PRECISION_INT8)
    assert find_int8_bundle(bundle, tmp_path / "fallback", export) == bundle
    assert exported == []


def test_find_int8_bundle_exports_once_if_int8_is_missing(
    export: Callable[[Path], None], exported: list[Path], tmp_path: Path
) -> None:
    bundle = write_bundle(tmp_path / "bundle", Precision.PRECISION_FP32)
    fallback = tmp_path / "fallback"
    assert find_int8_bundle(bundle, fallback, export) == fallback
    assert find_int8_bundle(bundle, fallback, export) == fallback
    assert exported == [fallback]


def make_setting(tmp_path: Path, model: str, sizes: dict[str, int]) -> Setting:
    names = ("bundle", "int8", "strict")
    bundle, int8, strict = (write_bundle(tmp_path / name) for name in names)
    return Setting(model, bundle, int8, strict if model == MINILM else None, tmp_path, 2, 1, 0.5, sizes, ())


def test_each_engine_precision_uses_its_bundle_and_graph(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, MINILM, QUICK)
    selected = {
        contestant.label.removeprefix("attnlens engine"): contestant.arguments()[:3]
        for contestant in contestants(setting)
        if contestant.name.startswith("attnlens")
    }
    assert selected == {
        " fp32": (setting.bundle, "onnxruntime", "fp32"),
        " int8": (setting.int8_bundle, "onnxruntime", "int8"),
        ", OpenVINO fp32": (setting.bundle, "openvino", "fp32"),
        ", OpenVINO bf16": (setting.bundle, "openvino", "bf16"),
        ", OpenVINO int8": (setting.int8_bundle, "openvino", "int8"),
        f" {STRICT}": (setting.strict_bundle, "onnxruntime", "int8"),
        f", OpenVINO {STRICT}": (setting.strict_bundle, "openvino", "int8"),
    }


def test_contestant_rows_are_limited_to_workloads_of_the_model(tmp_path: Path) -> None:
    setting = make_setting(tmp_path, BASE, QUICK_BASE)
    keys = [key for contestant in contestants(setting) for key in contestant.keys(setting)]
    assert {(key.model, key.what, key.workload) for key in keys} == {(BASE, "embed", "passages")}
    assert {key.name for key in keys} == {
        "attnlens engine",
        "attnlens engine, OpenVINO",
        "CTranslate2",
        "openvino-genai",
        "sentence-transformers OpenVINO",
        "sentence-transformers torch",
        "fastembed",
    }
