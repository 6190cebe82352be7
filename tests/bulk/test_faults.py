"""Runs whose servers fail, are away, or come back."""

import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import bulk_runs
from attnlens_bulk import BulkError, ResumeError, RunOptions, ServersUnavailableError, embed_files, estimate
from attnlens_bulk.run import Progress
from attnlens_client import (
    AttnlensError,
    Client,
    DeadlineExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitedError,
    ServerError,
    UnavailableError,
)
from attnlens_server.in_process import Local
from scripted import ScriptedServer

TEXTS = [f"text {number}" for number in range(120)]
OPTIONS = RunOptions(rows_per_part=40, batch_size=4, in_flight=4)
TRANSIENT = [
    UnavailableError("the server restarts"),
    OverloadedError("too many texts"),
    RateLimitedError("too many calls"),
    DeadlineExceededError("no time left"),
    AttnlensError("the proxy lost the server", grpc.StatusCode.CANCELLED),
    ServerError("RST_STREAM with error code 2", grpc.StatusCode.INTERNAL),
    AttnlensError("try again", retry_delay_s=0.01),
]
PERMANENT = [
    InvalidRequestError("the text is wrong"),
    ModelNotFoundError("there is no such model"),
    PermissionDeniedError("not permitted"),
    ServerError("internal error", grpc.StatusCode.INTERNAL),
    AttnlensError("the client was closed", grpc.StatusCode.CANCELLED),
]


class Flaky:
    """A model whose `embed_with_usage` raises the error that `failure` returns for the index of the call."""

    def __init__(self, model: Any, failure: Callable[[int], AttnlensError | None], address: str = "") -> None:
        self._model, self._failure, self._calls = model, failure, count()
        self.address = address or "first:50051"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def embed_with_usage(self, texts: Any, **options: Any) -> Any:
        index = next(self._calls)
        if (error := self._failure(index)) is not None:
            raise error
        return self._model.embed_with_usage(texts, **options)


class Away(Flaky):
    """A model that does not answer while `is_away` is set, after its first call."""

    def __init__(self, model: Any, *, is_away: bool = False) -> None:
        self.is_away = threading.Event()
        super().__init__(model, self._error)
        if is_away:
            self.is_away.set()

    def _error(self, _: int) -> AttnlensError | None:
        return UnavailableError("no server answers") if self.is_away.is_set() else None

    def get_model(self, name: str) -> Any:
        if (error := self._error(0)) is not None:
            raise error
        return self._model.get_model(name)


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pipeline._FIRST_DELAY_S", "pipeline._MAX_DELAY_S", "run._START_DELAY_S"):
        monkeypatch.setattr(f"attnlens_bulk.{name}", 0.005)
    monkeypatch.setattr("attnlens_bulk.pipeline._PROGRESS_INTERVAL_S", 0.005)


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return str(path)


