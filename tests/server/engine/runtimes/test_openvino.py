"""OpenVINO matches ONNX Runtime, and its errors name the missing feature."""

import importlib.util
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlens_server
from attnlens.openvino import multiplies_bf16
from attnlens_client import AttentionQuery, Client
from attnlens_server import Local
from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.engine.runtimes import openvino_runtime
from attnlens_server.engine.runtimes.openvino_runtime import OpenvinoRuntime
from attnlens_server.engine.runtimes.openvino_session import OpenvinoSession
from attnlens_server.engine.runtimes.runtime import Division, TimeLimit
from attnlens_server.errors import StartupError
from served import ServerProcess
from tampered import copy_of, manifest_of

TEXTS = ["A man is playing a guitar.", "x", "It rained all day, and nobody went out. " * 3, "Zoë 東京 😀"]
SMALL_TEXTS = ["The animal was tired.", "x"]
needs_bf16 = pytest.mark.skipif(not multiplies_bf16(), reason="needs a processor with bf16")


@pytest.fixture(scope="module")
def expected(minilm_bundle: Path) -> Iterator[Local]:
    with attnlens_server.local(minilm_bundle, threads=2) as model:
        yield model


@pytest.fixture(scope="module")
def model(minilm_bundle: Path) -> Iterator[Local]:
    with attnlens_server.local(minilm_bundle, threads=2, engine="openvino") as model:
        yield model


# --- same results ---------------------------------------------------------------------------------


def test_fp32_embeddings_and_attention_match_onnx_runtime(model: Local, expected: Local) -> None:
    np.testing.assert_allclose(model.embed(TEXTS), expected.embed(TEXTS), rtol=0, atol=1e-5)
    queries = [AttentionQuery(), AttentionQuery(layers=[5], heads=[3, 0]), AttentionQuery(view="head_mean")]
    pairs = zip(
        model.encode(TEXTS, attention=queries), expected.encode(TEXTS, attention=queries), strict=True
    )
    for found, other in pairs:
        assert found.last_hidden_state is not None
        assert other.last_hidden_state is not None
        np.testing.assert_allclose(found.last_hidden_state, other.last_hidden_state, rtol=0, atol=1e-5)
        for actual, reference in zip(found.attention, other.attention, strict=True):
            np.testing.assert_allclose(actual.weights, reference.weights, rtol=0, atol=1e-5)
            np.testing.assert_allclose(actual.weights.sum(axis=-1), 1, atol=1e-5)


def test_explanations_match_onnx_runtime(model: Local, expected: Local) -> None:
    for found, other in zip(model.explain(TEXTS), expected.explain(TEXTS), strict=True):
        assert found.scores[0].sum == pytest.approx(1, abs=1e-4)
        np.testing.assert_allclose(found.values, other.values, rtol=0, atol=1e-5)
        assert (found.engine, found.precision) == ("openvino", "fp32")


def test_small_encoder_of_another_family_matches_onnx_runtime(small_bundle: Callable[[str], Path]) -> None:
    bundle = small_bundle("byte-level")
    with (
        attnlens_server.local(bundle, threads=1, engine="openvino") as model,
        attnlens_server.local(bundle, threads=1) as other,
    ):
        np.testing.assert_allclose(model.embed(SMALL_TEXTS), other.embed(SMALL_TEXTS), rtol=0, atol=1e-5)


def test_results_are_not_overwritten_by_the_next_batch(model: Local) -> None:
    [first] = model.encode(TEXTS[:1], attention=AttentionQuery())
    assert first.last_hidden_state is not None
    kept = first.last_hidden_state.copy(), first.weights.copy()
    model.encode([TEXTS[2]] * 4, attention=AttentionQuery())
    model.encode(["y " * len(first.tokens)], attention=AttentionQuery())
    for array, copy in zip((first.last_hidden_state, first.weights), kept, strict=True):
        np.testing.assert_array_equal(array, copy)


@needs_bf16
def test_bf16_embeddings_are_close_and_attention_is_fp32(minilm_bundle: Path, expected: Local) -> None:
    with attnlens_server.local(minilm_bundle, threads=2, engine="openvino", precision="bf16") as model:
        found = model.embed_with_usage(TEXTS)
        [encoded] = model.encode(TEXTS[:1], attention=AttentionQuery())
        [other] = model.encode(TEXTS[:1])
    vectors = expected.embed(TEXTS)
    assert (found.vectors * vectors).sum(axis=1).min() >= 0.9995
    assert not np.array_equal(found.vectors, vectors)
    assert (found.engine, found.precision) == ("openvino", "bf16")
    assert (encoded.precision, other.precision) == ("fp32", "bf16")
    [alike] = expected.encode(TEXTS[:1], attention=AttentionQuery())
    np.testing.assert_allclose(encoded.weights, alike.weights, rtol=0, atol=1e-5)


@needs_bf16
def test_server_reports_its_engine(minilm_bundle: Path) -> None:
    options = ("--engine", "openvino", "--precision", "bf16", "--threads", "1")
    with ServerProcess(minilm_bundle, *options) as server, Client(server.address) as client:
        assert ", OpenVINO CPU, bf16, " in server.ready_line
        info = client.get_model()
        assert (info.engine, info.device, info.precision) == ("openvino", "CPU", "bf16")
        assert (info.execution_providers, info.engine_check) == ((), None)
        assert "onnxruntime" not in info.versions
        assert client.embed_with_usage(["x"]).precision == "bf16"
        assert "attnlens check" in server.log()


