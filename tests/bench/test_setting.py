"""Which bundles are measured."""

from collections.abc import Callable
from pathlib import Path

import pytest

from attnlens.bundle import write_manifest
from attnlens.v1.manifest_pb2 import Graph, Manifest, Precision
from bench.contestants import ENGINE, contestants
from bench.setting import QUICK, Setting, find_int8_bundle


def write_bundle(directory: Path, *precisions: Precision.ValueType) -> Path:
    """Write a manifest that names a graph in each precision."""
    directory.mkdir()
    write_manifest(
        directory, Manifest(format_version=1, graphs=[Graph(precision=precision) for precision in precisions])
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


def test_only_the_rows_in_int8_take_it(tmp_path: Path) -> None:
    bundle, own = write_bundle(tmp_path / "bundle"), write_bundle(tmp_path / "own")
    setting = Setting(bundle, own, tmp_path, 1, 1, 0.5, QUICK, ())
    taken = {
        contestant.precision: contestant.arguments[0]
        for contestant in contestants(setting)
        if contestant.name == ENGINE
    }
    assert taken == {"fp32": bundle, "int8": own}
