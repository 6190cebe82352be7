"""Sessions of one graph: opening, verification and retries.

A graph has two sessions: one for concurrent batches and one for a batch that has the machine to itself.
Concurrent batches on one thread each have a higher throughput than consecutive batches on all threads,
because the threads never wait for each other (docs/performance.md). A single batch finishes sooner on all
threads, except for some short ones (`ThreadChoice`). ONNX Runtime and OpenVINO fix the number of threads per
session, so the weights are in memory twice. With one lane there is only the second session.
"""

import ctypes
import logging
import re
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attnlens_server.bundle import Bundle, Kind
from attnlens_server.bundle.check import REMEDY
from attnlens_server.bundle.files import MappedFiles
from attnlens_server.engine.runtimes.runtime import Division, Runtime, Session, TimeLimit
from attnlens_server.engine.trial import make_trial
from attnlens_server.errors import GraphUnavailableError, StartupError, UnusableGraphError

logger = logging.getLogger(__name__)

SAMPLES = 5
"""Number of compute times that are compared."""
SHORT_S = 0.005
"""A batch that takes longer than this with all threads uses them: one thread would save little."""
RETRY_INTERVAL = 256
"""Number of choices after which the slower way runs once, in case the machine has changed."""
_DIRECTORIES = re.compile(r"(?<![\w.:/])/(?:[^\s/:'\"]+/)+")
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)  # pause after the n-th failure; the last value is repeated


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure to open the graph.

    Attributes:
        message: Error message.
        num_tries: Number of consecutive failures.
        retry_at: Time of the next attempt. None if the failure is permanent.
    """

    message: str
    num_tries: int
    retry_at: float | None


class ThreadChoice:
    """Chooses between all threads and those of one lane for batches that have the machine to themselves.

    Each operator wakes the threads, which for a small batch can take longer than they save, above all in
    int8. This depends on the processor, the model and the precision, so the compute times of batches of
    similar size (a power of two) are compared. They use all threads first, and then those of one lane, up to
    `SAMPLES` times each.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[int, bool], deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        self._num_choices = 0

    def uses_all(self, num_tokens: int) -> bool:
        """Return whether a batch with this number of computed tokens uses all threads."""
        size = num_tokens.bit_length()
        with_all, with_some = self._times[size, True], self._times[size, False]
        if len(with_all) < SAMPLES or (all_s := statistics.median(with_all)) > SHORT_S:
            return True
        if len(with_some) < SAMPLES and max(with_some, default=0.0) < 2 * all_s:
            return False
        self._num_choices += 1
        is_retry = self._num_choices % RETRY_INTERVAL == 0
        return (all_s <= statistics.median(with_some)) is not is_retry

    def add(self, num_tokens: int, compute_s: float, *, used_all: bool) -> None:
        """Add the compute time of a batch."""
        self._times[num_tokens.bit_length(), used_all].append(compute_s)


