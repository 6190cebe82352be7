"""Graphs that do not match their manifest are rejected before they serve a request."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper

from attnlens.bundle import describe_file
from attnlens.v1.manifest_pb2 import BundleFile
from attnlens_server.bundle import Layout, open_bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine, Item, RequestedOutput
from attnlens_server.engine.batch import Inputs
from attnlens_server.engine.runtimes.onnx_runtime import SESSIONS
from attnlens_server.engine.runtimes.onnx_session import CPU, CUDA, OnnxSession
from attnlens_server.engine.runtimes.runtime import TimeLimit
from attnlens_server.errors import GraphUnavailableError, StartupError, UnusableGraphError
from tampered import (
    ATTENTIONS,
    EMBEDDINGS,
    change_graph,
    constant,
    copy_of,
    endless_loop,
    manifest_of,
    through,
)

MAX_TOKENS = 34
HIDDEN, WEIGHTS = "last_hidden_state", "attentions.0"
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
FREE = ["batch_size", "sequence_length"]


@pytest.fixture
def bundle(small_bundle: Callable[[str], Path], tmp_path: Path) -> Path:
    return copy_of(small_bundle("wordpiece"), tmp_path)


def engine_of(bundle: Path, **options: Any) -> Engine:
    return Engine(open_bundle(bundle), ServerConfig(bundle=bundle, threads=2, lanes=2, **options))


def start(bundle: Path, **options: Any) -> None:
    engine = engine_of(bundle, **options)
    try:
        engine.start(MAX_TOKENS)
    finally:
        engine.close()


def ask_for_attention(engine: Engine) -> None:
    item = Item(np.arange(2, 12), (RequestedOutput(WEIGHTS, Layout.DENSE),))
    engine.submit([item], kind="attention")
    item.future.result(60)


def rename_output(graph: onnx.GraphProto) -> None:
    through(HIDDEN, helper.make_node("Identity", ["inner"], ["renamed"]))(graph)
    graph.output[0].name = "renamed"


def add_input(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("position_ids", INT64, FREE))


def fix_batch(graph: onnx.GraphProto) -> None:
    for each in graph.input:
        each.type.tensor_type.shape.dim[0].dim_value = 1


def into(*operands: str, op: str, output: str = HIDDEN, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(operands), [output], **attributes)


TWICE = into("inner", "inner", op="Concat", axis=2)
HOSTILE_EMBEDDINGS: dict[str, tuple[Callable[[onnx.GraphProto], None], str]] = {
    "wrong width": (
        through(HIDDEN, TWICE, elem_type=FLOAT, shape=[*FREE, 192]),
        r"returns last_hidden_state as tensor\(float\) .*192\], but the manifest specifies .*96\]",
    ),
    "wrong width, not declared": (
        through(HIDDEN, TWICE, elem_type=FLOAT, shape=[*FREE, "width"]),
        r"returns last_hidden_state as tensor\(float\) .*192\]",
    ),
    "more tokens": (
        through(HIDDEN, into("inner", "inner", op="Concat", axis=1), elem_type=FLOAT, shape=[*FREE, 96]),
        r"returned last_hidden_state as float32 \[2, 16, 96\] .*manifest specifies float32 \[2, 8, 96\]",
    ),
    "integers": (
        through(HIDDEN, into("inner", op="Cast", to=INT64), elem_type=INT64, shape=[*FREE, 96]),
        r"returns last_hidden_state as tensor\(int64\)",
    ),
    "NaN": (
        through(HIDDEN, constant("nan", float("nan")), into("inner", "nan", op="Add")),
        r"returned NaN or infinity in last_hidden_state",
    ),
    "wrong output name": (rename_output, r"has 1 outputs, the last \['renamed'\]"),
    "additional input": (add_input, r"has the inputs input_ids, .*position_ids"),
    "fixed batch size": (fix_batch, r"expects input_ids as tensor\(int64\) \[1, 'sequence_length'\]"),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE_EMBEDDINGS.values(), ids=HOSTILE_EMBEDDINGS)
def test_mismatched_embeddings_graph_aborts_startup(
    bundle: Path, change: Callable[[onnx.GraphProto], None], message: str
) -> None:
    change_graph(bundle, EMBEDDINGS, change)
    with pytest.raises(UnusableGraphError, match=message):
        start(bundle)


# Replace the weights w with similar values: w + 0.001, rescaled to sum 1; 2w - mean(w); the mean over heads.
SPREAD = [
    constant("little", 1e-3),
    helper.make_node("Add", ["inner", "little"], ["more"]),
    helper.make_node("Constant", [], ["last"], value_ints=[-1]),
    helper.make_node("ReduceSum", ["more", "last"], ["sums"], keepdims=1),
    into("more", "sums", op="Div", output=WEIGHTS),
]
CONTRASTED = [
    helper.make_node("ReduceMean", ["inner"], ["mean"], axes=[-1], keepdims=1),
    helper.make_node("Add", ["inner", "inner"], ["twice"]),
    into("twice", "mean", op="Sub", output=WEIGHTS),
]
ONE_HEAD = into("inner", op="ReduceMean", output=WEIGHTS, axes=[1], keepdims=1)
SOME_HEADS = {"elem_type": FLOAT, "shape": [FREE[0], "heads", FREE[1], FREE[1]]}
HOSTILE_ATTENTIONS: dict[str, tuple[Callable[[onnx.GraphProto], None], str]] = {
    "rows of 2": (
        through(WEIGHTS, into("inner", "inner", op="Add", output=WEIGHTS)),
        r"rows of attentions.0 whose sum differs from 1 by 1:",
    ),
    "below 0": (through(WEIGHTS, *CONTRASTED), r"returned weights of attentions.0 below 0"),
    "on padding": (through(WEIGHTS, *SPREAD), r"returned weights of attentions.0 on padding"),
    "fewer heads": (
        through(WEIGHTS, ONE_HEAD, **SOME_HEADS),
        r"returns attentions.0 as tensor\(float\) .* 1, .*but the manifest specifies .* 3, ",
    ),
    "NaN in the token vectors": (
        through(HIDDEN, constant("nan", float("nan")), into("inner", "nan", op="Add")),
        r"returned NaN or infinity in last_hidden_state",
    ),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE_ATTENTIONS.values(), ids=HOSTILE_ATTENTIONS)
def test_mismatched_attention_graph_serves_no_request(
    bundle: Path, change: Callable[[onnx.GraphProto], None], message: str
) -> None:
    change_graph(bundle, ATTENTIONS, change)
    engine = engine_of(bundle)
    engine.start(MAX_TOKENS)
    for _ in range(2):
        with pytest.raises(GraphUnavailableError, match=message):
            ask_for_attention(engine)
    engine.close()


def test_ids_beyond_the_embedding_table_abort_startup(bundle: Path) -> None:
    with manifest_of(bundle) as manifest:
        manifest["architecture"]["vocab_size"] = 301
    with pytest.raises(StartupError, match=r"model\.onnx cannot be run: .*Gather"):
        start(bundle)


def test_positions_beyond_the_position_table_abort_startup(bundle: Path) -> None:
    engine = engine_of(bundle)
    with pytest.raises(StartupError, match=r"model\.onnx cannot be run"):
        engine.start(MAX_TOKENS + 1)
    engine.close()


class WrongForFourTexts(OnnxSession):
    """Returns wrong vectors for batches of exactly 4 texts, as CUDA did for a BigBird encoder."""

    def run_all(self, inputs: Inputs, limit: TimeLimit) -> dict[str, npt.NDArray[np.generic]]:
        arrays = super().run_all(inputs, limit)
        if len(inputs.input_ids) == 4:
            arrays[HIDDEN] = np.flip(arrays[HIDDEN], axis=0)
        return arrays


@pytest.mark.parametrize("session", [OnnxSession, WrongForFourTexts])
def test_device_with_wrong_results_in_batches_aborts_startup(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, session: type[OnnxSession]
) -> None:
    monkeypatch.setitem(SESSIONS["embeddings"], "cpu", session)
    engine = engine_of(bundle, provider="cpu")
    monkeypatch.setattr(engine.runtime, "is_on_cpu", False)
    if session is OnnxSession:
        engine.start(MAX_TOKENS)
    else:
        with pytest.raises(UnusableGraphError, match=r"alone and in a batch of 4 texts.*--provider cpu"):
            engine.start(MAX_TOKENS)
    engine.close()


def test_graph_that_never_finishes_is_stopped_at_the_time_limit(bundle: Path) -> None:
    change_graph(bundle, EMBEDDINGS, through(HIDDEN, *endless_loop("inner", HIDDEN)))
    with pytest.raises(StartupError, match=r"took more than 0\.5 s: use a larger --start-timeout-s"):
        start(bundle, start_timeout_s=0.5)


def test_attention_graph_that_never_finishes_does_not_block_its_lane(bundle: Path) -> None:
    change_graph(bundle, ATTENTIONS, through(WEIGHTS, *endless_loop("inner", WEIGHTS)))
    engine = engine_of(bundle, start_timeout_s=0.5)
    engine.start(MAX_TOKENS)
    with pytest.raises(GraphUnavailableError, match=r"took more than 0\.5 s"):
        ask_for_attention(engine)
    engine.close()


def test_startup_that_never_finishes_can_be_stopped(bundle: Path) -> None:
    change_graph(bundle, EMBEDDINGS, through(HIDDEN, *endless_loop("inner", HIDDEN)))
    engine = engine_of(bundle)
    failures: list[StartupError] = []

    def start_engine() -> None:
        with pytest.raises(StartupError) as caught:
            engine.start(MAX_TOKENS)
        failures.append(caught.value)

    starting = threading.Thread(target=start_engine)
    starting.start()
    engine.stop_opening()  # at any time: before, during or after startup
    starting.join()
    engine.close()
    assert "the server is stopping" in str(failures[0])


def test_both_sessions_of_a_graph_are_checked_before_they_serve(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[int, tuple[int, ...]]] = []
    engine = engine_of(bundle)
    for opener in engine._openers.values():
        run = opener._trial.run

        def note(session: Any, num_tokens: tuple[int, ...], limit: Any, run: Any = run) -> None:
            tried.append((session._session.get_session_options().intra_op_num_threads, num_tokens))
            run(session, num_tokens, limit)

        monkeypatch.setattr(opener._trial, "run", note)
    engine.start(MAX_TOKENS)
    assert tried == [(2, (8, 5)), (2, (34,)), (2, (34,)), (1, (8, 5)), (1, (34,))]
    ask_for_attention(engine)
    assert tried[5:] == [(2, (8, 5))]
    engine.close()


def test_weights_modified_during_use_serve_no_further_requests(bundle: Path) -> None:
    engine = engine_of(bundle)
    engine.start(MAX_TOKENS)
    ask_for_attention(engine)
    weights = bundle / EMBEDDINGS
    before = weights.read_bytes()
    with weights.open("r+b") as file:
        file.write(before[:100])  # same bytes: only the modification time changes
    os.utime(weights, ns=(1, 1))  # allow for a coarse file-system clock
    for _ in range(2):
        with pytest.raises(GraphUnavailableError, match=r"model\.onnx was altered while in use"):
            ask_for_attention(engine)
    item = Item(np.arange(2, 12), (RequestedOutput(HIDDEN),))
    engine.submit([item], kind="embeddings")
    with pytest.raises(GraphUnavailableError, match=r"model\.onnx was altered while in use"):
        item.future.result(60)
    engine.close()


def test_replacing_the_bundle_does_not_affect_a_running_engine(
    bundle: Path, small_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = engine_of(bundle)
    engine.start(MAX_TOKENS)
    ask_for_attention(engine)
    new = copy_of(small_bundle("wordpiece"), tmp_path / "new")
    bundle.rename(tmp_path / "old")
    ask_for_attention(engine)
    new.rename(bundle)
    ask_for_attention(engine)
    engine.close()


def test_touched_file_is_verified_again_and_used(bundle: Path) -> None:
    engine = engine_of(bundle)
    engine.start(MAX_TOKENS)
    os.utime(bundle / EMBEDDINGS)
    os.utime(bundle / ATTENTIONS)
    ask_for_attention(engine)
    engine.close()


def test_only_touched_files_of_a_graph_are_verified_again(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_bundle(bundle)
    read: list[str] = []

    def note(directory: Path, path: Path) -> BundleFile:
        read.append(path.name)
        return describe_file(directory, path)

    monkeypatch.setattr("attnlens.bundle.describe_file", note)
    opened.verify_graph(opened.model.graphs["attention"])
    assert read == []
    os.utime(bundle / "tokenizer.json", ns=(1, 1))
    os.utime(bundle / EMBEDDINGS, ns=(1, 1))
    opened.verify_graph(opened.model.graphs["attention"])
    assert read == ["model.onnx"]
    (bundle / ATTENTIONS).unlink()
    with pytest.raises(UnusableGraphError, match=r"model_attentions\.onnx"):
        opened.verify_graph(opened.model.graphs["attention"])


def test_auto_falls_back_to_the_cpu_settings_when_cuda_fails(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoDriver(OnnxSession):
        def __init__(self, *_args: Any, **_options: Any) -> None:
            raise StartupError("CUDA was requested, but it runs no node")

    monkeypatch.setattr(
        "attnlens_server.engine.runtimes.onnx_runtime.ort.get_available_providers", lambda: [CUDA, CPU]
    )
    monkeypatch.setitem(SESSIONS["embeddings"], "cuda", NoDriver)
    engine = Engine(open_bundle(bundle), ServerConfig(bundle=bundle, threads=2))
    assert (engine.runtime.device, engine.max_batch_tokens, engine.lanes["embeddings"]._num_lanes) == (
        "CUDA",
        8192,
        1,
    )
    engine.start(MAX_TOKENS)
    assert (engine.runtime.device, engine.max_batch_tokens, engine.lanes["embeddings"]._num_lanes) == (
        "CPU",
        256,
        2,
    )
    assert engine.execution_providers[0] == CPU
    ask_for_attention(engine)
    engine.close()
    assert "provider auto falls back to the CPU: CUDA was requested" in caplog.text
    cuda_engine = Engine(open_bundle(bundle), ServerConfig(bundle=bundle, provider="cuda"))
    with pytest.raises(StartupError, match="it runs no node"):
        cuda_engine.start(MAX_TOKENS)
    cuda_engine.close()
