"""How engines are compared: in which order, what becomes of those that can't run, and that it really runs."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from attnlens.v1.manifest_pb2 import EngineCheck, Precision
from attnlens_server.bundle import Bundle, open_bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine
from attnlens_server.errors import StartupError
from attnlens_server.tuning import compare as comparing
from attnlens_server.tuning import probe
from attnlens_server.tuning.compare import EngineRig, compare, compare_engines, config_of, has_room_for
from attnlens_server.tuning.memory import available_bytes
from attnlens_server.tuning.probe import Probe, probe_apart
from attnlens_server.tuning.running import running as really_running
from attnlens_server.tuning.variants import REFERENCE, LeftOut, Turn, Variant
from attnlens_server.tuning.workload import draw_workload, read_workload

OV_FP32, OV_BF16, OV_INT8 = (Variant("openvino", precision) for precision in ("fp32", "bf16", "int8"))
TEXTS = ("It rained.", "The animal was too tired.", "so it was wet and it was cold")


class _Rig:
    """Notes what it is asked, and knows no engine."""

    def __init__(self, refused: Variant) -> None:
        self.asked: list[tuple[str, Variant]] = []
        self._refused = refused

    def probe(self, variant: Variant) -> Probe:
        self.asked.append(("probe", variant))
        if variant == self._refused:
            raise StartupError("this processor has no bf16")
        return Probe(np.ones((1, 2), dtype=np.float32), None)

    def run(self, variant: Variant) -> Turn:
        self.asked.append(("run", variant))
        return Turn("CPU", float(len(self.asked)), 1.0)


def test_what_runs_is_measured_in_turn_and_what_does_not_is_named() -> None:
    rig, stages = _Rig(refused=OV_BF16), []
    variants = [REFERENCE, OV_BF16, OV_FP32]
    contenders, left_out = compare(variants, rig, lambda stage, *_: stages.append(stage))
    probes, rounds = [("probe", variant) for variant in variants], [("run", REFERENCE), ("run", OV_FP32)]
    assert rig.asked == [*probes, *rounds * 3]
    assert [(found.variant, [turn.tokens_per_s for turn in found.turns]) for found in contenders] == [
        (REFERENCE, [4, 6, 8]),
        (OV_FP32, [5, 7, 9]),
    ]
    assert left_out == [LeftOut(OV_BF16, "this processor has no bf16")]
    assert list(dict.fromkeys(stages)) == [
        "engines: accuracy and memory",
        *(f"engines: speed, round {number} of 3" for number in (1, 2, 3)),
    ]


def test_without_the_reference_there_is_no_comparison() -> None:
    with pytest.raises(StartupError, match="no bf16"):
        compare([REFERENCE, OV_FP32], _Rig(refused=REFERENCE), lambda *_: None)


def test_each_engine_gets_where_to_run_from_its_own_options(tmp_path: Path) -> None:
    config = ServerConfig(bundle=tmp_path, provider="cuda", device_id=1, threads=3)
    assert config_of(config, REFERENCE) == config
    of_openvino = config_of(config, OV_BF16)
    assert of_openvino == ServerConfig(bundle=tmp_path, engine="openvino", precision="bf16", threads=3)
    on_gpu = ServerConfig(bundle=tmp_path, engine="openvino", device="GPU")
    assert config_of(on_gpu, OV_FP32) == on_gpu
    assert config_of(on_gpu, REFERENCE) == ServerConfig(bundle=tmp_path)


def test_a_small_bundle_in_both_engines(small_bundle: Callable[[str], Path]) -> None:
    bundle = open_bundle(small_bundle("wordpiece"))
    checked = EngineCheck(engine="openvino", precision=Precision.PRECISION_FP32, device="CPU", passed=True)
    failed = EngineCheck(engine="openvino", precision=Precision.PRECISION_BF16, device="CPU", passed=False)
    bundle.manifest.engine_checks.extend((checked, failed))
    config = ServerConfig(bundle=bundle.directory, threads=1)
    sample = read_workload(bundle, TEXTS, "three texts")
    rig = EngineRig(bundle, config, draw_workload(bundle.model), sample, num_in_flight=16, seconds=0.02)
    found = compare_engines([REFERENCE, OV_FP32, OV_BF16, OV_INT8], rig, lambda *_: None)
    reference, openvino = found.rows
    assert [row.variant for row in found.rows] == [REFERENCE, OV_FP32]
    assert reference.accuracy.smallest_cosine == 1
    assert openvino.accuracy.smallest_cosine >= 1 - 1e-6
    assert reference.is_checked
    assert openvino.is_checked
    assert not rig.is_checked(OV_INT8)
    for row in found.rows:
        assert row.device == "CPU"
        assert len(row.turns) == 3
        assert row.tokens_per_s > 0
        assert 0 < row.alone_ms < 1000
        assert (row.memory_bytes is not None) == sys.platform.startswith("linux")
    assert [left_out.variant for left_out in found.left_out] == [OV_BF16, OV_INT8]
    bf16, int8 = (left_out.reason for left_out in found.left_out)
    assert bf16 == f"it did not pass `attnlens check {bundle.directory} --engine openvino`"
    assert "has no graph in int8: export it again with --precision int8" in int8


def test_a_probe_is_of_a_process_of_its_own(small_bundle: Callable[[str], Path]) -> None:
    bundle = open_bundle(small_bundle("wordpiece"))
    texts = read_workload(bundle, TEXTS, "three texts").input_ids
    config = ServerConfig(bundle=bundle.directory, threads=1)
    apart, here = probe_apart(bundle, config, texts), probe.probe(bundle, config, texts)
    assert apart.embeddings.shape == (3, bundle.model.embedding_size)
    assert np.array_equal(apart.embeddings, here.embeddings)
    with pytest.raises(StartupError, match="lanes is 2 with 1 threads: a lane needs a thread"):
        probe_apart(bundle, ServerConfig(bundle=bundle.directory, threads=1, lanes=2), texts)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os.kill(os.getpid(), 4)", r"it crashed: signal 4 \(SIGILL\)"),
        ("raise SystemExit('no such device')", "its process ended with exit code 1: no such device"),
    ],
)
def test_an_engine_that_crashes_ends_its_process_alone(
    small_bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    bundle = open_bundle(small_bundle("wordpiece"))
    monkeypatch.setattr(probe, "_PROGRAM", program)
    with pytest.raises(StartupError, match=message):
        probe_apart(bundle, ServerConfig(bundle=bundle.directory), ())


def test_engines_stay_open_only_where_memory_has_room_for_all() -> None:
    assert has_room_for([100, 300], 800)
    assert not has_room_for([100, 301], 800)
    assert not has_room_for([100, None], 800)
    assert not has_room_for([100], None)


def test_the_smaller_of_the_two_limits_of_memory_counts(tmp_path: Path) -> None:
    system = tmp_path / "meminfo"
    assert available_bytes(system, tmp_path) is None
    system.write_text("MemTotal:  900 kB\nMemAvailable:     700 kB\n")
    assert available_bytes(system, tmp_path) == 700 * 1024
    (tmp_path / "memory.current").write_text("1000\n")
    for limit, available in (("max", 700 * 1024), ("5000", 4000), ("900", 0), ("9000000", 700 * 1024)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert available_bytes(system, tmp_path) == available


@pytest.mark.parametrize(("available", "num_opened"), [(1 << 40, 1), (0, 3)])
def test_without_room_an_engine_is_opened_for_each_turn(
    small_bundle: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    available: int,
    num_opened: int,
) -> None:
    opened: list[str] = []

    def running(bundle: Bundle, config: ServerConfig) -> AbstractContextManager[Engine]:
        opened.append(config.engine)
        return really_running(bundle, config)

    monkeypatch.setattr(comparing, "running", running)
    monkeypatch.setattr(comparing, "available_bytes", lambda: available)
    bundle = open_bundle(small_bundle("wordpiece"))
    texts = draw_workload(bundle.model)
    config = ServerConfig(bundle=bundle.directory, threads=1)
    rig = EngineRig(bundle, config, texts, texts.sample(40), num_in_flight=8, seconds=0.01)
    found = compare_engines([REFERENCE], rig, lambda *_: None)
    assert len(opened) == num_opened
    assert len(found.rows[0].turns) == 3
