"""Texts on their way through the engine: as many as it can take, or at given times."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from attnlens_server.engine import Item, Wanted
from attnlens_server.engine.lanes import Lanes
from attnlens_server.tuning.workload import Workload

if TYPE_CHECKING:
    from concurrent.futures import Future

MIN_BATCHES = 2  # of each lane
WARM_UP_SHARE = 0.25  # of the time that is measured, before it


@dataclass(frozen=True, slots=True)
class Flow:
    """What lanes did while they always had something to do."""

    tokens_per_s: float
    padding_share: float


@dataclass(frozen=True, slots=True)
class Load:
    """Latency at a rate, in milliseconds, counted from when a text was due.

    Attributes:
        rate: texts a second, on average.
        num_texts: how many were answered.
        num_refused: how many came when `max_concurrent_inputs` texts were inside: a server refuses those.
        p50_ms: median; None where nothing was answered.
        p95_ms: 95th percentile.
        p99_ms: 99th percentile.
    """

    rate: float
    num_texts: int
    num_refused: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


class Clock:
    """The time, and waiting for it."""

    def now(self) -> float:
        """Return the seconds since some fixed time."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""
        time.sleep(seconds)

    def wait_for(self, changed: threading.Condition, is_met: Callable[[], bool]) -> None:
        """Return once `is_met`, which the caller of `changed.notify` has brought about; hold `changed`."""
        changed.wait_for(is_met)


CLOCK = Clock()


class _Sample(NamedTuple):
    """The counts of the lanes when a batch was done."""

    at: float
    live_tokens: int
    computed_tokens: int


class InFlight:
    """Texts that wait or run. Those that are left at the end are cancelled."""

    def __init__(
        self,
        lanes: Lanes,
        wanted: Sequence[Wanted],
        on_done: Callable[[float], None],
        clock: Clock,
    ) -> None:
        """Make an empty one; `on_done` gets when a text was due, in the thread that has run it."""
        self._lanes = lanes
        self._clock = clock
        self._wanted = tuple(wanted)
        self._on_done = on_done
        self._numbers = count()
        # Protects: _futures has exactly those of texts that were put and are not done, _error is the first.
        # By number, since a callback that knew its item would keep the results alive.
        self._changed = threading.Condition()
        self._futures: dict[int, Future[Any]] = {}
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            left = list(self._futures.values())
        for future in left:
            future.cancel()

    def __len__(self) -> int:
        return len(self._futures)

    def put(self, input_ids: npt.NDArray[np.int64], due_at: float) -> None:
        """Send a text, (T,) int64."""
        item, number = Item(input_ids, self._wanted), next(self._numbers)
        with self._changed:
            self._futures[number] = item.future
        item.future.add_done_callback(partial(self._finish, number, due_at))
        self._lanes.submit([item])

    def wait_below(self, limit: int) -> None:
        """Wait until there are fewer than `limit`.

        Raises:
            Exception: what a text failed with.
        """
        with self._changed:
            self._clock.wait_for(self._changed, lambda: len(self._futures) < limit or self._error is not None)
            if self._error is not None:
                raise self._error

    def _finish(self, number: int, due_at: float, future: "Future[Any]") -> None:
        with self._changed:
            del self._futures[number]
            if not future.cancelled():
                self._error = self._error or future.exception()
                self._on_done(due_at)
            self._changed.notify()


def saturate(
    lanes: Lanes,
    workload: Workload,
    wanted: Sequence[Wanted],
    *,
    num_lanes: int,
    num_in_flight: int,
    seconds: float,
    clock: Clock = CLOCK,
) -> Flow:
    """Keep `num_in_flight` texts in the lanes for `seconds`, and for at least MIN_BATCHES batches of a lane.

    The rate is that between two ends of batches, so that it does not depend on how many batches fit.
    """
    samples: list[_Sample] = []
    begin = clock.now() + WARM_UP_SHARE * seconds

    def sample(_due_at: float) -> None:
        now, live_tokens = clock.now(), lanes.num_live_tokens
        if now >= begin and (not samples or live_tokens != samples[-1].live_tokens):
            samples.append(_Sample(now, live_tokens, lanes.num_computed_tokens))

    with InFlight(lanes, wanted, sample, clock) as in_flight:
        for input_ids in cycle(workload.input_ids):
            in_flight.wait_below(num_in_flight)
            if clock.now() >= begin + seconds and len(samples) > MIN_BATCHES * num_lanes:
                break
            in_flight.put(input_ids, 0.0)
    first, last = samples[0], samples[-1]
    live_tokens = last.live_tokens - first.live_tokens
    computed_tokens = last.computed_tokens - first.computed_tokens
    return Flow(live_tokens / (last.at - first.at), 1 - live_tokens / computed_tokens)


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the times, from 0 to `seconds`, at which texts of a Poisson process of this rate come."""
    # Given their number, the arrivals of a Poisson process are independent and uniform.
    chance = np.random.default_rng(seed)
    return [float(time_s) for time_s in np.sort(chance.uniform(0, seconds, chance.poisson(rate * seconds)))]


def send_at_rate(
    lanes: Lanes,
    workload: Workload,
    wanted: Sequence[Wanted],
    *,
    rate: float,
    seconds: float,
    max_concurrent_inputs: int,
    clock: Clock = CLOCK,
) -> Load:
    """Send texts at the times of a Poisson process, whether or not those before are done."""
    latencies_ms: list[float] = []
    num_refused = 0

    def note(due_at: float) -> None:
        latencies_ms.append(1000 * (clock.now() - due_at))

    with InFlight(lanes, wanted, note, clock) as in_flight:
        started = clock.now()
        arrivals = poisson_arrivals(rate, seconds, seed=round(rate))
        for arrival, input_ids in zip(arrivals, cycle(workload.input_ids), strict=False):
            due_at = started + arrival
            clock.sleep(max(0.0, due_at - clock.now()))
            if len(in_flight) < max_concurrent_inputs:
                in_flight.put(input_ids, due_at)
            else:
                num_refused += 1
        in_flight.wait_below(1)
    percentiles = np.percentile(latencies_ms, [50, 95, 99]).tolist() if latencies_ms else [None] * 3
    return Load(rate, len(latencies_ms), num_refused, *percentiles)
