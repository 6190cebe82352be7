"""Comparison of engines: the order of measurements, engines that cannot run, and a run of real engines."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attnlens.v1.manifest_pb2 import EngineCheck, Precision
from attnlens_server.bundle import open_bundle
from attnlens_server.config import ServerConfig
from attnlens_server.errors import StartupError
from attnlens_server.tuning import BenchOptions, config_for, probe, run_bench
from attnlens_server.tuning.bench import run_in_turns
from attnlens_server.tuning.probe import Probe, probe_in_subprocess
from attnlens_server.tuning.variants import REFERENCE, Turn, Variant
from attnlens_server.tuning.workload import draw_workload, read_workload

OV_FP32, OV_BF16, OV_INT8 = (Variant("openvino", precision) for precision in ("fp32", "bf16", "int8"))
INT8 = Variant("onnxruntime", "int8")
TEXTS = ("It rained.", "The animal was too tired.", "so it was wet and it was cold")


class _Recorder:
    """Records the variants that are probed and measured."""

    def __init__(self, unsupported: Variant) -> None:
        self.calls: list[tuple[str, Variant]] = []
        self._unsupported = unsupported

    def probe(self, variant: Variant) -> Probe:
        self.calls.append(("probe", variant))
        if variant == self._unsupported:
            raise StartupError("this processor has no bf16")
        return Probe(np.ones((1, 2), dtype=np.float32), None)

    def measure(self, variant: Variant) -> Turn:
        self.calls.append(("measure", variant))
        return Turn("CPU", float(len(self.calls)), 1.0)


def test_variants_are_measured_in_turn_and_unsupported_ones_are_skipped() -> None:
    recorder, stages = _Recorder(OV_BF16), []
    variants = [REFERENCE, OV_BF16, OV_FP32]
    measured, skipped = run_in_turns(
        variants, recorder.probe, recorder.measure, lambda stage, *_: stages.append(stage)
    )
    probes = [("probe", variant) for variant in variants]
    assert recorder.calls == [*probes, *[("measure", REFERENCE), ("measure", OV_FP32)] * 3]
    rates = {variant: [turn.tokens_per_s for turn in turns] for variant, (_, turns) in measured.items()}
    assert rates == {REFERENCE: [4, 6, 8], OV_FP32: [5, 7, 9]}
    assert skipped == {OV_BF16: "this processor has no bf16"}
    assert list(dict.fromkeys(stages)) == [
        "engines: accuracy and memory",
        *(f"engines: speed, round {number} of 3" for number in (1, 2, 3)),
    ]


def test_comparison_requires_the_reference() -> None:
    recorder = _Recorder(REFERENCE)
    with pytest.raises(StartupError, match="no bf16"):
        run_in_turns([REFERENCE, OV_FP32], recorder.probe, recorder.measure, lambda *_: None)


def test_each_engine_keeps_only_its_own_device_options(tmp_path: Path) -> None:
    config = ServerConfig(bundle=tmp_path, provider="cuda", device_id=1, threads=3)
    assert config_for(config, REFERENCE) == config
    of_openvino = config_for(config, OV_BF16)
    assert of_openvino == ServerConfig(bundle=tmp_path, engine="openvino", precision="bf16", threads=3)
    on_gpu = ServerConfig(bundle=tmp_path, engine="openvino", device="GPU")
    assert config_for(on_gpu, OV_FP32) == on_gpu
    assert config_for(on_gpu, REFERENCE) == ServerConfig(bundle=tmp_path)


def test_small_bundle_is_compared_in_both_engines(small_bundle: Callable[[str], Path]) -> None:
    bundle = open_bundle(small_bundle("wordpiece"))
    checked = EngineCheck(engine="openvino", precision=Precision.PRECISION_FP32, device="CPU", passed=True)
    failed = EngineCheck(engine="openvino", precision=Precision.PRECISION_BF16, device="CPU", passed=False)
    bundle.manifest.engine_checks.extend((checked, failed))
    config = ServerConfig(bundle=bundle.directory, threads=1)
    sample = read_workload(bundle, TEXTS, "three texts")
    options = BenchOptions(attention=False, seconds=0.02, thread_counts=(1,), sample=sample)
    report = run_bench(bundle, config, draw_workload(bundle.model), options, lambda *_: None)
    comparison = report.comparison
    assert comparison is not None
    reference, openvino = comparison.results
    assert [result.variant for result in comparison.results] == [REFERENCE, OV_FP32]
    assert reference.accuracy.smallest_cosine == 1
    assert openvino.accuracy.smallest_cosine >= 1 - 1e-6
    assert reference.is_checked
    assert openvino.is_checked
    for result in comparison.results:
        assert result.device == "CPU"
        assert len(result.turns) == 3
        assert result.tokens_per_s > 0
        assert 0 < result.alone_ms < 1000
        assert (result.memory_bytes is not None) == sys.platform.startswith("linux")
    assert list(comparison.skipped) == [INT8, OV_BF16, OV_INT8]
    assert "has no graph in int8: export it again with --precision int8" in comparison.skipped[OV_INT8]
    failed_check = f"it did not pass `attnlens check {bundle.directory} --engine openvino`"
    assert comparison.skipped[OV_BF16] == failed_check


def test_subprocess_returns_the_same_embeddings(small_bundle: Callable[[str], Path]) -> None:
    bundle = open_bundle(small_bundle("wordpiece"))
    texts = read_workload(bundle, TEXTS, "three texts").input_ids
    config = ServerConfig(bundle=bundle.directory, threads=1)
    isolated, local = probe_in_subprocess(bundle, config, texts), probe.probe(bundle, config, texts)
    assert isolated.embeddings.shape == (3, bundle.model.embedding_size)
    assert np.array_equal(isolated.embeddings, local.embeddings)
    with pytest.raises(StartupError, match="lanes is 2, but threads is 1"):
        probe_in_subprocess(bundle, ServerConfig(bundle=bundle.directory, threads=1, lanes=2), texts)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os.kill(os.getpid(), 4)", r"it crashed: signal 4 \(SIGILL\)"),
        ("raise SystemExit('no such device')", "its process ended with exit code 1: no such device"),
    ],
)
def test_crash_of_the_subprocess_is_reported(
    small_bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    bundle = open_bundle(small_bundle("wordpiece"))
    monkeypatch.setattr(probe, "_PROGRAM", program)
    with pytest.raises(StartupError, match=message):
        probe_in_subprocess(bundle, ServerConfig(bundle=bundle.directory), ())
