"""Measurements that run at the same time, and their progress."""

import threading
from concurrent.futures import CancelledError
from threading import Event

import pytest

from attnlens_export.progress import Progress, beside

WAIT_S = 30


def test_function_runs_beside_the_caller_and_reports_while_it_is_awaited() -> None:
    reported: list[tuple[str, str, int, int]] = []
    threads: set[threading.Thread] = set()
    has_begun, may_end = Event(), Event()

    def progress(stage: str, detail: str, done: int, total: int) -> None:
        threads.add(threading.current_thread())
        reported.append((stage, detail, done, total))
        may_end.set()

    def measure(report: Progress) -> str:
        report("Measuring", "first", 0, 3)
        report("Measuring", "second", 1, 3)
        has_begun.set()
        assert may_end.wait(WAIT_S)
        report("Measuring", "third", 2, 3)
        return "measured"

    with beside(measure, progress) as measured:
        assert has_begun.wait(WAIT_S)
        assert reported == []
        assert measured() == "measured"
    assert reported == [("Measuring", "second", 1, 3), ("Measuring", "third", 2, 3)]
    assert threads == {threading.current_thread()}


def test_failure_of_the_function_reaches_the_caller() -> None:
    def measure(report: Progress) -> None:
        report("Measuring", "", 0, 1)
        raise ValueError("not measurable")

    with pytest.raises(ValueError, match="not measurable"), beside(measure, lambda *_: None) as measured:
        measured()


def test_failure_of_the_caller_stops_the_function() -> None:
    has_begun, stopped = Event(), Event()

    def measure(report: Progress) -> None:
        try:
            while True:
                report("Measuring", "", 0, 1)
                has_begun.set()
        except CancelledError:
            stopped.set()
            raise

    def fail() -> None:
        with beside(measure, lambda *_: None):
            assert has_begun.wait(WAIT_S)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert stopped.is_set()


def test_without_a_thread_the_function_runs_when_it_is_awaited() -> None:
    calls: list[str] = []

    def measure(report: Progress) -> str:
        calls.append("measured")
        report("Measuring", "", 0, 1)
        return threading.current_thread().name

    def progress(stage: str, _detail: str, _done: int, _total: int) -> None:
        calls.append(stage)

    with beside(measure, progress, in_thread=False) as measured:
        calls.append("caller")
        assert measured() == threading.current_thread().name
    assert calls == ["caller", "measured", "Measuring"]
