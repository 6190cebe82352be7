"""The engine with real graphs: results and failures of one text do not affect others."""

import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnlens_server.bundle import Layout, open_bundle
from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.engine import Engine, HeadSelection, Item, ItemResult, RequestedOutput
from attnlens_server.errors import GraphUnavailableError

HIDDEN = (RequestedOutput("last_hidden_state"),)


def weights(*layers: int) -> tuple[RequestedOutput, ...]:
    return tuple(RequestedOutput(f"attentions.{layer}", Layout.DENSE, HeadSelection()) for layer in layers)


@pytest.fixture(scope="module")
def engine(minilm_bundle: Path) -> Iterator[Engine]:
    engine = Engine(open_bundle(minilm_bundle), ServerConfig(bundle=minilm_bundle))
    engine.start(max_tokens=256)
    yield engine
    engine.close()


def submit(engine: Engine, items: list[Item], *, attention: bool = False) -> list[Future[ItemResult]]:
    return engine.submit(items, kind="attention" if attention else "embeddings")


def ids(length: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(1000, 30000, length, dtype=np.int64)


@given(st.lists(st.integers(1, 64), min_size=2, max_size=24))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_vectors_are_the_same_alone_and_in_a_batch(engine: Engine, lengths: list[int]) -> None:
    texts = [ids(length, seed) for seed, length in enumerate(lengths)]
    batched = submit(engine, [Item(text, HIDDEN) for text in texts])
    for text, future in zip(texts, batched, strict=True):
        [alone] = submit(engine, [Item(text, HIDDEN)])
        together = future.result(60).arrays[0]
        assert together.shape == (len(text), 384)
        np.testing.assert_allclose(together, alone.result(60).arrays[0], atol=1e-5)


def test_attention_contains_only_the_requested_outputs(engine: Engine) -> None:
    futures = submit(engine, [Item(ids(20), weights(2, 5)), Item(ids(20), HIDDEN)], attention=True)
    first, second = (future.result(60).arrays for future in futures)
    assert [array.shape for array in first] == [(12, 20, 20)] * 2
    assert [array.shape for array in second] == [(20, 384)]


def test_result_does_not_keep_the_attention_of_other_texts_alive(engine: Engine) -> None:
    items = [Item(ids(20, seed), weights(0)) for seed in range(8)]
    for future in submit(engine, items, attention=True):
        [array] = future.result(60).arrays
        assert array.base is None or array.base.nbytes == array.nbytes


def test_attention_does_not_delay_embeddings(engine: Engine) -> None:
    heavy = submit(engine, [Item(ids(256, seed), weights(*range(6))) for seed in range(24)], attention=True)
    [light] = submit(engine, [Item(ids(8), HIDDEN)])
    light.result(60)
    assert not heavy[-1].done()
    for future in heavy:
        future.result(120)


def test_failing_text_does_not_affect_its_batch(engine: Engine) -> None:
    bad = ids(16)
    bad[3] = 10**6  # validation would reject this ID; here it reaches the graph
    items = [Item(ids(16, 1), HIDDEN), Item(bad, HIDDEN), Item(ids(16, 2), HIDDEN)]
    first, spoiled, last = submit(engine, items)
    assert first.result(60).arrays[0].shape == (16, 384)
    assert last.result(60).arrays[0].shape == (16, 384)
    with pytest.raises(Exception, match="Gather"):
        spoiled.result(60)


def test_cancelled_texts_never_reach_the_session(engine: Engine) -> None:
    blocker = submit(engine, [Item(ids(256, seed), HIDDEN) for seed in range(8)])
    before = engine.lanes["embeddings"].num_live_tokens
    items = [Item(ids(100), HIDDEN) for _ in range(10)]
    futures = submit(engine, items)
    cancelled = sum(future.cancel() for future in futures)
    for future in blocker:
        future.result(60)
    [last] = submit(engine, [Item(ids(4), HIDDEN)])
    last.result(60)
    assert cancelled == 10
    assert engine.lanes["embeddings"].num_live_tokens - before <= 8 * 256 + 4


def test_queued_texts_finish_before_the_engine_closes(minilm_bundle: Path) -> None:
    engine = Engine(open_bundle(minilm_bundle), ServerConfig(bundle=minilm_bundle))
    engine.start(max_tokens=16)
    futures = submit(engine, [Item(ids(64, seed), HIDDEN) for seed in range(20)])
    engine.close()
    assert all(future.done() and future.exception() is None for future in futures)


def test_attention_session_opens_on_the_first_attention_request(minilm_bundle: Path) -> None:
    bundle = open_bundle(minilm_bundle)
    engine = Engine(bundle, ServerConfig(bundle=minilm_bundle))
    engine.start(max_tokens=16)
    assert engine.execution_providers == ("CPUExecutionProvider",)
    assert not engine.lanes["attention"].sessions.providers
    [future] = submit(engine, [Item(ids(4), weights(0))], attention=True)
    future.result(60)
    assert engine.lanes["attention"].sessions.providers == ("CPUExecutionProvider",)
    engine.close()


def test_attention_graph_changed_since_startup_is_never_used(minilm_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(minilm_bundle, tmp_path / "bundle"))
    engine = Engine(open_bundle(copy), ServerConfig(bundle=copy))
    engine.start(max_tokens=16)
    shutil.copy(copy / "onnx" / "model.onnx", copy / "onnx" / "model_attentions.onnx")
    for _ in range(2):
        [future] = submit(engine, [Item(ids(4), weights(0))], attention=True)
        with pytest.raises(GraphUnavailableError, match=r"model_attentions\.onnx was altered"):
            future.result(60)
        assert not engine.can_run_attention
    [future] = submit(engine, [Item(ids(4), HIDDEN)])
    assert future.result(60).arrays[0].shape == (4, 384)
    engine.close()


def test_more_lanes_than_threads_are_rejected_with_both_numbers(minilm_bundle: Path) -> None:
    config = ServerConfig(bundle=minilm_bundle, provider="cpu", threads=2, lanes=300)
    with pytest.raises(ConfigError, match=r"lanes is 300, but threads is 2"):
        Engine(open_bundle(minilm_bundle), config)


def test_more_threads_than_cpus_log_a_warning(minilm_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    Engine(
        open_bundle(minilm_bundle), ServerConfig(bundle=minilm_bundle, provider="cpu", threads=1000, lanes=1)
    )
    [record] = caplog.records
    assert record.getMessage().startswith("1000 threads on ")
    Engine(open_bundle(minilm_bundle), ServerConfig(bundle=minilm_bundle, provider="cpu", threads=1))
    assert len(caplog.records) == 1


def test_each_batch_is_logged_at_debug(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "attnlens_server.engine"):
        [future] = submit(engine, [Item(ids(7), weights(0))], attention=True)
        future.result(60)
    [record] = [record for record in caplog.records if record.getMessage() == "batch"]
    fields = vars(record)
    assert (fields["texts"], fields["tokens"], fields["padding"]) == (1, 7, 0)
    assert fields["lane"].startswith("attention-")
    assert fields["compute_ms"] > 0
