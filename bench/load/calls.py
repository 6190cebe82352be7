"""How long requests took: plain arithmetic on seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Call:
    """A request that is over.

    Attributes:
        index: which text.
        due_at: when it was to be sent; in a closed loop, when it was sent.
        done_at: when the reply was there, on the same clock.
    """

    index: int
    due_at: float
    done_at: float


def finished_within(calls: Sequence[Call], start: float, end: float) -> list[Call]:
    """Return the calls whose reply came from `start` to `end`: in a steady state, the work of that time."""
    return [call for call in calls if start <= call.done_at < end]


def latencies_ms(calls: Sequence[Call]) -> dict[str, float]:
    """Return the centiles of the time since a request was due, in milliseconds.

    Counted from when it was due and not from when it was sent: a generator that waits for a slow server
    would otherwise leave the waiting out (coordinated omission).
    """
    return centiles([call.done_at - call.due_at for call in calls])


def centiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, 95th and 99th centile in milliseconds; none of no durations."""
    if not seconds:
        return {}
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99]) * 1000
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99)}


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the arrival times, from 0 to `seconds`, of a Poisson process with `rate` arrivals per second."""
    # Given their number, the arrivals of a Poisson process are independent and uniformly distributed.
    generator = np.random.default_rng(seed)
    return [
        float(time_s) for time_s in np.sort(generator.uniform(0, seconds, generator.poisson(rate * seconds)))
    ]
