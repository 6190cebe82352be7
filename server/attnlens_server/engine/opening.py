"""Opening a graph: in time, only if its files are those that were verified, and tried before it serves."""

import logging
import threading
import time

from attnlens_server.bundle import Bundle, Kind
from attnlens_server.bundle.check import REMEDY
from attnlens_server.bundle.files import MappedFiles
from attnlens_server.engine.freed_memory import give_back_freed_memory
from attnlens_server.engine.runtimes.runtime import Division, Runtime
from attnlens_server.engine.session import Session
from attnlens_server.engine.time_limit import TimeLimit
from attnlens_server.engine.trial import make_trial
from attnlens_server.errors import StartupError

logger = logging.getLogger(__name__)


class GraphOpener:
    """Opens sessions of one graph of a bundle. One thread at a time opens; any may check or stop."""

    def __init__(
        self,
        bundle: Bundle,
        kind: Kind,
        runtime: Runtime,
        *,
        timeout_s: float,
    ) -> None:
        self._bundle = bundle
        self._graph = bundle.graph(kind)
        self._kind: Kind = kind
        self._runtime = runtime
        self._timeout_s = timeout_s
        self._path = bundle.graph_path(kind)
        self._trial = make_trial(self._path, self._graph, bundle.model)
        self._mapped = MappedFiles({})
        # Protects: a limit that is used once `_is_stopped` is set is over.
        self._stopping = threading.Lock()
        self._is_stopped = False
        self._limit: TimeLimit | None = None
        self.trial_batches: tuple[tuple[int, ...], ...] = ((1,),)
        """The batches that each session is tried with: the number of tokens of each text."""
        self.longest_trial: int | None = None
        """That of a text for the first session only, since it may take as long as all else."""

    def __call__(self, division: Division) -> Session:
        """Open the graph for batches that share the machine in one way, and try it.

        Raises:
            UnusableGraphError: a file was altered, the graph is not what the manifest says, or its results
                are not.
            StartupError: the runtime can't open or run it, or not in time.
        """
        started = time.monotonic()
        with TimeLimit(self._timeout_s) as limit:
            self._use(limit)
            self._bundle.verify_graph(self._graph)
            try:
                session = self._runtime.open(self._kind, self._path, division, limit)
                self._trial.check_interface(session)
                longest = [] if self.longest_trial is None else [(self.longest_trial,)]
                for num_tokens in (*self.trial_batches, *longest):
                    self._trial.run(session, num_tokens, limit)
            except Exception as error:
                if limit.is_over:
                    raise StartupError(self._overdue()) from error
                if isinstance(error, StartupError):
                    raise
                raise StartupError(f"{self._path} can't be run: {error}") from error
            # Again: what was read is what was verified only if it is so before and after.
            self._mapped = self._bundle.verify_graph(self._graph)
        self.longest_trial = None
        give_back_freed_memory()
        logger.debug(
            "graph opened and tried",
            extra={
                "graph": self._path.name,
                "threads": division.threads,
                "batches": division.num_batches,
                "providers": " ".join(session.providers),
                "seconds": round(time.monotonic() - started, 2),
            },
        )
        return session

    def check_files(self) -> None:
        """Make sure that what the sessions have mapped into memory is what was verified.

        Raises:
            UnusableGraphError: it was altered.
        """
        self._mapped.check()

    def stop(self) -> None:
        """Make what is being opened fail, and whatever would be opened later."""
        with self._stopping:
            self._is_stopped = True
            if self._limit is not None:
                self._limit.end()

    def _use(self, limit: TimeLimit) -> None:
        with self._stopping:
            self._limit = limit
            if self._is_stopped:
                limit.end()

    def _overdue(self) -> str:
        if self._is_stopped:
            return f"{self._path} was not opened: the server is stopping"
        return (
            f"opening and trying {self._path} took more than {self._timeout_s:g} s: give a larger "
            f"--start-timeout-s, or {REMEDY}"
        )
