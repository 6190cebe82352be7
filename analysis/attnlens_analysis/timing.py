"""Repeated measurements of computing times."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import quantiles

NUM_ROUNDS = 9
_MIN_SAMPLE_S = 1e-3
_MAX_RESOLUTION_S = 1e-4

METHOD = (
    f"CPU time on one thread: the median of {NUM_ROUNDS} rounds over all lengths, after a first round that "
    "is discarded. Lengths whose time is within the noise of the next one are omitted."
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Median and quartiles of a computing time in milliseconds."""

    median_ms: float
    low_ms: float
    high_ms: float


def measure(
    functions: Sequence[Callable[[], object]], clock: Callable[[], float] | None = None
) -> list[Timing]:
    """Measure functions that compute in the calling thread alone.

    All functions take turns in each round, so that a busy second does not affect only one of them. The first
    round warms up caches and allocators, and determines how often short functions are repeated.

    Args:
        functions: Functions to measure.
        clock: Clock in seconds. Defaults to the CPU time of the thread, which other processes do not change.
    """
    clock = clock or _default_clock()
    repeats, samples = [1] * len(functions), list[list[float]]()
    for _ in range(NUM_ROUNDS + 1):
        samples.append(
            [_sample(function, count, clock) for function, count in zip(functions, repeats, strict=True)]
        )
        if len(samples) == 1:
            repeats = [max(1, ceil(_MIN_SAMPLE_S / max(seconds, 1e-9))) for seconds in samples[0]]
            repeats = [min(count, 1000) for count in repeats]
    timings = []
    for series in zip(*samples[1:], strict=True):
        low, median, high = (1000 * seconds for seconds in quantiles(series, n=4, method="inclusive"))
        timings.append(Timing(median, low, high))
    return timings


def growing(rows: Sequence[Sequence[Timing]]) -> list[int]:
    """Return the indices of rows, by ascending length, whose times are all below those of the next one."""
    kept = [len(rows) - 1] if rows else []
    for index in range(len(rows) - 2, -1, -1):
        if all(
            one.high_ms < other.median_ms and one.median_ms < other.low_ms
            for one, other in zip(rows[index], rows[kept[0]], strict=True)
        ):
            kept.insert(0, index)
    return kept


def _sample(function: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(count):
        function()
    return (clock() - start) / count


def _default_clock() -> Callable[[], float]:
    is_precise = time.get_clock_info("thread_time").resolution <= _MAX_RESOLUTION_S
    return time.thread_time if is_precise else time.perf_counter
