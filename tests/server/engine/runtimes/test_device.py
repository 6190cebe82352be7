"""Attention weights stay on the device until heads are selected. Without a GPU, the tests use the CPU."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnlens_server.bundle import Layout, open_bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine, HeadSelection, Item, RequestedOutput
from attnlens_server.engine.batch import BatchOutputs, HostOutputs, pad
from attnlens_server.engine.runtimes import device, onnx_runtime, onnx_session
from attnlens_server.engine.runtimes.device import DeviceSession
from attnlens_server.engine.runtimes.onnx_session import CPU, CUDA, OnnxSession
from attnlens_server.engine.scheduler import BatchLimits, LengthBuckets, Scheduler
from attnlens_server.errors import UnusableGraphError
from gpu import needs_gpu

NAMES = ("last_hidden_state", *(f"attentions.{layer}" for layer in range(6)))
LAST = RequestedOutput("attentions.5", Layout.DENSE)
SELECTIONS = [
    HeadSelection(),
    HeadSelection(tuple(range(12))),
    HeadSelection((7,)),
    HeadSelection((11, 0, 5)),
    HeadSelection(is_mean=True),
    HeadSelection((7,), is_mean=True),
    HeadSelection((11, 0, 5), is_mean=True),
]
PROVIDERS = [
    "cpu",
    pytest.param(
        "cuda",
        marks=needs_gpu,
    ),
]


def make_graph(name: str, *, is_mean: bool) -> onnx.ModelProto:
    """Build the graph that `select_heads.onnx` or `mean_of_heads.onnx` was saved from."""
    nodes = [
        helper.make_node("Slice", ["attentions", "starts", "ends", "axes"], ["cut"]),
        helper.make_node("Gather", ["cut", "heads"], ["chosen" if is_mean else "weights"], axis=1),
    ]
    if is_mean:
        nodes.append(helper.make_node("ReduceMean", ["chosen"], ["weights"], axes=[1], keepdims=1))
    graph = helper.make_graph(
        nodes,
        name,
        [
            helper.make_tensor_value_info("attentions", TensorProto.FLOAT, ["B", "H", "S", "S"]),
            helper.make_tensor_value_info("starts", TensorProto.INT64, [3]),
            helper.make_tensor_value_info("ends", TensorProto.INT64, [3]),
            helper.make_tensor_value_info("heads", TensorProto.INT64, ["K"]),
        ],
        [helper.make_tensor_value_info("weights", TensorProto.FLOAT, [1, 1 if is_mean else "K", "T", "T"])],
        [numpy_helper.from_array(np.array([0, 2, 3]), "axes")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("path", "is_mean"), [(device._SELECT_GRAPH, False), (device._MEAN_GRAPH, True)], ids=["select", "mean"]
)
def test_packaged_graphs_match_their_source(path: Path, is_mean: bool) -> None:
    assert onnx.load(path) == make_graph(path.stem, is_mean=is_mean)


def everything(selection: HeadSelection | None = None) -> tuple[RequestedOutput, ...]:
    layers = (RequestedOutput(name, Layout.DENSE, selection or HeadSelection()) for name in NAMES[1:])
    return (RequestedOutput(NAMES[0]), *layers)


def texts(*lengths: int) -> list[Item]:
    random = np.random.default_rng(1)
    return [Item(random.integers(1000, 30000, length), everything()) for length in lengths]


def parts(outputs: BatchOutputs, row: int, item: Item) -> list[npt.NDArray[np.float32]]:
    return [outputs.part(row, item.num_tokens, requested) for requested in item.requested]


@pytest.fixture(scope="module")
def graph(minilm_bundle: Path) -> Path:
    return open_bundle(minilm_bundle).graph_path("attention")


@pytest.fixture(scope="module")
def on_host(graph: Path) -> OnnxSession:
    return OnnxSession(graph, "cpu", threads=1, device_id=0)


@pytest.fixture(scope="module", params=PROVIDERS)
def on_device(graph: Path, request: pytest.FixtureRequest) -> DeviceSession:
    session = DeviceSession(graph, request.param, threads=1, device_id=0)
    session.copied_bytes = 0  # otherwise, the weights of short texts are copied as a whole
    return session


def run(session: OnnxSession, batch: list[Item], buckets: LengthBuckets | None = None) -> Any:
    length = Scheduler(BatchLimits(512), buckets).padded_length(max(item.num_tokens for item in batch))
    return session.run(pad(batch, length, 0), NAMES)


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_selection_on_the_device_matches_selection_on_the_host(
    on_host: OnnxSession, on_device: DeviceSession, selection: HeadSelection
) -> None:
    batch = texts(9, 1, 21, 20)
    expected, found = run(on_host, batch), run(on_device, batch)
    on_cpu = on_device.providers[0] == CPU
    assert found.attentions["attentions.0"].device_name() == ("cpu" if on_cpu else "cuda")
    for row, item in enumerate(batch):
        item.requested = everything(selection)
        for actual, array in zip(parts(found, row, item), parts(expected, row, item), strict=True):
            tolerance = 1e-5 if not on_cpu else 1e-7 if selection.is_mean else 0
            np.testing.assert_allclose(actual, array, rtol=0, atol=tolerance, strict=True)


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
@pytest.mark.parametrize("lengths", [(16,), (16, 5, 1)], ids=str)
def test_selection_on_the_host_matches_numpy(selection: HeadSelection, lengths: tuple[int, ...]) -> None:
    shape = (len(lengths), 12, max(lengths), max(lengths))
    weights = np.random.default_rng(2).random(shape, dtype=np.float32)
    for row, length in enumerate(lengths):
        requested = RequestedOutput("attentions.0", Layout.DENSE, selection)
        found = HostOutputs({"attentions.0": weights}).part(row, length, requested)
        expected = weights[row, :, :length, :length].copy()
        expected = expected[list(selection.heads)] if selection.heads else expected
        expected = expected.mean(axis=0, keepdims=True) if selection.is_mean else expected
        np.testing.assert_array_equal(found, expected, strict=True)
        is_view = len(lengths) == 1 and selection in SELECTIONS[:2]
        assert np.shares_memory(found, weights) == is_view


def test_small_weights_are_copied_as_a_whole(graph: Path) -> None:
    session = DeviceSession(graph, "cpu", threads=1, device_id=0)
    session.copied_bytes = 4 * 12 * 21 * 21
    copied, kept = run(session, texts(9, 21)), run(session, texts(9, 22))
    assert (len(copied.attentions), len(kept.attentions)) == (0, 6)
    for outputs, batch in ((copied, texts(9, 21)), (kept, texts(9, 22))):
        assert [part.shape for part in parts(outputs, 0, batch[0])] == [(9, 384), *[(12, 9, 9)] * 6]


def test_threads_sharing_a_session_have_separate_bindings(on_device: DeviceSession) -> None:
    batches = [texts(*range(length, length + 3)) for length in range(1, 9)]
    expected = [run(on_device, batch).part(1, batch[1].num_tokens, LAST) for batch in batches]
    found: dict[int, npt.NDArray[np.float32]] = {}

    def lane(index: int) -> None:
        for _ in range(5):
            batch = batches[index]
            found[index] = run(on_device, batch).part(1, batch[1].num_tokens, LAST)

    lanes = [threading.Thread(target=lane, args=(index,)) for index in range(len(batches))]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    for index, weights in enumerate(expected):
        np.testing.assert_array_equal(found[index], weights)


def test_graph_files_are_checked_after_each_batch(
    on_device: DeviceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def altered() -> None:
        raise UnusableGraphError("model.onnx was altered")

    monkeypatch.setattr(on_device, "check_results", altered)
    with pytest.raises(UnusableGraphError, match="was altered"):
        run(on_device, texts(3))


def test_bucket_padding_does_not_change_real_tokens(on_host: OnnxSession) -> None:
    batch, buckets = texts(9, 1, 21, 20), LengthBuckets(8, 512)
    plain, padded = run(on_host, batch), run(on_host, batch, buckets)
    assert padded.arrays["attentions.0"].shape == (4, 12, 24, 24)
    for row, item in enumerate(batch):
        for found, array in zip(parts(padded, row, item), parts(plain, row, item), strict=True):
            np.testing.assert_allclose(found, array, rtol=0, atol=1e-6, strict=True)


def test_batch_size_accounts_for_bucket_padding() -> None:
    scheduler = Scheduler(BatchLimits(64), LengthBuckets(8, 512))
    assert scheduler.choose([*[1] * 10, 8, 9], 1) == list(range(8))


@pytest.fixture
def device_engine(minilm_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that uses the CUDA code path on the CPU."""
    monkeypatch.setitem(onnx_runtime.SESSIONS["attention"], "cpu", DeviceSession)
    monkeypatch.setitem(onnx_runtime.LENGTH_MULTIPLES, "cpu", 8)
    config = ServerConfig(bundle=minilm_bundle, provider="cpu", threads=2, lanes=2)
    running = Engine(open_bundle(minilm_bundle), config)
    running.start(max_tokens=16)
    yield running
    running.close()


def test_engine_returns_the_same_results_on_device_and_host(
    device_engine: Engine, on_host: OnnxSession
) -> None:
    items = texts(*range(1, 36, 2)) + texts(*range(1, 36, 2))
    for index, item in enumerate(items):
        item.requested = everything(SELECTIONS[index % len(SELECTIONS)])
    device_engine.submit(items, kind="attention")
    for item in items:
        expected = parts(run(on_host, [item]), 0, item)
        for actual, array in zip(item.future.result(60).arrays, expected, strict=True):
            np.testing.assert_allclose(actual, array, rtol=0, atol=1e-5, strict=True)
    lanes = device_engine.lanes
    assert type(lanes["attention"].sessions.get(has_whole_machine=False)) is DeviceSession
    assert type(lanes["embeddings"].sessions.get(has_whole_machine=False)) is OnnxSession
    assert lanes["attention"].num_computed_tokens % 8 == 0


def test_cuda_options_disable_tf32_and_allocate_memory_as_needed(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None)
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, providers, **__: opened.extend(providers))
    onnx_session.open_graph(graph, "cuda", threads=1, device_id=3)
    assert opened == [
        (CUDA, {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested", "device_id": "3"}),
        CPU,
    ]
