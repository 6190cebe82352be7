"""A server and an engine on CUDA: results like on the CPU, lack of memory, refused starts."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import attnlens_server
from attnlens.reductions import AttentionReduction, Statistics, TopK
from attnlens_client import AttentionQuery, Client, OverloadedError
from attnlens_server.bundle import Layout, open_bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine, HeadSelection, Item, RequestedOutput
from attnlens_server.engine.batch import pad
from attnlens_server.engine.runtimes import onnx_session
from attnlens_server.engine.runtimes.device import AttentionCutter, DeviceSession
from attnlens_server.errors import StartupError
from gpu import needs_gpu
from references import TEXTS
from served import ServerProcess

pytestmark = needs_gpu

QUERIES = {
    "all heads": AttentionQuery(),
    "three heads": AttentionQuery(layers=[5, 0], heads=[11, 0, 5]),
    "mean of heads": AttentionQuery(view="head_mean"),
    "mean of layers": AttentionQuery(reduction=AttentionReduction(layers="mean")),
    "rollout": AttentionQuery(view="head_mean", reduction=AttentionReduction(layers="rollout")),
    "words": AttentionQuery(reduction=AttentionReduction(level="words")),
    "received": AttentionQuery(reduction=AttentionReduction(form=Statistics(received=True))),
}


@pytest.fixture(scope="module")
def on_cuda(minilm_bundle: Path) -> Iterator[tuple[ServerProcess, Client]]:
    with (
        ServerProcess(minilm_bundle, "--provider", "cuda") as server,
        Client(server.address) as client,
    ):
        yield server, client


@pytest.fixture(scope="module")
def on_cpu(minilm_bundle: Path) -> Iterator[Client]:
    with (
        ServerProcess(minilm_bundle, "--provider", "cpu") as server,
        Client(server.address) as client,
    ):
        yield client


def test_ready_line_names_the_provider(on_cuda: tuple[ServerProcess, Client]) -> None:
    server, client = on_cuda
    print(server.ready_line)
    assert "CUDAExecutionProvider, fp32" in server.ready_line
    assert client.get_model().execution_providers[0] == "CUDAExecutionProvider"


def test_embeddings_match_the_cpu(on_cuda: tuple[ServerProcess, Client], on_cpu: Client) -> None:
    texts = [*TEXTS, *(f"{text} {index}" for index in range(100) for text in TEXTS)]
    found, expected = (client.embed(texts, truncate=True) for client in (on_cuda[1], on_cpu))
    print(f"embeddings: {np.abs(found - expected).max():.2e}")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    for index in (0, 3, 5):
        [alone] = on_cuda[1].embed([texts[index]], truncate=True)
        np.testing.assert_allclose(alone, found[index], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", QUERIES)
def test_attention_matches_the_cpu(on_cuda: tuple[ServerProcess, Client], on_cpu: Client, name: str) -> None:
    for texts in (TEXTS, TEXTS[:1]):
        results = [
            list(client.encode_stream(texts, attention=QUERIES[name], truncate=True))
            for client in (on_cuda[1], on_cpu)
        ]
        for found, expected in zip(*results, strict=True):
            assert found.last_hidden_state is not None
            assert expected.last_hidden_state is not None
            np.testing.assert_allclose(found.last_hidden_state, expected.last_hidden_state, atol=1.2e-5)
            np.testing.assert_equal(found.tokens, expected.tokens)
            if name != "received":
                np.testing.assert_allclose(found.weights, expected.weights, rtol=0, atol=2e-5)
                continue
            pairs = zip(
                _arrays(found.attention[0].reduced), _arrays(expected.attention[0].reduced), strict=True
            )
            for array, reference in pairs:
                np.testing.assert_allclose(array, reference, rtol=1e-4, atol=2e-5)


def _arrays(reduced: Any) -> list[Any]:
    values = [getattr(reduced, name) for name in reduced.__slots__]
    return [value for value in values if isinstance(value, np.ndarray)]


def test_largest_weights_match_the_cpu(on_cuda: tuple[ServerProcess, Client], on_cpu: Client) -> None:
    query = AttentionQuery(reduction=AttentionReduction(form=TopK(8)))
    [found], [expected] = (client.encode(TEXTS[:1], attention=query) for client in (on_cuda[1], on_cpu))
    ours, theirs = found.attention[0].top_k, expected.attention[0].top_k
    np.testing.assert_allclose(ours.remaining_mass, theirs.remaining_mass, rtol=0, atol=1e-5)


def test_explanations_match_the_cpu(on_cuda: tuple[ServerProcess, Client], on_cpu: Client) -> None:
    texts = [text for text in TEXTS if text][:2]
    for to in (None, "It was warm."):
        for found, expected in zip(
            *(client.explain(texts, to=to) for client in (on_cuda[1], on_cpu)), strict=True
        ):
            np.testing.assert_allclose(found.values, expected.values, rtol=0, atol=1e-5)


def test_auto_selects_cuda(minilm_bundle: Path) -> None:
    with ServerProcess(minilm_bundle) as server:
        assert "CUDAExecutionProvider" in server.ready_line


def test_fp16_server_is_close(minilm_bundle: Path, on_cpu: Client) -> None:
    if not (minilm_bundle / "onnx" / "model_fp16.onnx").exists():
        pytest.skip("MINILM_BUNDLE has no fp16 graph")
    with (
        ServerProcess(minilm_bundle, "--provider", "cuda", "--precision", "fp16") as server,
        Client(server.address) as client,
    ):
        assert "CUDAExecutionProvider, fp16" in server.ready_line
        found, expected = (each.embed(TEXTS * 20, truncate=True) for each in (client, on_cpu))
        cosines = (found * expected).sum(-1) / np.linalg.norm(found, axis=-1)
        print(f"fp16 server: minimum cosine {cosines.min():.7f}")
        assert cosines.min() > 0.9999
        assert "fp16 on a CPU" not in server.log()


def test_hidden_gpu_stops_the_start_or_falls_back(minilm_bundle: Path) -> None:
    command = [sys.executable, "-m", "attnlens_cli.main", "serve", str(minilm_bundle), "--port", "0"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [*command, "--provider", "cuda"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    print(run.stderr)
    assert run.returncode == 1
    assert "CUDA" in run.stderr
    assert "Traceback" not in run.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with ServerProcess(minilm_bundle) as server:
            assert "CPUExecutionProvider" in server.ready_line
            assert "falls back to the CPU" in server.log()


def test_missing_device_stops_the_start(minilm_bundle: Path) -> None:
    engine = Engine(
        open_bundle(minilm_bundle), ServerConfig(bundle=minilm_bundle, provider="cuda", device_id=99)
    )
    with pytest.raises(StartupError) as caught:
        engine.start(16)
    print(caught.value)
    engine.close()


def test_graph_with_arithmetic_on_the_cpu_is_refused(tmp_path: Path) -> None:
    """CUDA has no MatMul for int32, so ONNX Runtime assigns it to the CPU."""
    info = [helper.make_tensor_value_info(name, onnx.TensorProto.INT32, [2, 2]) for name in "abc"]
    floats = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 2]) for name in "xy"]
    nodes = [helper.make_node("MatMul", ["a", "b"], ["c"]), helper.make_node("MatMul", ["x", "x"], ["y"])]
    graph = helper.make_graph(nodes, "g", [info[0], info[1], floats[0]], [info[2], floats[1]])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    session = onnx_session.open_graph(path, "cuda", 1, 0)
    with pytest.raises(StartupError, match=r"CPUExecutionProvider runs 1 MatMul of model\.onnx"):
        onnx_session.check_placement(onnx_session.count_placements(session), path)


def layers(selection: HeadSelection) -> tuple[RequestedOutput, ...]:
    return tuple(RequestedOutput(f"attentions.{layer}", Layout.DENSE, selection) for layer in range(6))


@pytest.mark.parametrize("copied_bytes", [0, 1 << 40], ids=["selected", "copied"])
def test_selected_weights_match_copied_weights(minilm_bundle: Path, copied_bytes: int) -> None:
    path = open_bundle(minilm_bundle).graph_path("attention")
    session = DeviceSession(path, "cuda", threads=1, device_id=0)
    reference = onnx_session.OnnxSession(path, "cpu", threads=2, device_id=0)
    session.copied_bytes = copied_bytes
    random = np.random.default_rng(1)
    items = [Item(random.integers(1000, 30000, length), ()) for length in (200, 60, 1)]
    inputs = pad(items, 200, 0)
    names = [f"attentions.{layer}" for layer in range(6)]
    found, expected = session.run(inputs, names), reference.run(inputs, names)
    for selection in (HeadSelection(), HeadSelection((3, 1)), HeadSelection((3, 1), is_mean=True)):
        for row, item in enumerate(items):
            for requested in layers(selection):
                actual, array = (
                    outputs.part(row, item.num_tokens, requested) for outputs in (found, expected)
                )
                np.testing.assert_allclose(actual, array, rtol=0, atol=2e-5, strict=True)


def test_batch_beyond_the_memory_fails_and_the_engine_goes_on(
    minilm_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = onnx_session.CUDA_OPTIONS | {"gpu_mem_limit": str(400 << 20)}
    monkeypatch.setattr(onnx_session, "CUDA_OPTIONS", limited)
    config = ServerConfig(
        bundle=minilm_bundle, provider="cuda", max_batch_tokens=1 << 20, max_attention_bytes=1 << 40
    )
    engine = Engine(open_bundle(minilm_bundle), config)
    engine.start(128)
    small = Item(np.arange(1000, 1020), (RequestedOutput("last_hidden_state"),))
    [before] = engine.submit([small], kind="embeddings")
    vector = before.result(60).arrays[0]
    # As a batch, 400 x 512 tokens do not fit; one text at a time, they do.
    many = [Item(np.full(512, 1000 + index), small.requested) for index in range(400)]
    assert all(len(future.result(100).arrays[0]) == 512 for future in engine.submit(many, kind="embeddings"))
    [after] = engine.submit([Item(small.input_ids, small.requested)], kind="embeddings")
    np.testing.assert_allclose(after.result(60).arrays[0], vector, rtol=0, atol=1e-6)
    engine.close()


def test_text_beyond_the_memory_is_a_transient_error_and_the_server_goes_on(minilm_bundle: Path) -> None:
    torch = pytest.importorskip("torch")
    with ServerProcess(minilm_bundle, "--provider", "cuda", "--max-tokens", "512") as server:
        with Client(server.address, max_attempts=1) as client:
            expected = client.embed(["a cat"])
            free, _ = torch.cuda.mem_get_info()
            ballast = [torch.empty(free - (32 << 20), dtype=torch.uint8, device="cuda")]
            long_text = "word " * 500
            query = AttentionQuery(view="head_mean")
            with pytest.raises(OverloadedError, match="too little free memory") as caught:
                client.encode([long_text] * 128, attention=query)
            print(caught.value)
            ballast.clear()
            torch.cuda.empty_cache()
            np.testing.assert_allclose(client.embed(["a cat"]), expected, rtol=0, atol=1e-6)
            [text] = client.encode([long_text], attention=query)
            assert text.weights.shape[-1] > 500
        assert "a lane died" not in server.log()


def test_selection_graphs_run_on_cuda() -> None:
    AttentionCutter("cuda", 0)


def test_local_model_uses_cuda(minilm_bundle: Path) -> None:
    with attnlens_server.local(minilm_bundle, provider="cuda") as model:
        assert model.embed(["a cat"]).shape == (1, 384)
