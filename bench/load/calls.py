"""Request timings: latency perpercentiles and arrival processes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Call:
    """A completed request.

    Attributes:
        index: Index of the request.
        due_at: Scheduled send time, in seconds. In a closed loop, the actual send time.
        done_at: Time of the response, on the same clock.
    """

    index: int
    due_at: float
    done_at: float


def finished_within(calls: Sequence[Call], start: float, end: float) -> list[Call]:
    """Return the calls completed in the interval [start, end)."""
    return [call for call in calls if start <= call.done_at < end]


def latencies_ms(calls: Sequence[Call]) -> dict[str, float]:
    """Return latency perpercentiles in milliseconds.

    Latency is measured from the scheduled send time to avoid coordinated omission.
    """
    return percentiles([call.done_at - call.due_at for call in calls])


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the 50th, 95th and 99th perpercentiles in milliseconds, or an empty dict without values."""
    if not seconds:
        return {}
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99]) * 1000
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99)}


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Sample the arrival times of a Poisson process in [0, seconds], with `rate` arrivals per second."""
    # Conditional on their count, Poisson arrivals are i.i.d. uniform.
    generator = np.random.default_rng(seed)
    return [
        float(time_s) for time_s in np.sort(generator.uniform(0, seconds, generator.poisson(rate * seconds)))
    ]