def test_onnx_runtime_is_not_loaded_with_openvino(minilm_bundle: Path) -> None:
    script = f"""
import sys
import attnlens_server
with attnlens_server.local({str(minilm_bundle)!r}, engine="openvino", threads=1) as model:
    model.embed(["x"])
assert "openvino" in sys.modules
assert "onnxruntime" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16"}, "precision is bf16, .*use --engine openvino, or --precision fp32"),
        ({"device": "GPU"}, "device is 'GPU', .* only --engine openvino supports it"),
        ({"engine": "openvino", "precision": "fp16"}, "precision is fp16, .*use bf16, int8 or fp32"),
        ({"engine": "openvino", "provider": "cuda"}, "provider is cuda, .*use --engine onnxruntime"),
        ({"engine": "openvino", "device_id": 1}, "device_id is 1, .*use --device"),
        ({"engine": "openvino", "device": "NPU"}, "device is 'NPU': use CPU, GPU, or GPU.1"),
        ({"engine": "tensorrt"}, "engine is 'tensorrt': use one of onnxruntime, openvino"),
    ],
)
def test_unsupported_engine_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(bundle=Path(), **options)


def test_missing_openvino_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(StartupError, match=r"pip install 'attnlens\[openvino\]'"):
        OpenvinoRuntime("CPU", "fp32")


def test_unavailable_device_is_rejected() -> None:
    with pytest.raises(StartupError, match=r"device GPU\.7 was requested, but OpenVINO .* finds only CPU"):
        OpenvinoRuntime("GPU.7", "fp32")


def test_bf16_is_rejected_without_processor_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_runtime, "multiplies_bf16", lambda: False)
    with pytest.raises(StartupError, match=r"does not support it; .*avx512_bf16 or amx_bf16"):
        OpenvinoRuntime("CPU", "bf16")
    assert OpenvinoRuntime("CPU", "fp32").is_on_cpu


def test_graph_compiled_to_another_precision_is_rejected(minilm_bundle: Path) -> None:
    class Compiled:
        def get_property(self, _name: str) -> Any:
            return type("Type", (), {"get_type_name": lambda _: "f16"})()

    def compile_model(_device: str, _properties: dict[str, str]) -> Any:
        return Compiled()

    properties = {"INFERENCE_PRECISION_HINT": "bf16"}
    with pytest.raises(StartupError, match=r"computes model\.onnx in f16 on CPU, but bf16 was requested"):
        OpenvinoSession(compile_model, minilm_bundle / "onnx" / "model.onnx", "CPU", properties)


def test_compilation_is_abandoned_after_the_timeout() -> None:
    forever = threading.Event()

    def compile_model(_device: str, _properties: dict[str, str]) -> Any:
        forever.wait(60)

    with TimeLimit(0.05) as limit, pytest.raises(StartupError, match="did not compile the graph in time"):
        OpenvinoSession(compile_model, Path("model.onnx"), "CPU", {}, limit)
    forever.set()


def test_invalid_graph_file_is_rejected_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a graph")
    with pytest.raises(StartupError, match=r"OpenVINO cannot open .*model\.onnx on CPU"):
        OpenvinoRuntime("CPU", "fp32").open("embeddings", path, Division(1, 1))


# --- recorded checks ------------------------------------------------------------------------------


def checked(bundle: Path, **values: Any) -> None:
    """Write an `attnlens check --engine openvino` result into the manifest."""
    check = {"engine": "openvino", "precision": "PRECISION_FP32", "device": "CPU", "version": "2026.0"}
    with manifest_of(bundle) as manifest:
        manifest["engineChecks"] = [check | {"precision": "PRECISION_BF16"}, check | values]


@pytest.fixture
def small(small_bundle: Callable[[str], Path], tmp_path: Path) -> Path:
    return copy_of(small_bundle("wordpiece"), tmp_path)


def test_engine_that_failed_its_check_is_rejected(small: Path) -> None:
    checked(small, passed=False)
    with pytest.raises(
        StartupError, match=r"openvino in fp32 on CPU failed its check.*attnlens check .*openvino"
    ):
        attnlens_server.local(small, engine="openvino", threads=1)
    with attnlens_server.local(small, threads=1) as model:
        assert model.get_model().engine_check is None


def test_passed_check_is_logged_with_later_changes(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    checked(small, passed=True, numCases=12)
    with (
        caplog.at_level(logging.INFO),
        attnlens_server.local(small, engine="openvino", threads=1) as model,
    ):
        check = model.get_model().engine_check
    assert check is not None
    assert (check.passed, check.num_cases, check.precision) == (True, 12, "fp32")
    assert "was checked with version 2026.0" in caplog.text


def test_unchecked_engine_logs_a_warning(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    with attnlens_server.local(small, engine="openvino", threads=1) as model:
        assert model.get_model().engine_check is None
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "was not compared with PyTorch" in warning.getMessage()


SIGNAL_AFTER_CLOSE = """
import gc, os, signal, sys, threading
import attnlens_server

models = [attnlens_server.local(sys.argv[1], engine="openvino")]

def close():
    models.pop().close()
    gc.collect()

closer = threading.Thread(target=close)
closer.start()
closer.join()
signal.signal(signal.SIGHUP, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGHUP)
"""


def test_signal_is_handled_after_another_thread_closes_the_model(minilm_bundle: Path) -> None:
    command = [sys.executable, "-c", SIGNAL_AFTER_CLOSE, str(minilm_bundle)]
    result = subprocess.run(command, capture_output=True, check=False, text=True)
    assert (result.returncode, result.stdout) == (0, "handled\n"), result.stderr
