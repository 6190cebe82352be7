"""The sessions of one graph: one for batches side by side, and one for a batch that is alone.

Batches that run side by side, each on one thread, bring more texts per second than batches that run one
after the other on all threads: the threads never wait for each other (docs/performance.md). A batch that is
alone is done sooner on all of them. The number of threads belongs to a session of ONNX Runtime, hence two
sessions, which is also two copies of the weights; with one lane there is only the second.
"""

import logging
import threading
from collections.abc import Callable

from attnlens_server.engine.session import Session
from attnlens_server.errors import GraphUnavailableError, StartupError

logger = logging.getLogger(__name__)


class Sessions:
    """Opens each session when it is first needed. A failure is final. Safe to use from many threads."""

    def __init__(self, open_session: Callable[[int], Session], *, threads: int, num_lanes: int) -> None:
        """Prepare; nothing is opened yet.

        Args:
            open_session: opens the graph for a number of threads.
            threads: those of a batch that is alone; 0 leaves the number to ONNX Runtime.
            num_lanes: how many batches run side by side; they divide the threads.
        """
        self._open_session = open_session
        self._threads = {True: threads, False: threads if num_lanes == 1 else max(1, threads // num_lanes)}
        # Protects: a number of threads has at most one session, and _failure is set before any other try.
        self._opening = threading.Lock()
        self._sessions: dict[int, Session] = {}
        self._failure: GraphUnavailableError | None = None

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers, the preferred one first; empty until a session is open."""
        return next((session.providers for session in list(self._sessions.values())), ())

    def open_all(self) -> None:
        """Open both now.

        Raises:
            GraphUnavailableError: one can't be opened.
        """
        self.get(is_alone=True)
        self.get(is_alone=False)

    def get(self, *, is_alone: bool) -> Session:
        """Return the session for a batch.

        Raises:
            GraphUnavailableError: it can't be opened, now or at the first try.
        """
        threads = self._threads[is_alone]
        if session := self._sessions.get(threads):
            return session
        with self._opening:
            if self._failure is not None:
                raise self._failure
            if threads not in self._sessions:
                try:
                    self._sessions[threads] = self._open_session(threads)
                except StartupError as error:
                    logger.error("%s", error)  # noqa: TRY400 - the message is the whole story
                    self._failure = GraphUnavailableError(f"the graph can't be used: {error}")
                    raise self._failure from error
            return self._sessions[threads]
