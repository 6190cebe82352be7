"""Timings of graphs while other programs are running."""

import pytest

from attnlens_export.parity.sessions import MAX_TIMING_ROUNDS, measure_seconds


class TimedSession:
    """A session whose runs take the given times, the last of them for ever."""

    def __init__(self, clock: list[float], *seconds: float) -> None:
        self._clock = clock
        self._seconds = list(seconds)

    def run(self, _names: None, _feed: object) -> None:
        self._clock[0] += self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("attnlens_export.parity.sessions.time.perf_counter", lambda: now[0])
    return now


def test_minimum_counts_and_the_first_run_does_not(clock: list[float]) -> None:
    first, second = TimedSession(clock, 0.1, 3.0, 2.0), TimedSession(clock, 9.0, 1.0)
    timings = measure_seconds({"first": first, "second": second}, {}, 3)
    assert timings.seconds == pytest.approx({"first": 2.0, "second": 1.0})
    assert timings.is_reliable


def test_rounds_are_repeated_until_two_agree(clock: list[float]) -> None:
    """The second round is slowed down by another program."""
    busy = TimedSession(clock, 1.0, 2.0, 2.0, 9.0, 9.0, 2.1)
    timings = measure_seconds({"busy": busy}, {}, 2)
    assert timings.seconds == pytest.approx({"busy": 2.0})
    assert timings.is_reliable


def test_rounds_that_never_agree_are_reported(clock: list[float]) -> None:
    busy = TimedSession(clock, *(float(2**number) for number in range(2 * MAX_TIMING_ROUNDS)))
    timings = measure_seconds({"busy": busy}, {}, 1)
    assert not timings.is_reliable
