"""A long batch is stopped once nobody needs any of its results. Each engine runs MiniLM."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from attnlens_server.bundle import Kind, Layout, open_bundle
from attnlens_server.config import EngineName, ServerConfig
from attnlens_server.engine import Engine, HeadSelection, Item, RequestedOutput
from attnlens_server.engine import engine as engine_module
from attnlens_server.errors import DeadlineError

HIDDEN = (RequestedOutput("last_hidden_state"),)
WEIGHTS = (RequestedOutput("attentions.5", Layout.DENSE, HeadSelection()),)


@pytest.fixture(scope="module", params=["onnxruntime", "openvino"])
def engine(request: pytest.FixtureRequest, minilm_bundle: Path) -> Iterator[Engine]:
    name: EngineName = request.param
    if name == "openvino":
        pytest.importorskip("openvino")
    config = ServerConfig(bundle=minilm_bundle, engine=name, threads=1, lanes=1, max_batch_tokens=1 << 16)
    engine = Engine(open_bundle(minilm_bundle), config)
    engine.start(max_tokens=32)
    yield engine
    engine.close()


@pytest.fixture
def _stopping_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LONG_BATCH_S", 0.0)
    for lanes in engine.lanes.values():
        monkeypatch.setattr(lanes.sessions, "opening_s", 0.0)


def items(
    count: int, outputs: tuple[RequestedOutput, ...] = HIDDEN, deadline: float | None = None
) -> list[Item]:
    return [Item(np.full(256, 2000 + index), outputs, deadline=deadline) for index in range(count)]


def wait_until_running(engine: Engine, kind: Kind = "embeddings") -> None:
    while not engine.lanes[kind].longest_batch_s:
        time.sleep(0.001)


@pytest.mark.usefixtures("_stopping_at_once")
@pytest.mark.parametrize("kind", ["embeddings", "attention"])
def test_abandoned_batch_stops_and_its_lane_runs_the_next_one(
    engine: Engine, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    lanes = engine.lanes[kind]
    outputs = HIDDEN if kind == "embeddings" else WEIGHTS
    engine.submit([first := Item(np.arange(8), outputs)], kind=kind)
    first.future.result(60)  # the session is open
    before = lanes.num_stopped, lanes.num_batches
    long = items(48 if kind == "embeddings" else 12, outputs)  # one batch
    engine.submit(long, kind=kind)
    wait_until_running(engine, kind)
    for item in long:
        item.abandon()
    engine.submit([last := Item(np.arange(8), outputs)], kind=kind)
    np.testing.assert_array_equal(last.future.result(60).arrays[0], first.future.result().arrays[0])
    assert (lanes.num_stopped, lanes.num_batches) == (before[0] + 1, before[1] + 1)
    assert all(isinstance(item.future.exception(), DeadlineError) for item in long)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("_stopping_at_once")
def test_batch_past_all_deadlines_stops(engine: Engine) -> None:
    num_stopped = engine.lanes["embeddings"].num_stopped
    long = items(96, deadline=time.monotonic() + 0.3)
    engine.submit(long, kind="embeddings")
    assert isinstance(long[0].future.exception(timeout=60), DeadlineError)
    assert engine.lanes["embeddings"].num_stopped == num_stopped + 1


@pytest.mark.usefixtures("_stopping_at_once")
def test_batch_with_one_item_in_use_runs_to_its_end(engine: Engine) -> None:
    num_stopped = engine.lanes["embeddings"].num_stopped
    long = items(16)
    engine.submit(long, kind="embeddings")
    wait_until_running(engine)
    for item in long[1:]:
        item.abandon()
    assert long[0].future.result(60).arrays[0].shape == (256, 384)
    assert engine.lanes["embeddings"].num_stopped == num_stopped


def test_short_batch_runs_to_its_end_although_it_is_abandoned(engine: Engine) -> None:
    num_stopped = engine.lanes["embeddings"].num_stopped
    engine.submit([item := Item(np.arange(64), HIDDEN)], kind="embeddings")
    wait_until_running(engine)
    item.abandon()
    assert item.future.result(60)
    assert engine.lanes["embeddings"].num_stopped == num_stopped
