"""`attnlens check --engine`: what it prints, what it writes into a bundle, its exit codes."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from attnlens.bundle import read_manifest, verify_files
from attnlens.explanations import ExplainMethod
from attnlens.v1.manifest_pb2 import Precision
from attnlens_cli.commands.bundles.check import check
from attnlens_export.engines import engine, measure
from attnlens_export.engines.record import HEADING
from attnlens_export.engines.texts import Limits
from attnlens_export.faithfulness.result import FaithfulnessResult, Measured, record
from attnlens_export.parity.grid import small_grid
from schemas import conforms

OPENVINO = ("--engine", "openvino", "--precision", "fp32")


@pytest.fixture(autouse=True)
def small_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("check", "engines.measure"):
        monkeypatch.setattr(
            f"attnlens_export.{module}.default_grid", lambda config, _: small_grid(config.max_tokens)
        )


@pytest.fixture
def bundle(small_bundle: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_bundle("wordpiece"), tmp_path / "bundle"))


def run_check(*arguments: object) -> Result:
    return CliRunner().invoke(check, [str(argument) for argument in arguments])


def report_of(bundle: Path) -> tuple[dict[str, Any], str]:
    """Return both reports."""
    text = (bundle / "parity" / "report.json").read_text(encoding="utf-8")
    return json.loads(text), (bundle / "parity" / "report.md").read_text(encoding="utf-8")


def test_what_passes_is_shown_and_written_once(bundle: Path) -> None:
    _, before = report_of(bundle)
    for _ in range(2):
        result = run_check(bundle, *OPENVINO)
        assert result.exit_code == 0, result.output
    assert "…" not in result.stdout  # it fits 80 columns
    [row] = [line.split() for line in result.stdout.splitlines() if line.startswith(" fp32 ")]
    assert row[-1] == "passed"
    assert all(float(cell) <= 1e-5 for cell in row[1:-1])
    assert re.search(r"gate, for each +0\.999999 +0\.999999", result.stdout)
    assert result.stderr.splitlines()[-2:] == [
        "openvino in fp32 on 5 input shapes",
        "openvino in fp32 on texts",
    ]

    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    [stated] = manifest.engine_checks
    assert (stated.engine, stated.precision, stated.passed) == ("openvino", Precision.PRECISION_FP32, True)
    content, page = report_of(bundle)
    [entry] = content["engine_checks"]
    assert (entry["precision"], entry["passed"], entry["processor"]) == ("fp32", True, stated.processor)
    assert content["passed"]
    assert page.startswith(before)
    assert page.count(HEADING) == 1
    assert "### openvino, CPU, fp32: passed" in page


def test_later_checks_keep_what_was_measured(bundle: Path) -> None:
    assert run_check(bundle, *OPENVINO).exit_code == 0
    [stated] = read_manifest(bundle).engine_checks
    plain = run_check(bundle)
    assert plain.exit_code == 0, plain.output
    assert f"stated of openvino {stated.version} on CPU in fp32, not measured again: passed" in plain.stdout
    assert "engine_checks" not in json.loads(run_check(bundle, "--json").stdout)

    # Another measurement that is written into the report, before and after.
    faithful = FaithfulnessResult("", 10, 9.0, (Measured(ExplainMethod.CONTRIBUTIONS, 0.8, 0.0, 0.4),))
    record(bundle, faithful)
    assert run_check(bundle, *OPENVINO).exit_code == 0
    record(bundle, faithful)
    content, page = report_of(bundle)
    assert {"engine_checks", "faithfulness"} <= {*content}
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings[-2:] == [HEADING, "## Faithfulness of explanations"]
    assert len(headings) == len({*headings})
    assert list(read_manifest(bundle).engine_checks) == [stated]
    verify_files(bundle, read_manifest(bundle))


def test_a_gate_that_does_not_hold_exits_1_and_is_written(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_check(bundle, *OPENVINO).exit_code == 0
    monkeypatch.setattr(measure, "FP32_LIMITS", Limits(1.5, 0.999999, 1e-5))
    result = run_check(bundle, *OPENVINO)
    assert result.exit_code == 1
    line = (
        "openvino in fp32: onnx/model.onnx: the mean cosine of embeddings with those in fp32, sentences, is "
        "1, at least 1.5 is allowed"
    )
    assert line in result.stdout
    assert f"failed in {line} (and 4 more); a server with that refuses to start" in result.stderr
    assert "2 more failures, see --json" in result.stdout
    [stated] = read_manifest(bundle).engine_checks
    assert not stated.passed
    content, page = report_of(bundle)
    assert [entry["passed"] for entry in content["engine_checks"]] == [False]
    assert "| embeddings | embedding | prose | mean cosine | 1.5 | 1.000000 | NOT HELD |" in page
    verify_files(bundle, read_manifest(bundle))


def test_json_is_as_its_schema_says(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "multiplies_bf16", lambda: False)
    result = run_check(bundle, "--engine", "openvino", "--json")
    assert result.exit_code == 0, result.output
    content = conforms("check", result.stdout)
    [found] = content["engine_checks"]
    assert (found["precision"], found["passed"], found["num_cases"]) == ("fp32", True, 5)
    assert [each["precision"] for each in content["precisions_not_measured"]] == ["bf16", "int8"]
    assert content["precisions_not_measured"][1]["reason"] == "the bundle has no graph in int8"


def test_what_can_not_be_is_refused_before_anything_is_measured(
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
