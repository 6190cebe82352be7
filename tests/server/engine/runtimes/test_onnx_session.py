"""Execution providers: the requested one is used, or the error states the reason."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from attnlens_server.engine.runtimes.onnx_runtime import resolve_provider
from attnlens_server.engine.runtimes.onnx_session import (
    CPU,
    CUDA,
    MEMORY_RETRY_S,
    OnnxSession,
    check_placement,
    count_placements,
    reporting_lack_of_memory,
)
from attnlens_server.engine.runtimes.saturation import _GRAPH
from attnlens_server.errors import OverloadedError, StartupError

GRAPH = Path("onnx/model.onnx")
without_cuda = pytest.mark.skipif(
    CUDA in onnxruntime.get_available_providers(), reason="this build of ONNX Runtime has CUDA"
)


@without_cuda
def test_cuda_is_rejected_when_the_build_lacks_it() -> None:
    with pytest.raises(StartupError, match=r"only .*CPUExecutionProvider.*attnlens\[gpu\]"):
        resolve_provider("cuda")
    assert resolve_provider("auto") == "cpu"
    assert resolve_provider("cpu") == "cpu"


def test_graph_that_fell_back_to_the_cpu_is_rejected() -> None:
    with pytest.raises(StartupError, match=r"runs no node of model.onnx.*CPUExecutionProvider"):
        check_placement({CPU: Counter(MatMul=48)}, GRAPH)


def test_graph_with_arithmetic_on_the_cpu_is_rejected() -> None:
    placements = {CUDA: Counter(MatMul=42), CPU: Counter(MatMul=6, Shape=1)}
    with pytest.raises(StartupError, match=r"CPUExecutionProvider runs 6 MatMul of model\.onnx"):
        check_placement(placements, GRAPH)


def test_shape_operators_may_stay_on_the_cpu() -> None:
    check_placement({CUDA: Counter(MatMul=48, Softmax=6), CPU: Counter(Shape=1, Slice=1)}, GRAPH)


def test_operators_required_on_the_device_depend_on_the_graph() -> None:
    placements = {CUDA: Counter(Gather=1), CPU: Counter(Slice=1)}
    check_placement(placements, GRAPH)
    with pytest.raises(StartupError, match=r"CPUExecutionProvider runs 1 Slice of model\.onnx"):
        check_placement(placements, GRAPH, {"Slice", "Gather"})


def test_placements_of_a_real_session_are_counted(minilm_bundle: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = onnxruntime.InferenceSession(minilm_bundle / GRAPH, options, providers=[CPU])
    placements = count_placements(session)
    assert set(placements) == {CPU}
    assert placements[CPU]["Softmax"] == 6
    with pytest.raises(StartupError, match="runs no node"):
        check_placement(placements, GRAPH)


def test_invalid_graph_file_is_rejected_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a graph")
    with pytest.raises(StartupError, match=r"model\.onnx"):
        OnnxSession(path, "cpu", threads=1, device_id=0)


@pytest.mark.parametrize("module", ["attnlens_server.engine.runtimes.onnx_session", "attnlens_cli.main"])
def test_onnx_runtime_telemetry_is_disabled(module: str, tmp_path: Path) -> None:
    script = f"""
import sys, {module}
if {module!r} == "attnlens_cli.main":
    sys.argv = ["attnlens", "--version"]
    try:
        {module}.main()
    except SystemExit:
        pass
import onnxruntime
onnxruntime.InferenceSession({str(_GRAPH)!r}, providers=["CPUExecutionProvider"])
"""
    switches = ("ORT_DISABLE_TELEMETRY", "CI", "ORT_RUNNING_UNIT_TESTS", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in switches}
    subprocess.run(
        [sys.executable, "-c", script], env=environment | {"HOME": str(tmp_path)}, check=True, timeout=60
    )
    assert list(tmp_path.rglob("*.db")) == []


# Messages of ONNX Runtime 1.31 on an NVIDIA H200, shortened.
MEMORY_ERRORS = [
    "AllocateRawInternal(size_t) Available memory of 6488320 is smaller than requested bytes of 314572800",
    "BFCArena::AllocateRawInternal(size_t) Failed to allocate memory for requested buffer of size 314572800",
    "CUBLAS failure 3: the resource allocation failed ; GPU=0 ; expr=cublasCreate(&cublas_handle_);",
    "CUDA failure 2: out of memory ; GPU=0",
]


@pytest.mark.parametrize("message", MEMORY_ERRORS)
def test_failed_allocation_is_a_transient_error_that_names_the_batch(message: str) -> None:
    with (
        pytest.raises(OverloadedError, match=r"too little free memory for 3 x 512 tokens") as caught,
        reporting_lack_of_memory(3, 512),
    ):
        raise RuntimeError(message)
    assert caught.value.retry_after_s == MEMORY_RETRY_S


def test_other_errors_of_a_batch_are_not_changed() -> None:
    with (
        pytest.raises(RuntimeError, match=r"^indices element out of data bounds"),
        reporting_lack_of_memory(3, 512),
    ):
        raise RuntimeError("indices element out of data bounds")


def test_cuda_without_a_gpu_prints_nothing_and_does_not_fall_back(
    minilm_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def preload_dlls() -> None:
        sys.stdout.write("Failed to load libcudart.so.13")

    monkeypatch.setattr(onnxruntime, "preload_dlls", preload_dlls)

    def fail(*_: Any, enable_fallback: int, **__: Any) -> None:
        assert enable_fallback == 0
        raise RuntimeError("CUDA failure 100: no CUDA-capable device is detected")

    monkeypatch.setattr(onnxruntime, "InferenceSession", fail)
    with pytest.raises(StartupError, match=r"no CUDA-capable device is detected\. Check the driver"):
        OnnxSession(minilm_bundle / GRAPH, "cuda", threads=1, device_id=0)
    assert capsys.readouterr().out == ""
