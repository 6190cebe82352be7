"""Supervision of a running server: health that reflects reality, and the lag of the event loop.

`judge` decides from observations alone. `Supervisor` makes the observations and publishes the decision.
"""

import asyncio
import logging
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnlens_server.core.process import State
from attnlens_server.engine import Engine
from attnlens_server.errors import InvalidResultError
from attnlens_server.operations.service import ModelService

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

INTERVAL_S = 0.25
LOCKOUT_S = 30.0
MAX_BAD_BATCHES = 3  # consecutive batches with NaN or infinity before the probe runs
PROBE_TIMEOUT_S = 10.0
LAG_WARNING_S = 1.0
LAG_WARNING_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a healthy server.

    Attributes:
        batch_s: Maximum time of a batch.
        lockout_s: Maximum time in which clients without other calls are refused and no batch ends.
    """

    batch_s: float
    lockout_s: float


@dataclass(frozen=True, slots=True)
class Observation:
    """State of a server at one time.

    Attributes:
        now: Monotonic clock, in seconds.
        longest_batch_s: Elapsed time of the batch that has been running for longest, or 0.
        graph: Graph that runs this batch.
        is_main_graph_usable: Whether the graph of the main results can be used.
        num_batches: Number of completed and stopped batches of all graphs.
        num_refused: Number of requests refused as overloaded since the start, see `Admission`.
        has_bad_results: Whether the main graph returns NaN or infinity for a text that is known to be valid.
    """

    now: float
    longest_batch_s: float = 0.0
    graph: str = ""
    is_main_graph_usable: bool = True
    num_batches: int = 0
    num_refused: int = 0
    has_bad_results: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Health after an observation, and the facts that the next verdict needs.

    Attributes:
        problem: Reason why the server is not healthy, or "".
        num_batches, num_refused: Counters of the last observation.
        refused_since: Time of the first refusal after the last completed batch, or None.
        refused_at: Time of the last refusal.
    """

    problem: str = ""
    num_batches: int = 0
    num_refused: int = 0
    refused_since: float | None = None
    refused_at: float = 0.0


def judge(previous: Verdict, observed: Observation, limits: Limits) -> Verdict:
    """Return the health of a server."""
    refused_since, refused_at = previous.refused_since, previous.refused_at
    if observed.num_batches > previous.num_batches or observed.now - refused_at > limits.lockout_s:
        refused_since = None
    if observed.num_refused > previous.num_refused:
        refused_at = observed.now
        if observed.num_batches == previous.num_batches and refused_since is None:
            refused_since = observed.now
    problem = ""
    if observed.longest_batch_s > limits.batch_s:
        problem = f"a batch of the {observed.graph} graph has been running for more than {limits.batch_s:g} s"
    elif not observed.is_main_graph_usable:
        problem = "the graph of the main results cannot be used"
    elif observed.has_bad_results:
        problem = "the graph of the main results returns NaN or infinity for a valid text"
    elif refused_since is not None and refused_at - refused_since >= limits.lockout_s:
        problem = f"for {limits.lockout_s:g} s, requests were refused as overloaded and no batch ended"
    return Verdict(problem, observed.num_batches, observed.num_refused, refused_since, refused_at)


class LoopLag:
    """Distribution of the times by which the event loop runs a due callback too late.

    Attributes:
        BOUNDS_S: Upper bounds of the buckets in seconds. The last bucket is unbounded.
        counts: Number of measurements per bucket.
        sum_s: Sum of all measurements.
        max_s: Largest measurement.
    """

    BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS_S) + 1)
        self.sum_s = 0.0
        self.max_s = 0.0
        self._warned_at = -LAG_WARNING_INTERVAL_S

    def add(self, lag_s: float, now: float) -> None:
        """Count a measurement. At most once per minute, log one of more than a second."""
        self.counts[bisect_left(self.BOUNDS_S, lag_s)] += 1
        self.sum_s += lag_s
        self.max_s = max(self.max_s, lag_s)
        if lag_s > LAG_WARNING_S and now - self._warned_at >= LAG_WARNING_INTERVAL_S:
            self._warned_at = now
            logger.warning(
                "the event loop was late by %.1f s: a callback blocked it, or the machine is overloaded",
                lag_s,
            )


async def _ignore_change() -> None:
    """Do nothing. Default for `Supervisor.on_change`."""


class Supervisor:
    """Observes a model and reports changes of its health. Each host runs one.

    Args:
        service: Service of the model. `problem` is set here.
        engine: Engine of the model.
        stuck_timeout_s: Maximum time of a batch.

    Attributes:
        lag: Lag of the event loop that runs `run`.
        on_change: Called after `service.process.problem` has changed.
    """

    def __init__(self, service: ModelService, engine: Engine, stuck_timeout_s: float) -> None:
        self.lag = LoopLag()
        self.on_change: Callable[[], Awaitable[None]] = _ignore_change
        self._service = service
        self._engine = engine
        self._limits = Limits(batch_s=stuck_timeout_s, lockout_s=min(stuck_timeout_s, LOCKOUT_S))
        self._verdict = Verdict()
        self._has_bad_results = False
        self._probing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Observe the server until this task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            now = loop.time()
            self.lag.add(max(0.0, now - due), now)
            if self._service.process.state is State.SERVING:
                await self._judge(now)

    async def _judge(self, now: float) -> None:
        self._check_results()
        lanes = self._engine.lanes
        observed = Observation(
            now,
            *max((each.longest_batch_s, kind) for kind, each in lanes.items()),
            lanes[self._engine.main_kind].sessions.are_usable,
            sum(each.num_batches + each.num_stopped for each in lanes.values()),
            self._service.process.admission.num_refused,
            self._has_bad_results,
        )
        self._verdict = judge(self._verdict, observed, self._limits)
        problem, previous = self._verdict.problem, self._service.process.problem
        if problem == previous:
            return
        if problem:
            logger.error("not healthy: %s", problem)
        else:
            logger.warning("healthy again, after: %s", previous)
        self._service.process.problem = problem
        await self.on_change()

    def _check_results(self) -> None:
        """Run a known text after NaN or infinity for texts of clients, which may be unusual."""
        num_bad = self._engine.lanes[self._engine.main_kind].num_bad_batches
        is_idle = self._probing is None or self._probing.done()
        if is_idle and (self._has_bad_results or num_bad >= MAX_BAD_BATCHES):
            self._probing = asyncio.create_task(self._probe())

    async def _probe(self) -> None:
        try:
            item = self._engine.probe()
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await asyncio.wrap_future(item.future)
        except InvalidResultError:
            self._has_bad_results = True
        except Exception as error:  # noqa: BLE001 - a probe that cannot run proves nothing
            logger.debug("the probe failed", extra={"error": str(error)})
        else:
            self._has_bad_results = False
            self._engine.lanes[self._engine.main_kind].num_bad_batches = 0