def test_workers_continue_after_each_transient_error(tmp_path: Path, model: Local, source: str) -> None:
    flaky: Any = Flaky(model, lambda index: TRANSIENT[index // 2 % len(TRANSIENT)] if index % 2 else None)
    report = embed_files([source], str(tmp_path / "run"), [flaky], OPTIONS)
    assert report.num_written == 3
    np.testing.assert_array_equal(bulk_runs.vectors_of(tmp_path / "run"), model.embed(TEXTS))


@pytest.mark.parametrize("error", PERMANENT, ids=lambda error: error.message)
def test_permanent_error_ends_the_run_at_once(
    tmp_path: Path, model: Local, source: str, error: AttnlensError
) -> None:
    calls: list[int] = []

    def failure(index: int) -> AttnlensError | None:
        calls.append(index)
        return error if index >= 6 else None

    flaky: Any = Flaky(model, failure)
    with pytest.raises(type(error), match=error.message):
        embed_files([source], str(tmp_path / "run"), [flaky], OPTIONS)
    assert len(calls) <= 6 + OPTIONS.in_flight


def test_run_ends_after_its_patience_and_continues_with_the_same_call(
    tmp_path: Path, model: Local, source: str
) -> None:
    error = UnavailableError("no server answers")
    flaky: Any = Flaky(model, lambda index: error if index > 15 else None)
    options = RunOptions(rows_per_part=40, batch_size=4, in_flight=4, patience_s=0.2)
    start = time.monotonic()
    with pytest.raises(ServersUnavailableError) as caught:
        embed_files([source], str(tmp_path / "run"), [flaky], options)
    assert 0.2 <= time.monotonic() - start < 30
    assert str(caught.value) == (
        "no call has succeeded for 0.2 s (first:50051: no server answers). Start the servers and repeat the "
        "command, which continues after the finished parts. To wait longer, increase the patience"
    )
    assert isinstance(caught.value, BulkError)
    assert len(list((tmp_path / "run" / "parts").iterdir())) == 1
    assert embed_files([source], str(tmp_path / "run"), [model], options).num_written == 2


def test_restarted_server_is_named_while_it_is_away_and_used_again(tmp_path: Path, source: str) -> None:
    with ScriptedServer() as server, Client(server.address, max_attempts=1) as client:
        seen: list[str] = []

        def restart(progress: Progress) -> None:
            if progress.texts and not seen:
                server.stop()
                seen.append("stopped")
            elif progress.waiting_for and seen == ["stopped"]:
                seen.append(progress.waiting_for)
                server.start()

        options = RunOptions(rows_per_part=4, batch_size=4, in_flight=2)
        report = embed_files([source], str(tmp_path / "run"), [client], options, progress=restart)
        assert report.num_written == 30
        assert seen[1].startswith(f"{server.address} (no server answers at {server.address}")


def test_new_run_does_not_wait_for_a_wrong_address(
    tmp_path: Path, model: Local, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlens_bulk.run.START_PATIENCE_S", 0.02)
    away: Any = Away(model, is_away=True)
    for call in (embed_files, estimate):
        with pytest.raises(UnavailableError, match="no server answers"):
            call([source], str(tmp_path / "run"), [away], OPTIONS)
    assert not (tmp_path / "run").exists()


def test_continued_run_waits_for_its_first_answer(tmp_path: Path, model: Local, source: str) -> None:
    embed_files([source], str(tmp_path / "run"), [model], OPTIONS)
    (tmp_path / "run" / "parts" / "part-000001.parquet").unlink()
    away: Any = Away(model, is_away=True)
    waiting: list[str] = []

    def come_back(progress: Progress) -> None:
        waiting.append(progress.waiting_for)
        away.is_away.clear()

    report = embed_files([source], str(tmp_path / "run"), [away], OPTIONS, progress=come_back)
    assert report.num_written == 1
    assert waiting[0] == "first:50051 (no server answers)"
    away.is_away.set()
    options = RunOptions(rows_per_part=40, patience_s=0.02)
    with pytest.raises(
        ServersUnavailableError, match=r"^no call has succeeded for 0.\d s \(first:50051: no "
    ):
        embed_files([source], str(tmp_path / "run"), [away], options)


def test_server_that_starts_later_takes_part(tmp_path: Path, model: Local, source: str) -> None:
    late: Any = Away(model, is_away=True)
    late.address = "late:50051"
    taken = threading.Event()

    def failure(index: int) -> AttnlensError | None:
        if index > 4:
            late.is_away.clear()
            return UnavailableError("the other server restarts") if not taken.is_set() else None
        return None

    def progress(state: Progress) -> None:
        if state.texts > 60:
            taken.set()

    first: Any = Flaky(model, failure)
    embed_files([source], str(tmp_path / "run"), [first, late], OPTIONS, progress=progress)
    assert taken.is_set()
    np.testing.assert_array_equal(bulk_runs.vectors_of(tmp_path / "run"), model.embed(TEXTS))


def test_server_with_another_limit_ends_the_run(tmp_path: Path, model: Local, short_model: Local) -> None:
    source = tmp_path / "long.txt"
    source.write_text("".join(f"{number} " + "word " * 60 + "\n" for number in range(20)))
    options = RunOptions(rows_per_part=4, batch_size=4, embedding={"truncate": True})
    with pytest.raises(BulkError, match=r"'max_tokens': 32\}, not .*'max_tokens': 256\}.*and token limit"):
        embed_files([str(source)], str(tmp_path / "two"), [model, short_model], options)
    late: Any = Away(short_model, is_away=True)

    def failure(index: int) -> AttnlensError | None:
        if index > 1:
            late.is_away.clear()
            return UnavailableError("restarts")
        return None

    first: Any = Flaky(model, failure)
    with pytest.raises(
        ResumeError, match=r"used 32 of \d+ tokens of a text, but the max_tokens of the run is"
    ):
        embed_files([str(source)], str(tmp_path / "late"), [first, late], options)
