"""Each session is opened once, with the right number of threads, and retried after transient failures."""

import gc
import threading
import weakref
from pathlib import Path

import pytest

from attnlens_server.engine.runtimes.onnx_session import OnnxSession
from attnlens_server.engine.runtimes.runtime import Division, Session
from attnlens_server.engine.sessions import PAUSES_S, Sessions
from attnlens_server.errors import GraphUnavailableError, StartupError, UnusableGraphError

GRAPH = Path(__file__).parents[3] / "server" / "attnlens_server" / "engine" / "runtimes" / "select_heads.onnx"


class Opener:
    """Opens a real session or fails as configured, and records the arguments."""

    def __init__(self) -> None:
        self.error: StartupError | None = None
        self.duration_s = 0.0
        self.divisions: list[Division] = []
        self.now = 100.0

    def __call__(self, division: Division) -> Session:
        self.divisions.append(division)
        self.now += self.duration_s
        if self.error is not None:
            raise self.error
        return OnnxSession(GRAPH, "cpu", threads=division.threads, device_id=0)

    def clock(self) -> float:
        return self.now


@pytest.fixture
def opener() -> Opener:
    return Opener()


def test_sole_batch_uses_all_threads_and_lanes_divide_them(opener: Opener) -> None:
    sessions = Sessions(opener, threads=4, num_lanes=2)
    assert not sessions.providers
    assert sessions.get(has_whole_machine=True) is not sessions.get(has_whole_machine=False)
    assert opener.divisions == [(4, 1), (2, 2)]
    assert sessions.is_side_by_side_open
    assert sessions.providers == ("CPUExecutionProvider",)


def test_one_lane_has_one_session(opener: Opener) -> None:
    sessions = Sessions(opener, threads=2, num_lanes=1)
    sessions.open_all()
    assert sessions.get(has_whole_machine=True) is sessions.get(has_whole_machine=False)
    assert opener.divisions == [(2, 1)]
    assert not sessions.is_side_by_side_open


def test_one_session_runs_all_batches_when_lanes_do_not_divide_the_threads(opener: Opener) -> None:
    sessions = Sessions(opener, threads=2, num_lanes=3, divides_threads=False)
    sessions.open_all()
    assert sessions.get(has_whole_machine=True) is sessions.get(has_whole_machine=False)
    assert opener.divisions == [(2, 3)]


def test_concurrent_lanes_open_one_session(opener: Opener) -> None:
    sessions = Sessions(opener, threads=2, num_lanes=8)
    found: list[Session] = []
    lanes = [
        threading.Thread(target=lambda: found.append(sessions.get(has_whole_machine=False))) for _ in range(8)
    ]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    assert opener.divisions == [(1, 8)]
    assert len(set(map(id, found))) == 1


def open_failure(sessions: Sessions) -> GraphUnavailableError:
    with pytest.raises(GraphUnavailableError) as caught:
        sessions.get(has_whole_machine=False)
    return caught.value


def test_transient_failure_is_retried_with_backoff(opener: Opener) -> None:
    changes: list[bool] = []
    sessions = Sessions(opener, threads=2, num_lanes=2, clock=opener.clock)
    sessions.on_change = changes.append
    opener.error = StartupError("out of memory")
    for number, pause_s in enumerate((*PAUSES_S, PAUSES_S[-1]), start=1):
        assert open_failure(sessions).retry_after_s == pytest.approx(pause_s)
        opener.now += pause_s - 0.5
        again = open_failure(sessions)
        assert again.retry_after_s == pytest.approx(0.5)
        assert str(again) == "the graph cannot be used now: out of memory; try again in 0.5 s"
        assert len(opener.divisions) == number  # no attempt was made
        opener.now += 0.5
    assert changes == [False]
    opener.error = None
    sessions.get(has_whole_machine=False)
    assert changes == [False, True]


def test_slow_failure_is_not_retried_for_as_long_as_it_took(opener: Opener) -> None:
    sessions = Sessions(opener, threads=2, num_lanes=2, clock=opener.clock)
    opener.error, opener.duration_s = StartupError("too slow"), 600.0
    assert open_failure(sessions).retry_after_s == pytest.approx(600)


def test_permanent_failure_is_not_retried(opener: Opener) -> None:
    sessions = Sessions(opener, threads=2, num_lanes=2, clock=opener.clock)
    opener.error = UnusableGraphError("model.onnx was altered")
    first = open_failure(sessions)
    assert (str(first), first.retry_after_s) == ("the graph cannot be used: model.onnx was altered", None)
    assert first.__cause__ is opener.error
    opener.now += 1e9
    opener.error = None
    assert str(open_failure(sessions)) == str(first)
    assert opener.divisions == [(1, 2)]


def test_startup_failure_is_raised_unchanged(opener: Opener) -> None:
    opener.error = StartupError("no room")
    with pytest.raises(StartupError, match=r"^no room$"):
        Sessions(opener, threads=2, num_lanes=2).open_all()


def test_failed_call_keeps_no_request_alive(opener: Opener) -> None:
    class Request:
        pass

    def call(sessions: Sessions) -> weakref.ref[Request]:
        request = Request()
        try:
            sessions.get(has_whole_machine=False)
        except GraphUnavailableError as error:
            assert (
                error.__traceback__ is not None
            )  # the traceback refers to this frame, and so to the request
        return weakref.ref(request)

    sessions = Sessions(opener, threads=2, num_lanes=2)
    opener.error = UnusableGraphError("altered")
    kept = [call(sessions) for _ in range(3)]
    gc.collect()
    assert [reference() for reference in kept[1:]] == [None, None]


def test_sessions_are_closed_when_their_files_are_modified(opener: Opener) -> None:
    altered: list[UnusableGraphError] = []
    changes: list[bool] = []

    def check() -> None:
        if altered:
            raise altered[0]

    sessions = Sessions(opener, threads=2, num_lanes=2, check_files=check, clock=opener.clock)
    sessions.on_change = changes.append
    session = sessions.get(has_whole_machine=False)
    session.check_results()
    altered.append(UnusableGraphError("weights were altered"))
    with pytest.raises(GraphUnavailableError, match="cannot be used: weights were altered"):
        session.check_results()  # a batch that was running at the same time
    assert str(open_failure(sessions)) == "the graph cannot be used: weights were altered"
    altered.clear()  # restoring the files requires a restart: the sessions are closed
    assert str(open_failure(sessions)) == "the graph cannot be used: weights were altered"
    assert opener.divisions == [(1, 2)]
    assert changes == [False]
    assert not sessions.providers
