"""Which session runs a batch: opened once, for the right number of threads, and a failure is final."""

import threading
from pathlib import Path

import pytest

from attnlens_server.engine.session import Session
from attnlens_server.engine.sessions import Sessions
from attnlens_server.errors import GraphUnavailableError, StartupError


class Opener:
    """Opens a real session, and remembers for how many threads."""

    def __init__(self, graph: Path) -> None:
        self.graph = graph
        self.threads: list[int] = []

    def __call__(self, threads: int) -> Session:
        self.threads.append(threads)
        return Session(self.graph, "cpu", threads=threads, device_id=0)


@pytest.fixture
def opener(minilm_bundle: Path) -> Opener:
    return Opener(minilm_bundle / "onnx" / "model.onnx")


def test_a_batch_alone_has_all_threads_and_lanes_divide_them(opener: Opener) -> None:
    sessions = Sessions(opener, threads=4, num_lanes=2)
    assert not sessions.providers
    assert sessions.get(is_alone=True) is not sessions.get(is_alone=False)
    assert opener.threads == [4, 2]
    assert sessions.providers == ("CPUExecutionProvider",)


def test_one_lane_has_one_session(opener: Opener) -> None:
    sessions = Sessions(opener, threads=2, num_lanes=1)
    sessions.open_all()
    assert sessions.get(is_alone=True) is sessions.get(is_alone=False)
    assert opener.threads == [2]


def test_lanes_that_come_at_once_open_one_session(opener: Opener) -> None:
    sessions = Sessions(opener, threads=2, num_lanes=8)
    found: list[Session] = []
    lanes = [threading.Thread(target=lambda: found.append(sessions.get(is_alone=False))) for _ in range(8)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    assert opener.threads == [1]
    assert len(set(map(id, found))) == 1


def test_a_failure_is_final(tmp_path: Path, opener: Opener) -> None:
    opener.graph = tmp_path / "none.onnx"
    sessions = Sessions(opener, threads=2, num_lanes=2)
    with pytest.raises(GraphUnavailableError, match=r"can't be used.*none\.onnx") as first:
        sessions.get(is_alone=False)
    with pytest.raises(GraphUnavailableError) as second:
        sessions.open_all()
    assert opener.threads == [1]
    assert isinstance(first.value.__cause__, StartupError)
    assert str(second.value) == str(first.value)
