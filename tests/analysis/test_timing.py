"""Times that are shown come from repeated measurements, without the first one."""

from collections.abc import Callable

import pytest

from attnlens_analysis.timing import NUM_ROUNDS, Timing, growing, measure


class FakeClock:
    """A clock that functions advance."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def function(self, durations: list[float]) -> Callable[[], object]:
        """Return a function that takes the first duration first, and then repeats the others."""
        remaining = [*durations[:1], *(durations[1:] * NUM_ROUNDS)]

        def run() -> None:
            self.seconds += remaining.pop(0)

        return run


def test_first_round_is_discarded_and_one_disturbed_round_has_no_effect() -> None:
    clock = FakeClock()
    cold = clock.function([3.0, *[0.002] * (NUM_ROUNDS - 4), *[0.004] * 4])
    disturbed = clock.function([0.01, 0.01, 0.01, 9.0, *[0.01] * (NUM_ROUNDS - 3)])
    timings = measure([cold, disturbed], clock)
    assert [timing.median_ms for timing in timings] == pytest.approx([2, 10])
    assert timings[1].high_ms == pytest.approx(10)


def test_functions_take_turns() -> None:
    calls: list[str] = []
    measure([lambda: calls.append("short"), lambda: calls.append("long")], lambda: float(len(calls)))
    assert calls == ["short", "long"] * (NUM_ROUNDS + 1)


def test_short_functions_are_repeated_within_a_round() -> None:
    clock = FakeClock()
    count = 0

    def short() -> None:
        nonlocal count
        count += 1
        clock.seconds += 1e-5

    [timing] = measure([short], clock)
    assert timing.median_ms == pytest.approx(0.01)
    assert count > 50 * NUM_ROUNDS


def test_lengths_that_do_not_take_longer_than_shorter_ones_are_omitted() -> None:
    def row(*medians: float) -> list[Timing]:
        return [Timing(median, 0.9 * median, 1.1 * median) for median in medians]

    assert growing([row(88), row(372), row(372), row(66)]) == [3]  # a busy machine
    assert growing([row(0.17), row(1.2), row(3.0), row(13.6)]) == [0, 1, 2, 3]
    assert growing([row(1, 5), row(1.05, 9), row(4, 20)]) == [1, 2]  # within the noise in one column
    assert growing([]) == []