class Sessions:
    """Opens each session on first use. Thread-safe.

    If opening fails for lack of memory or time, it is retried after increasing pauses. It is not retried if
    the graph was altered or does not match its manifest.
    """

    def __init__(
        self,
        open_session: Callable[[Division], Session],
        *,
        threads: int,
        num_lanes: int,
        divides_threads: bool = True,
        check_files: Callable[[], None] = lambda: None,
        public: Callable[[str], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initialize without opening a session.

        Args:
            open_session: Opens the graph for a division of the machine, and runs trial batches.
            threads: Number of threads of a batch that has the machine to itself.
            num_lanes: Number of concurrent batches.
            divides_threads: Whether concurrent batches share the threads. If False, one session runs all
                batches.
            check_files: Raises `UnusableGraphError` if an open session can no longer be trusted.
            public: Removes from a message what clients must not know. The log has the whole message.
            clock: Monotonic clock, in seconds.
        """
        self._open_session = open_session
        self._check_files = check_files
        self._public = public
        self._clock = clock
        side_by_side = Division(max(1, threads // num_lanes) if divides_threads else threads, num_lanes)
        self._divisions: Mapping[bool, Division] = {
            True: Division(threads, 1) if divides_threads else side_by_side,
            False: side_by_side,
        }
        # Invariant: a division has at most one session, and one thread at a time opens a session.
        self._opening = threading.Lock()
        self._sessions: dict[Division, Session] = {}
        self._failure: _Failure | None = None
        self.opening_s = 0.0
        """Time that the last opening of a session took."""
        self.on_change: Callable[[bool], None] = lambda _: None
        """Called with whether the graph is usable, in any thread, whenever that changes."""

    @property
    def providers(self) -> tuple[str, ...]:
        """Execution providers, the preferred one first. Empty until a session is open."""
        return next((session.providers for session in list(self._sessions.values())), ())

    @property
    def are_usable(self) -> bool:
        """Whether no attempt to open a session was made, or the last one succeeded."""
        return self._failure is None

    @property
    def is_side_by_side_open(self) -> bool:
        """Whether the graph has a session of its own for concurrent batches, and it is open."""
        side_by_side = self._divisions[False]
        return side_by_side != self._divisions[True] and side_by_side in self._sessions

    def open_all(self) -> None:
        """Open both sessions.

        Raises:
            StartupError: A session cannot be opened.
        """
        with self._opening:
            for division in self._divisions.values():
                if division not in self._sessions:
                    started = self._clock()
                    self._keep(division, self._open_session(division))
                    self.opening_s = self._clock() - started

    def get(self, *, has_whole_machine: bool) -> Session:
        """Return the session for a batch.

        Raises:
            GraphUnavailableError: The session cannot be opened or can no longer be trusted. Each call raises
                a new instance, because an exception keeps the frames of its traceback alive.
        """
        division = self._divisions[has_whole_machine]
        if (session := self._sessions.get(division)) is None:
            with self._opening:
                session = self._sessions.get(division) or self._open(division)
        self.check_files()
        return session

    def discard(self, session: Session) -> None:
        """Open a new session instead of this one for the next batch."""
        with self._opening:
            self._sessions = {key: kept for key, kept in self._sessions.items() if kept is not session}

    def check_files(self) -> None:
        """Verify that the files that the open sessions have memory-mapped are unchanged.

        Raises:
            GraphUnavailableError: A file was altered. The sessions are closed permanently.
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
        self.opening_s = self._clock() - started
        self._keep(division, session)
        if self._failure is not None:
            self._failure = None
            self.on_change(True)  # noqa: FBT003 - its only argument
        return session

    def _keep(self, division: Division, session: Session) -> None:
        session.check_results = self.check_files
        self._sessions[division] = session

    def _fail(self, error: StartupError, duration_s: float) -> None:
        """Record a failure. The pause until the next attempt is at least as long as the failed attempt."""
        num_tries = 1 if self._failure is None else self._failure.num_tries + 1
        pause_s = max(PAUSES_S[min(num_tries, len(PAUSES_S)) - 1], duration_s)
        is_final = isinstance(error, UnusableGraphError)
        retry_at = None if is_final else self._clock() + pause_s
        outlook = "it will not be retried" if is_final else f"next attempt in {pause_s:g} s"
        logger.error("%s; %s", error, outlook)
        was_usable = self._failure is None
        self._failure = _Failure(str(error), num_tries, retry_at)
        if was_usable:
            self.on_change(False)  # noqa: FBT003 - its only argument

    def _unavailable(self) -> GraphUnavailableError:
        assert self._failure is not None  # noqa: S101 - ensured by the callers
        message, retry_at = self._public(self._failure.message), self._failure.retry_at
        if retry_at is None:
            return GraphUnavailableError(f"the graph cannot be used: {message}")
        wait_s = max(retry_at - self._clock(), 0.1)
        return GraphUnavailableError(
            f"the graph cannot be used now: {message}; try again in {wait_s:.1f} s", retry_after_s=wait_s
        )


class GraphOpener:
    """Opens, verifies and tries sessions of one graph of a bundle.

    Only one thread at a time may open a session. Any thread may call `check_files` and `stop`.
    """

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
        # Invariant: once `_is_stopped` is set, every limit in use is over.
        self._stopping = threading.Lock()
        self._is_stopped = False
        self._limit: TimeLimit | None = None
        self.trial_batches: tuple[tuple[int, ...], ...] = ((1,),)
        """Trial batches of each session, as numbers of tokens per text."""
        self.longest_trial: int | None = None
        """Tokens of an additional trial text for the first session only, because it may take long."""
        self.max_batch_tokens: int | None = None
        """Maximum tokens of the batches that are compared with single texts. If None, none are compared."""

    def __call__(self, division: Division) -> Session:
        """Open the graph for a division of the machine, and run trial batches.

        Raises:
            UnusableGraphError: A file was altered, or the graph or its results do not match the manifest.
            StartupError: The runtime cannot open or run the graph in time.
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
                if self.longest_trial is not None and self.max_batch_tokens is not None:
                    self._trial.check_batches(session, self.longest_trial, self.max_batch_tokens, limit)
            except Exception as error:
                if limit.is_over:
                    raise StartupError(self._overdue()) from error
                if isinstance(error, StartupError):
                    raise
                raise StartupError(f"{self._path} cannot be run: {error}") from error
            # Verify again: the runtime read unaltered files only if they match before and after.
            self._mapped = self._bundle.verify_graph(self._graph)
        self.longest_trial = None
        give_back_freed_memory()
        logger.debug(
            "graph opened and tested",
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
        """Verify that the memory-mapped files are unchanged.

        Raises:
            UnusableGraphError: A file was altered.
        """
        self._mapped.check()

    def public(self, message: str) -> str:
        """Return a message without directories."""
        for directory in {self._bundle.directory, self._bundle.directory.resolve()}:
            message = message.replace(f"{directory}/", "")
        return _DIRECTORIES.sub("", message)

    def stop(self) -> None:
        """Abort the current attempt to open a session and all later ones."""
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
            f"opening and testing {self._path} took more than {self._timeout_s:g} s: use a larger "
            f"--start-timeout-s, or {REMEDY}"
        )


def give_back_freed_memory() -> None:
    """Return freed memory to the operating system, which glibc does only on request.

    Opening a graph frees much memory: the file's contents, and weights before their conversion.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
