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


def row(output: str, label: str) -> list[str]:
    """Return the cells of the runtime's row without its label."""
    [line] = [line for line in output.splitlines() if line.startswith(f" {label}  ")]
    return line.removeprefix(f" {label}  ").split()


def test_all_shows_every_runtime_and_missing_ones(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "works")
    result = run_check(tiny_bundle, "--runtime", "all", "--node-modules", tmp_path)
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout  # it fits 80 columns
    for name in ("stand-in", "onnx.reference"):
        *errors, verdict = row(result.stdout, f"{name} fp32")
        assert verdict == "passed"
        assert len(errors) == 3
        assert max(map(float, errors)) <= 1e-5
        assert f"{name}: version " in result.stdout
    assert result.stdout.count(", 5 of 5 input shapes\n") == 2
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
    assert row(result.stdout, "stand-in fp32")[-1] == "FAILED"
    assert "stand-in: version 1.0, 4 of 5 input shapes\n" in result.stdout
    assert row(result.stdout, "onnx.reference fp32")[-1] == "passed"
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
    errors = [each for each in off["comparisons"] if each["figure"].startswith("max abs error of a")]
    assert len(errors) == 5
    assert any(" is 0.001 (limit 1e-05)" in line for line in off["failures"])
    assert exact["passed"]
    assert [each["name"] for each in content["missing_runtimes"]] == ["onnxruntime-web"]


def test_runtime_with_lower_default_precision_has_two_rows(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "is a little off", "bf16")
    result = run_check(tiny_bundle, "--runtime", "stand-in", "--runtime", "onnx.reference")
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout  # it fits 80 columns
    for name in ("stand-in", "onnx.reference"):
        error, cosine, *_, verdict = row(result.stdout, f"{name} fp32")
        assert (float(error) <= 1e-5, cosine, verdict) == (True, "-", "passed")
    error, cosine, difference, incompleteness, verdict = row(result.stdout, "stand-in bf16")
    assert (error, difference, verdict) == ("-", "-", "passed")
    assert 0 < float(incompleteness) < 1e-3
    assert 0.999 < float(cosine) < 1

    content = json.loads(run_check(tiny_bundle, "--runtime", "stand-in", "--json").stdout)
    assert [(each["precision"], each["passed"]) for each in content["runtimes"]] == [
        ("bf16", True),
        ("fp32", True),
    ]
    limits = [{each["limit"] for each in one["comparisons"]} for one in content["runtimes"]]
    assert limits[0] == {0, 0.02, 0.999, None}
    assert limits[1] >= {0, 1e-5}


def test_default_of_lower_precision_that_fails_exits_1(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "is far off", "bf16")
    result = run_check(tiny_bundle, "--runtime", "stand-in")
    assert result.exit_code == 1
    assert "failed in stand-in in bf16: stand-in in bf16: onnx/model" in result.stderr
    assert row(result.stdout, "stand-in fp32")[-1] == "passed"
    assert row(result.stdout, "stand-in bf16")[-1] == "FAILED"


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
