"""Results of `attnlens bench`, and `attnlens serve --auto` (operations.md), which applies them."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest

from attnlens.bundle import read_manifest, write_manifest
from attnlens.v1.manifest_pb2 import EngineCheck, Precision
from attnlens_cli.sources.measured import choose_options, save_report
from attnlens_client import Client
from attnlens_server.config import EngineName, ServerConfig
from attnlens_server.tuning import Comparison, Report, Setting, Variant, VariantResult, Workload
from attnlens_server.tuning.settings import SettingResult
from attnlens_server.tuning.variants import Accuracy, Turn
from served import ServerProcess

ONNXRUNTIME, OPENVINO = Variant("onnxruntime", "fp32"), Variant("openvino", "fp32")
ENGINES: tuple[EngineName, ...] = ("onnxruntime", "openvino")
TEXTS = Workload("a text", (np.ones(10, dtype=np.int64),))
BEST = SettingResult(Setting(2, 1, 128), (1000.0,))
SETTINGS = {"threads": 2, "lanes": 1, "max_batch_tokens": 128}


@pytest.fixture
def config(small_bundle: Callable[[str], Path], tmp_path: Path) -> ServerConfig:
    return ServerConfig(bundle=Path(shutil.copytree(small_bundle("wordpiece"), tmp_path / "bundle")))


def report(variant: Variant, speeds: dict[Variant, float]) -> Report:
    results = tuple(
        VariantResult(each, (Turn("CPU", speed, 2.0),), Accuracy(1.0, 1.0), None, is_checked=True)
        for each, speed in speeds.items()
    )
    comparison = Comparison(TEXTS, 16, results, {}) if results else None
    return Report(comparison, variant, "CPU", 256, (BEST,), BEST)


def add_check(bundle: Path, *, passed: bool) -> None:
    manifest = read_manifest(bundle)
    check = EngineCheck(engine="openvino", precision=Precision.PRECISION_FP32, device="CPU", passed=passed)
    manifest.engine_checks.append(check)
    write_manifest(bundle, manifest)


def test_settings_are_kept_for_each_engine(config: ServerConfig, tmp_path: Path) -> None:
    add_check(config.bundle, passed=True)
    save_report(config, tmp_path, report(ONNXRUNTIME, {ONNXRUNTIME: 100.0, OPENVINO: 102.0}))
    # The advantage of OpenVINO is too small.
    assert choose_options(config, tmp_path, ENGINES) == {"engine": "onnxruntime", **SETTINGS}
    assert choose_options(config, tmp_path, ["openvino"]) == {"engine": "openvino"}
    save_report(config, tmp_path, report(OPENVINO, {ONNXRUNTIME: 100.0, OPENVINO: 110.0}))
    assert choose_options(config, tmp_path, ENGINES) == {"engine": "openvino", **SETTINGS}
    assert choose_options(config, tmp_path, ["onnxruntime"]) == {"engine": "onnxruntime", **SETTINGS}


def test_engine_that_was_not_checked_is_not_chosen(config: ServerConfig, tmp_path: Path) -> None:
    save_report(config, tmp_path, report(ONNXRUNTIME, {ONNXRUNTIME: 100.0, OPENVINO: 200.0}))
    assert choose_options(config, tmp_path, ENGINES)["engine"] == "onnxruntime"
    add_check(config.bundle, passed=False)
    assert choose_options(config, tmp_path, ENGINES)["engine"] == "onnxruntime"
    add_check(config.bundle, passed=True)
    assert choose_options(config, tmp_path, ENGINES) == {"engine": "openvino"}


def test_other_precision_bundle_or_device_needs_its_own_measurement(
    config: ServerConfig, tmp_path: Path
) -> None:
    save_report(config, tmp_path, report(ONNXRUNTIME, {ONNXRUNTIME: 100.0}))
    changed = shutil.copytree(config.bundle, tmp_path / "changed")
    manifest = read_manifest(changed)
    manifest.files[[file.path for file in manifest.files].index("onnx/model.onnx")].sha256 = "0" * 64
    write_manifest(changed, manifest)
    for other in (
        replace(config, precision="int8"),
        replace(config, bundle=changed),
        replace(config, provider="cpu"),
    ):
        with pytest.raises(click.ClickException, match=r"was not measured in .* run `attnlens bench .*`"):
            choose_options(other, tmp_path, ENGINES)


def test_damaged_result_is_ignored_and_replaced(config: ServerConfig, tmp_path: Path) -> None:
    save_report(config, tmp_path, report(ONNXRUNTIME, {}))
    [path] = tmp_path.glob(".bench-*.json")
    path.write_text("[")
    with pytest.raises(click.ClickException, match="was not measured"):
        choose_options(config, tmp_path, ENGINES)
    save_report(config, tmp_path, report(ONNXRUNTIME, {}))
    assert choose_options(config, tmp_path, ENGINES) == {"engine": "onnxruntime", **SETTINGS}


def test_server_uses_measured_settings_except_those_that_are_given(
    config: ServerConfig, tmp_path: Path
) -> None:
    save_report(config, tmp_path, report(ONNXRUNTIME, {}))
    options = ("--auto", "--cache-dir", str(tmp_path), "--max-batch-tokens", "64")
    with ServerProcess(config.bundle, *options) as server, Client(server.address) as client:
        assert "2 threads, 1 lane, batches of 64 tokens" in server.ready_line
        assert "--auto: --engine onnxruntime --threads 2 --lanes 1\n" in server.log()
        assert client.embed(["a text"]).shape == (1, 96)
    with pytest.raises(RuntimeError, match=r"attnlens serve: --auto: .* was not measured in fp32 .*bench"):
        ServerProcess(config.bundle, "--auto", "--cache-dir", str(tmp_path / "none")).__enter__()
