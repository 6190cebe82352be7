"""`attnlens check --engine`: output, changes to the bundle, exit codes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from attnlens.bundle import read_manifest, verify_files
from attnlens.explanations import ExplainMethod
from attnlens.v1.manifest_pb2 import EngineCheck, GateKind, Precision
from attnlens_cli.commands.bundles.check import check
from attnlens_export.engines import measure
from attnlens_export.engines.measure import HEADING, EngineResult, record
from attnlens_export.engines.texts import Limits
from attnlens_export.faithfulness.measure import FaithfulnessResult, MethodResult
from attnlens_export.faithfulness.measure import record as record_faithfulness
from attnlens_export.int8.result import Gate
from attnlens_export.parity.grid import small_grid
from attnlens_export.results import Comparison
from schemas import conforms

OPENVINO = ("--engine", "openvino", "--precision", "fp32")


def run_check(*arguments: object) -> Result:
    return CliRunner().invoke(check, [str(argument) for argument in arguments])


def report_of(bundle: Path) -> tuple[dict[str, Any], str]:
    """Return both reports."""
    text = (bundle / "parity" / "report.json").read_text(encoding="utf-8")
    return json.loads(text), (bundle / "parity" / "report.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def small_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("check", "engines.measure"):
        monkeypatch.setattr(
            f"attnlens_export.{module}.default_grid", lambda config, _: small_grid(config.max_tokens)[-1:]
        )


@pytest.fixture
def bundle(small_bundle: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_bundle("wordpiece"), tmp_path / "bundle"))


def test_measurements_are_shown_written_and_kept(bundle: Path) -> None:
    _, before = report_of(bundle)
    result = run_check(bundle, *OPENVINO)
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout  # it fits 80 columns
    [row] = [line.split() for line in result.stdout.splitlines() if line.startswith(" fp32 ")]
    assert row[-1] == "passed"
    error, minimum, mean, difference, incompleteness = map(float, row[1:-1])
    assert max(error, difference, incompleteness) <= 1e-5
    assert min(minimum, mean) >= 0.999999
    stages = result.stderr.splitlines()
    assert stages[-2:] == ["openvino in fp32: 1 step", "openvino in fp32 on texts"]

    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    [stated] = manifest.engine_checks
    assert (stated.engine, stated.precision, stated.passed) == ("openvino", Precision.PRECISION_FP32, True)
    content, page = report_of(bundle)
    [entry] = content["engine_checks"]
    assert (entry["precision"], entry["passed"], entry["processor"]) == ("fp32", True, stated.processor)
    assert content["passed"]
    assert page.startswith(before)
    assert "### openvino, CPU, fp32: passed" in page

    plain = run_check(bundle)
    assert plain.exit_code == 0, plain.output
    assert f"openvino {stated.version} on CPU in fp32: passed according to the manifest" in plain.stdout
    assert list(read_manifest(bundle).engine_checks) == [stated]


def result_of(precision: Precision.ValueType, *, passed: bool, device: str = "CPU") -> EngineResult:
    value = 0.9 if passed else float("nan")
    figure = Comparison("onnx/model.onnx", "", value, 0.5, GateKind.GATE_KIND_MIN_COSINE)
    check = EngineCheck(engine="openvino", version="1", precision=precision, device=device)
    return EngineResult(comparisons=(figure,), check=check)


def test_result_replaces_only_an_earlier_result_of_the_same_kind(bundle: Path) -> None:
    fp32, bf16 = Precision.PRECISION_FP32, Precision.PRECISION_BF16
    faithful = FaithfulnessResult(
        "", 10, 9.0, (MethodResult(ExplainMethod.CONTRIBUTIONS, 0.8, 0.7, 0.9, 10, 0.4),)
    )
    record_faithfulness(bundle, faithful)
    record(bundle, [result_of(bf16, passed=False), result_of(fp32, passed=True)])
    record(bundle, [result_of(bf16, passed=True, device="GPU")])
    record_faithfulness(bundle, faithful)
    record(bundle, [result_of(fp32, passed=False)])
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    expected = [(fp32, "CPU", False), (bf16, "CPU", False), (bf16, "GPU", True)]
    found = [(check.precision, check.device, check.passed) for check in manifest.engine_checks]
    assert found == expected
    assert len(manifest.faithfulness) == 1

    content, page = report_of(bundle)
    assert [entry["passed"] for entry in content["engine_checks"]] == [False, False, True]
    assert content["engine_checks"][0]["comparisons"][0]["value"] is None
    assert content["engine_checks"][0]["failures"] == ["onnx/model.onnx: min cosine is nan (limit 0.5)"]
    assert content["faithfulness"]["num_texts"] == 10
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert {*headings[-2:]} == {HEADING, "## Faithfulness of explanations"}
    assert len(headings) == len({*headings})
    assert "| embeddings | min cosine |  | nan | 0.5 | FAILED |" in page


def test_failed_gate_exits_1_and_is_recorded(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "FP32_LIMITS", Limits(Gate(1.5, 0.999999), 1e-5))
    result = run_check(bundle, *OPENVINO)
    assert result.exit_code == 1
    line = (
        "openvino in fp32: onnx/model.onnx: mean cosine of embedding on 15 texts (sentences) is 1.000000 "
        "(limit 1.5)"
    )
    assert line in result.stdout
    assert f"failed in {line} (and 4 more); a server with this setting refuses to start" in result.stderr
    assert "2 more failures, see --json" in result.stdout
    manifest = read_manifest(bundle)
    assert [check.passed for check in manifest.engine_checks] == [False]
    content, page = report_of(bundle)
    assert [entry["passed"] for entry in content["engine_checks"]] == [False]
    assert "| embeddings | mean cosine of embedding | prose | 1.000000 | 1.5 | FAILED |" in page
    verify_files(bundle, manifest)


def test_json_matches_its_schema(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "multiplies_bf16", lambda: False)
    result = run_check(bundle, "--engine", "openvino", "--json")
    assert result.exit_code == 0, result.output
    content = conforms("check", result.stdout)
    [found] = content["engine_checks"]
    assert (found["precision"], found["passed"], found["num_cases"]) == ("fp32", True, 1)
    assert [each["precision"] for each in content["precisions_not_measured"]] == ["bf16", "int8"]
    assert content["precisions_not_measured"][1]["reason"] == "the bundle has no graph in int8"


def test_impossible_options_are_rejected_before_any_measurement(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_check(bundle, "--engine", "tensorrt").exit_code == 2
    for arguments in (["--precision", "fp32"], ["--device", "CPU"]):
        result = run_check(bundle, *arguments)
        assert result.exit_code == 2
        assert "--precision and --device need --engine openvino" in result.stderr
    monkeypatch.setattr("attnlens_runtimes.runtime._version_of", lambda _: None)
    result = run_check(bundle, *OPENVINO)
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: --engine openvino needs openvino, which is not installed: pip install 'attnlens[openvino]'\n"
    )
