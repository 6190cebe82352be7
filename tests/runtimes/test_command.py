"""`attnlens check --runtime`: the table, the JSON, the exit codes."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from attnlens_cli.commands.bundles.check import check
from attnlens_export import runtimes as runtime_parity
from attnlens_export.parity.grid import small_grid
from attnlens_runtimes import FP32, RUNTIMES, GraphProcess, Installed
from attnlens_runtimes.runtime import Feed
from runtimes.stand_in import stand_in

pytestmark = pytest.mark.extended  # other runtimes


class StandIn:
    """Register a fake runtime."""

    name = "stand-in"

    def __init__(self, behavior: str, precision: str) -> None:
        self._found = stand_in(behavior, precision)

    def find(self, node_modules: Path | None) -> Installed:
        """It is always there."""
        assert node_modules is None or node_modules.is_dir()
        return self._found


@pytest.fixture(autouse=True)
def quick_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnlens_export.check.default_grid", lambda config, _: small_grid(config.max_tokens))


def register(monkeypatch: pytest.MonkeyPatch, behavior: str, precision: str = FP32) -> None:
    """Leave three runtimes: one that misbehaves, one that works, and one that may be missing."""
    runtimes: dict[str, Any] = {"stand-in": StandIn(behavior, precision)}
    runtimes |= {name: RUNTIMES[name] for name in ("onnx.reference", "onnxruntime-web")}
    monkeypatch.setattr("attnlens_runtimes.registry.RUNTIMES", runtimes)
    monkeypatch.setattr(runtime_parity, "RUNTIMES", runtimes)


def run_check(*arguments: object) -> Result:
    return CliRunner().invoke(check, [str(each) for each in arguments])


def row(output: str, name: str) -> list[str]:
    [line] = [line for line in output.splitlines() if line.split()[:1] == [name]]
    return line.split()


def test_all_shows_every_runtime_and_missing_ones(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "works")
    result = run_check(tiny_bundle, "--runtime", "all", "--node-modules", tmp_path)
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout  # it fits 80 columns
    for name in ("stand-in", "onnx.reference"):
        errors = [float(cell) for cell in row(result.stdout, name)[2:6]]
        assert max(errors) <= 1e-5
        assert row(result.stdout, name)[6:] == ["5/5", "passed"]
    assert "onnxruntime-web is not installed: npm install onnxruntime-web" in result.stdout
    # On a busy machine, indented lines state the remaining time.
    stages = [line for line in result.stderr.splitlines() if not line.startswith(" ")]
    assert stages[-2:] == ["stand-in: 5 steps", "onnx.reference: 5 steps"]


def test_runtime_that_fails_exits_1_after_the_others_ran(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "crashes")
    result = run_check(tiny_bundle, "--runtime", "stand-in", "--runtime", "onnx.reference")
    assert result.exit_code == 1
    assert row(result.stdout, "stand-in")[6:] == ["4/5", "FAILED"]
    assert row(result.stdout, "onnx.reference")[6:] == ["5/5", "passed"]
    reason = "stand-in: onnx/model.onnx: stopped at 2x33 right: crashed: signal 11 (SIGSEGV)"
    assert reason in result.stdout
    assert f"failed in stand-in: {reason}" in result.stderr


def test_json_has_every_measurement_and_every_reason(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "is a little off")
    result = run_check(tiny_bundle, "--runtime", "all", "--node-modules", tmp_path, "--json")
    assert result.exit_code == 1
    content = json.loads(result.stdout)
    assert content["passed"]  # in ONNX Runtime
    off, exact = content["runtimes"]
    assert (off["name"], off["version"], off["passed"], off["stops"]) == ("stand-in", "1.0", False, {})
    assert len(off["measurements"]) == 3 * 5
    assert any(": error 1.00e-03" in line for line in off["failures"])
    assert exact["passed"]
    assert [each["name"] for each in content["missing_runtimes"]] == ["onnxruntime-web"]


def test_runtime_with_lower_default_precision_has_a_separate_table(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "is a little off", "bf16")
    result = run_check(tiny_bundle, "--runtime", "stand-in", "--runtime", "onnx.reference")
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout  # it fits 80 columns
    exact, reduced = result.stdout.split("In lower precision: 1 - smallest cosine with PyTorch")
    assert row(exact, "stand-in")[6:] == row(exact, "onnx.reference")[6:] == ["5/5", "passed"]
    assert row(reduced, "stand-in")[1:3] == ["1.0", "bf16"]
    cosines = [float(cell) for cell in row(reduced, "stand-in")[3:6]]
    assert 1e-8 < cosines[0] == cosines[1] < 1e-3
    assert abs(cosines[2]) < 1e-8  # the attention weights are right
    assert row(reduced, "stand-in")[7:] == ["5/5", "passed"]

    content = json.loads(run_check(tiny_bundle, "--runtime", "stand-in", "--json").stdout)
    assert [(each["precision"], each["passed"]) for each in content["runtimes"]] == [
        ("bf16", True),
        ("fp32", True),
    ]
    assert content["runtimes"][0]["min_cosine_allowed"] == 0.999
    assert content["runtimes"][1]["tolerance"] == 1e-5


def test_default_of_lower_precision_that_fails_exits_1(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "is far off", "bf16")
    result = run_check(tiny_bundle, "--runtime", "stand-in")
    assert result.exit_code == 1
    assert "failed in stand-in in bf16: stand-in in bf16: onnx/model" in result.stderr
    assert [line.split()[-1] for line in result.stdout.splitlines() if line.startswith(" stand-in")] == [
        "passed",
        "FAILED",
    ]


def test_time_limit_is_kept(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "hangs in one graph")
    result = run_check(tiny_bundle, "--runtime", "stand-in", "--answer-timeout", "4")
    assert result.exit_code == 1
    assert "stopped at 2x33 right: no response in 4 s" in result.stdout


def test_signal_ends_the_runtime_and_leaves_no_files(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "works")
    processes: list[GraphProcess] = []

    def interrupted(process: GraphProcess, _feed: Feed) -> None:
        processes.append(process)
        assert process.directory.is_dir()
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(GraphProcess, "run", interrupted)
    result = run_check(tiny_bundle, "--runtime", "stand-in")
    assert result.exit_code == 143
    assert result.stderr.splitlines()[-1] == "check: stopped by SIGTERM"
    [process] = processes
    assert not process.directory.exists()
    assert process._process.poll() is not None


def test_package_that_is_damaged_counts_as_missing(tiny_bundle: Path, tmp_path: Path) -> None:
    for name, content in (("onnxruntime-node", None), ("onnxruntime-web", "{")):
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "package.json").write_text(content)
        result = run_check(tiny_bundle, "--runtime", name, "--node-modules", tmp_path)
        assert result.exit_code == 1
        assert f"npm install {name}" in result.stderr


def test_unknown_name_is_rejected_before_reading(tiny_bundle: Path, tmp_path: Path) -> None:
    result = run_check(tiny_bundle, "--runtime", "openvno")
    assert result.exit_code == 2
    assert "unknown runtime 'openvno': use one of" in result.stderr
    result = run_check(tiny_bundle, "--runtime", "onnxruntime-node", "--node-modules", tmp_path)
    assert result.exit_code == 1
    assert "onnxruntime-node is not installed: npm install onnxruntime-node" in result.stderr
    assert "Comparing the hashes" not in result.stderr
    assert result.stdout == ""
    assert run_check(tiny_bundle, "--runtime", "all", "--answer-timeout", "0").exit_code == 2


def test_without_the_option_nothing_of_it_is_reported(tiny_bundle: Path) -> None:
    result = run_check(tiny_bundle)
    assert result.exit_code == 0
    assert "runtime" not in result.stdout
    assert "runtimes" not in json.loads(run_check(tiny_bundle, "--json").stdout)
