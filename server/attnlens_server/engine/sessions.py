"""The sessions of one graph: one for batches side by side, and one for a batch that has the whole machine.

Batches that run side by side, each on one thread, bring more texts per second than batches that run one
after the other on all threads: the threads never wait for each other (docs/performance.md). A batch with
nothing beside it is done sooner on all of them. The number of threads belongs to a session, of ONNX Runtime
as of OpenVINO, so there are two sessions, and two copies of the weights; with one lane there is only the
second.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attnlens_server.engine.runtimes.runtime import Division
from attnlens_server.engine.session import Session
from attnlens_server.errors import GraphUnavailableError, StartupError, UnusableGraphError

logger = logging.getLogger(__name__)

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)  # after the first failure, the second ...; then the last


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why the graph can't be used.

    Attributes:
        message: the whole story.
        num_tries: how many in a row failed.
        retry_at: when to try again, on the clock; None: never.
    """

    message: str
    num_tries: int
    retry_at: float | None


class Sessions:
    """Opens each session when it is first needed. Safe to use from many threads.

    What fails for a lack of memory or time is tried again after a pause, each longer than the one before;
    a graph that was altered, or is not what its manifest says, is not.
    """

    def __init__(
        self,
        open_session: Callable[[Division], Session],
        *,
        threads: int,
        num_lanes: int,
        divides_threads: bool = True,
        check_files: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            open_session: opens the graph for batches that share the machine in one way, and tries it.
            threads: those of a batch that has the whole machine.
            num_lanes: how many batches run side by side.
            divides_threads: whether they divide the threads. Where they don't, one session runs all batches.
            check_files: raises UnusableGraphError where an open session can't be trusted any more.
            clock: what pauses are measured with.
        """
        self._open_session = open_session
        self._check_files = check_files
        self._clock = clock
        side_by_side = Division(max(1, threads // num_lanes) if divides_threads else threads, num_lanes)
        self._divisions: Mapping[bool, Division] = {
            True: Division(threads, 1) if divides_threads else side_by_side,
            False: side_by_side,
        }
        # Protects: a division has at most one session, and one thread at a time tries to open one.
        self._opening = threading.Lock()
        self._sessions: dict[Division, Session] = {}
        self._failure: _Failure | None = None
        self.on_change: Callable[[bool], None] = lambda _: None
        """Gets whether the graph can be used, each time that this changes; in any thread."""

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers, the preferred one first; empty until a session is open."""
        return next((session.providers for session in list(self._sessions.values())), ())

    @property
    def are_usable(self) -> bool:
        """False from a failure to open one until that has succeeded."""
        return self._failure is None

    def open_all(self) -> None:
        """Open both now.

        Raises:
            StartupError: one can't be opened.
        """
        with self._opening:
            for division in self._divisions.values():
                if division not in self._sessions:
                    self._keep(division, self._open_session(division))

    def get(self, *, has_whole_machine: bool) -> Session:
        """Return the session for a batch.

        Raises:
            GraphUnavailableError: it can't be opened, or can't be trusted any more. An error of its own for
                each call, since what raises an exception hangs on to it.
        """
        division = self._divisions[has_whole_machine]
        if (session := self._sessions.get(division)) is None:
            with self._opening:
                session = self._sessions.get(division) or self._open(division)
        self.check_files()
        return session

    def check_files(self) -> None:
        """Make sure that what the open sessions have mapped into memory is what was verified.

        Raises:
            GraphUnavailableError: it was altered. The sessions are given up for good.
        """
        try:
            self._check_files()
        except UnusableGraphError as error:
            with self._opening:
                self._sessions.clear()
                if self._failure is None or self._failure.retry_at is not None:
                    self._fail(error, 0.0)
            raise self._unavailable() from None

    def _open(self, division: Division) -> Session:
        if self._failure is not None and (
            self._failure.retry_at is None or self._clock() < self._failure.retry_at
        ):
            raise self._unavailable()
        started = self._clock()
        try:
            session = self._open_session(division)
        except StartupError as error:
            self._fail(error, self._clock() - started)
            raise self._unavailable() from error
        self._keep(division, session)
        if self._failure is not None:
            self._failure = None
            self.on_change(True)  # noqa: FBT003 - its only argument
        return session

    def _keep(self, division: Division, session: Session) -> None:
        session.check_results = self.check_files
        self._sessions[division] = session

    def _fail(self, error: StartupError, duration_s: float) -> None:
        """Note a failure; what took long to fail is not tried again for at least as long."""
        num_tries = 1 if self._failure is None else self._failure.num_tries + 1
        pause_s = max(PAUSES_S[min(num_tries, len(PAUSES_S)) - 1], duration_s)
        is_final = isinstance(error, UnusableGraphError)
        retry_at = None if is_final else self._clock() + pause_s
        logger.error("%s; %s", error, "not tried again" if is_final else f"tried again in {pause_s:g} s")
        was_usable = self._failure is None
        self._failure = _Failure(str(error), num_tries, retry_at)
        if was_usable:
            self.on_change(False)  # noqa: FBT003 - its only argument

    def _unavailable(self) -> GraphUnavailableError:
        assert self._failure is not None  # noqa: S101 - who calls has seen to it
        message, retry_at = self._failure.message, self._failure.retry_at
        if retry_at is None:
            return GraphUnavailableError(f"the graph can't be used: {message}")
        wait_s = max(retry_at - self._clock(), 0.1)
        return GraphUnavailableError(
            f"the graph can't be used now: {message}; try again in {wait_s:.1f} s", retry_after_s=wait_s
        )
