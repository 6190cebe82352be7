"""Measurements of `check --engine openvino` and `check --runtime` for a reranker."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from attnlens.bundle import read_manifest
from attnlens.openvino import multiplies_bf16
from attnlens.v1.manifest_pb2 import EngineCheck, GateKind, OutputRole
from attnlens_cli.commands.bundles.check import check
from attnlens_export import ExportOptions, Int8, export_bundle
from attnlens_export.engines.measure import EngineOptions, EngineSummary, find_engine, measure_engine
from attnlens_export.engines.texts import BF16_LOGITS_LIMITS, FP32_LOGITS_LIMITS
from attnlens_export.int8 import precision
from attnlens_export.int8.texts import KINDS, read_kinds
from attnlens_export.parity.grid import small_grid
from runtimes.measured import measure
from small_files import sign
from trained_heads import TrainedHeads

pytestmark = pytest.mark.extended

LOGITS = OutputRole.OUTPUT_ROLE_LOGITS
CASES = [*small_grid(40)[::2]]


@pytest.fixture(scope="module")
def reranker(trained_heads: TrainedHeads, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("reranker") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "read_kinds", lambda _: {k: t[::4] for k, t in read_kinds(None).items()})
        options = ExportOptions(grid=small_grid(4), precisions=[Int8()])
        export_bundle(trained_heads.reranker, bundle, options)
    return bundle


@pytest.fixture
def altered(reranker: Path, tmp_path: Path) -> Path:
    """The bundle with other weights in the head of the logits graph."""
    copy = Path(shutil.copytree(reranker, tmp_path / "altered"))
    path = copy / "onnx" / "model.onnx"
    tensors = {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}
    weight = numpy_helper.to_array(tensors["dense.1.weight.T"])
    content = path.read_bytes()
    assert content.count(weight.tobytes()) == 1  # other graphs refer to positions in this file
    path.write_bytes(content.replace(weight.tobytes(), (weight * np.float32(1.001)).tobytes()))
    sign(copy)
    return copy


def measured(bundle: Path) -> EngineSummary:
    return measure_engine(bundle, find_engine(EngineOptions(timeout_s=120)), grid=CASES)


def ranks(check: EngineCheck) -> list[tuple[str, str, float]]:
    kind = GateKind.GATE_KIND_MIN_RANK_AGREEMENT
    return [(gate.graph, gate.text_kind, gate.limit) for gate in check.gates if gate.kind == kind]


def test_logits_pass_in_every_precision(reranker: Path) -> None:
    summary = measured(reranker)
    checks = {result.precision: result.to_message() for result in summary.results}
    assert summary.failures() == []
    assert set(checks) | {missing.precision for missing in summary.not_measured} == {"fp32", "bf16", "int8"}
    assert ("bf16" in checks) == (multiplies_bf16() is not False)
    limit = FP32_LOGITS_LIMITS.gate.limits[GateKind.GATE_KIND_MIN_RANK_AGREEMENT]
    assert ranks(checks["fp32"]) == [("logits", kind, limit) for kind in KINDS]
    if "bf16" in checks:
        limit = BF16_LOGITS_LIMITS.gate.limits[GateKind.GATE_KIND_MIN_RANK_AGREEMENT]
        assert ranks(checks["bf16"]) == [("logits", kind, limit) for kind in KINDS]
    assert [graph for graph, _, _ in ranks(checks["int8"])] == ["logits.int8"] * len(KINDS)
    hidden = OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE
    assert {(figure.graph, figure.role) for figure in checks["fp32"].figures} == {
        ("logits", LOGITS),
        ("embeddings", hidden),
        ("attention", hidden),
        ("attention", OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS),
    }
    known = {graph.id for graph in read_manifest(reranker).graphs}
    assert {gate.graph for check in checks.values() for gate in check.gates} <= known


def test_wrong_logits_fail_on_the_grid(altered: Path) -> None:
    engine = find_engine(EngineOptions(("fp32",), timeout_s=120))
    [result] = measure_engine(altered, engine, grid=CASES).results
    assert not result.passed
    assert all(line.startswith("onnx/model.onnx at ") for line in result.failures())
    assert "logits differ from PyTorch" in result.failures()[0]


def test_command_records_the_check(reranker: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(reranker, tmp_path / "copy"))
    shown = CliRunner().invoke(
        check, [str(copy), "--engine", "openvino", "--precision", "int8", "--parity-tokens", "2"]
    )
    assert shown.exit_code == 0, shown.output
    assert "ranks" in shown.stdout
    [recorded] = read_manifest(copy).engine_checks
    assert recorded.passed
    assert recorded.num_texts > 200
    assert "logits.int8" in (copy / "parity" / "report.md").read_text(encoding="utf-8")
    assert CliRunner().invoke(check, [str(copy), "--parity-tokens", "2"]).exit_code == 0


def test_runtime_compares_the_logits(reranker: Path, altered: Path) -> None:
    from attnlens_export.runtimes import RuntimeOptions, find_runtimes  # noqa: PLC0415

    [runtime], _ = find_runtimes(RuntimeOptions(("onnxruntime",)))
    result = measure(reranker, runtime, CASES)
    assert result.passed
    assert result.logits_error is not None
    assert 0 < result.logits_error < 1e-5
    assert result.num_cases == len(CASES)
    failed = measure(reranker, runtime, CASES, altered)
    assert all("onnx/model.onnx at " in line for line in failed.failures())
    assert failed.failures()
