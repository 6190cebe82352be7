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
from attnlens_export.engines import measure as engines
from attnlens_export.engines.measure import precision_name
from attnlens_export.engines.texts import Limits
from attnlens_export.int8 import precision
from attnlens_export.int8.result import LogitsGate
from attnlens_export.int8.texts import KINDS, read_kinds
from attnlens_export.parity.grid import small_grid
from runtimes.measured import found, measure
from small_files import sign
from trained_heads import TrainedHeads

pytestmark = pytest.mark.extended

LOOSE = LogitsGate(0.9, 0.3)
LOGITS = OutputRole.OUTPUT_ROLE_LOGITS
CASES = [*small_grid(8)[::2]]


@pytest.fixture(scope="module")
def reranker(trained_heads: TrainedHeads, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("reranker") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "read_kinds", lambda _: {k: t[::4] for k, t in read_kinds(None).items()})
        options = ExportOptions(grid=small_grid(4), precisions=[Int8(LOOSE)])
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


def ranks(check: EngineCheck) -> list[tuple[str, str, float]]:
    kind = GateKind.GATE_KIND_MIN_RANK_AGREEMENT
    return [(gate.graph, gate.text_kind, gate.limit) for gate in check.gates if gate.kind == kind]


def test_command_records_the_logits_in_every_precision(
    reranker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With few texts, one pair of almost equal logits in another order is more than the limit.
    monkeypatch.setattr(engines, "BF16_LOGITS_LIMITS", Limits(LOOSE, 1e-2))
    copy = Path(shutil.copytree(reranker, tmp_path / "copy"))
    shown = CliRunner().invoke(check, [str(copy), "--engine", "openvino", "--parity-tokens", "2"])
    assert shown.exit_code == 0, shown.output
    manifest = read_manifest(copy)
    checks = {precision_name(check.precision): check for check in manifest.engine_checks}
    assert set(checks) == {"fp32", "int8"} | ({"bf16"} if multiplies_bf16() else set())
    assert all(check.passed and check.num_texts > 100 for check in checks.values())
    for name, limit, graph in (
        ("fp32", 0.999, "logits"),
        ("bf16", 0.9, "logits"),
        ("int8", 0.9, "logits.int8"),
    ):
        if name in checks:
            assert ranks(checks[name]) == [(graph, kind, limit) for kind in KINDS]
    hidden = OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE
    assert {(figure.graph, figure.role) for figure in checks["fp32"].figures} == {
        ("logits", LOGITS),
        ("embeddings", hidden),
        ("attention", hidden),
        ("attention", OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS),
    }
    known = {graph.id for graph in manifest.graphs}
    assert {gate.graph for check in checks.values() for gate in check.gates} <= known
    report = (copy / "parity" / "report.md").read_text(encoding="utf-8")
    assert "| logits.int8 | min rank agreement of logits | sentences | " in report


def test_runtime_compares_the_logits(reranker: Path, altered: Path) -> None:
    runtime = found("onnxruntime")
    result = measure(reranker, runtime, CASES)
    assert result.passed
    [logits] = [errors for errors in result.worst_errors() if errors.role == "logits"]
    assert 0 < logits.max_abs_error < 1e-5
    assert result.num_cases == len(CASES)
    failed = measure(reranker, runtime, CASES, altered)
    assert all("onnx/model.onnx: " in line for line in failed.failures())
    assert failed.failures()
