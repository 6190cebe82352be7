"""Computes parts with one or several models. Reading, computing and writing overlap.

    feeder: reads parts ──▶ queue of batches ──▶ workers: call a model ──▶ queue of finished parts ──▶ caller

One thread feeds. Each worker has one call in flight. The number of parts in memory is limited.

A worker whose call fails for a reason that may pass leaves its batch to the others, waits until its model
answers, and continues. If the calls of all workers fail for longer than the patience, the run ends.
"""

import math
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from attnlens_bulk.errors import ResumeError, ServersUnavailableError
from attnlens_bulk.parts import Part
from attnlens_bulk.vectors import Result, VectorKind, compute
from attnlens_client import (
    AttnlensError,
    DeadlineExceededError,
    OverloadedError,
    RateLimitedError,
    UnavailableError,
)
from attnlens_client.client import BlockingMethods
from attnlens_client.errors import is_reset

MAX_PARTS = 3
"""Parts in memory: one that is read, one that is computed, and one that is written."""
_QUEUED_BATCHES = 2  # per worker
_PROGRESS_INTERVAL_S = 0.5
_BUSY = (OverloadedError, RateLimitedError)
_TRANSIENT = (DeadlineExceededError, UnavailableError, *_BUSY)
_FIRST_DELAY_S, _MAX_DELAY_S = 0.25, 5.0


def is_transient(error: AttnlensError) -> bool:
    """Return whether the same call may succeed later."""
    is_closed = error.message.endswith("was closed")  # by its owner, while gRPC cancelled the call
    return (
        isinstance(error, _TRANSIENT)
        or error.retry_delay_s is not None
        or (is_reset(error) and not is_closed)
    )


def name_of(model: BlockingMethods) -> str:
    """Return the address of a client, or the bundle of a local model."""
    address = getattr(model, "address", None)
    if address is None:
        return repr(model)
    return address if isinstance(address, str) else ", ".join(address)


def servers_unavailable(failures: Mapping[str, AttnlensError], elapsed_s: float) -> ServersUnavailableError:
    """Return the error for a run that ends because no call succeeds.

    Args:
        failures: Last error by the name of its model.
        elapsed_s: Time since the first of the calls that failed.
    """
    reasons = "; ".join(f"{name}: {error.message}" for name, error in failures.items())
    return ServersUnavailableError(
        f"no call has succeeded for {elapsed_s:.1f} s ({reasons}). Start the servers and repeat the command, "
        "which continues after the finished parts. To wait longer, increase the patience"
    )


@dataclass(slots=True, eq=False)
class _Worker:
    """A thread that calls a model.

    Attributes:
        model: Client or local model.
        error: Error of its last call. None if the call succeeded.
        delay_s: Delay after the next error.
    """

    model: BlockingMethods
    error: AttnlensError | None = None
    delay_s: float = field(default_factory=lambda: _FIRST_DELAY_S)


class _Batch(NamedTuple):
    part: Part
    texts: range


@dataclass(slots=True)
class Tally:
    """Computed texts.

    Attributes:
        texts: Number of texts.
        tokens: Number of their tokens.
        truncated: Number of texts that were too long.
        work: Fraction of the input that was computed.
        position: Fraction of the input up to the last of the texts.
    """

    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    work: float = 0.0
    position: float = 0.0


class Pipeline:
    """Computes the vectors of parts.

    Attributes:
        tally: Computed texts and tokens. May be read at any time.
    """

    def __init__(
        self,
        models: Sequence[BlockingMethods],
        kind: VectorKind,
        options: dict[str, Any],
        like: Result,
        *,
        max_tokens: int,
        batch_size: int,
        in_flight: int,
        patience_s: float = math.inf,
    ) -> None:
        """Initialize without starting.

        Args:
            models: Clients or local models.
            kind: Kind of vectors.
            options: See `compute`. Unless `truncate` is set, texts that exceed the model's maximum are
                rejected.
            like: Result whose model all others must have.
            max_tokens: Token limit that all models must have.
            batch_size: Number of texts per call.
            in_flight: Number of concurrent calls per model.
            patience_s: Time after which the run ends if no call succeeds.
        """
        self.tally = Tally()
        self._workers = [_Worker(model) for model in models for _ in range(in_flight)]
        self._kind = kind
        self._may_truncate = options["truncate"]
        self._options = {**options, "truncate": True}  # the usage reports long texts
        self._like = like
        self._max_tokens = max_tokens
        self._patience_s = patience_s
        self._batch_size = batch_size
        self._finished: SimpleQueue[Part | BaseException | None] = SimpleQueue()
        self._free_parts = threading.Semaphore(MAX_PARTS)
        # Protects the fields below, `tally`, and the results of parts.
        self._changed = threading.Condition()
        self._queue: deque[_Batch] = deque()
        self._num_running = 0
        self._failing_since: float | None = None  # first failure after the last success
        self._is_fed = False
        self._is_stopped = False

    @contextmanager
    def run(self, parts: Iterable[Part]) -> Iterator[Iterator[Part | None]]:
        """Start, and return an iterator of finished parts, with None in between to report progress.

        The end of the block stops all threads. The iterator raises the error of `parts` after the parts that
        were read before it, an error of a model that is not transient, and ServersUnavailableError.
        """
        threads = [threading.Thread(target=self._feed, args=(parts,), name="bulk-feed", daemon=True)]
        threads += [
            threading.Thread(target=self._work, args=(worker,), name="bulk-call", daemon=True)
            for worker in self._workers
        ]
        for thread in threads:
            thread.start()
        is_interrupted = False
        try:
            yield self._results()
        except KeyboardInterrupt:
            is_interrupted = True  # calls may take long, and the threads end after them
            raise
        finally:
            with self._changed:
                self._is_stopped = True
                self._queue.clear()
                self._changed.notify_all()
            self._free_parts.release(MAX_PARTS)
            for thread, worker in zip(threads, [None, *self._workers], strict=True):
                # A model that is away may delay the end of its call until the timeout.
                if not is_interrupted and (worker is None or worker.error is None):
                    thread.join()

    def release(self) -> None:
        """Report that a part was written, so that another one can be read."""
        self._free_parts.release()

    def failures(self) -> dict[str, AttnlensError]:
        """Return the last error of each model none of whose calls succeed, by its name."""
        with self._changed:
            errors: dict[str, list[AttnlensError | None]] = {}
            for worker in self._workers:
                errors.setdefault(name_of(worker.model), []).append(worker.error)
            return {name: last for name, found in errors.items() if all(found) and (last := found[-1])}

    def _results(self) -> Iterator[Part | None]:
        while True:
            try:
                finished = self._finished.get(timeout=_PROGRESS_INTERVAL_S)
            except Empty:
                yield None
                continue
            if finished is None:
                return
            if isinstance(finished, BaseException):
                raise finished
            yield finished

    # --- feeder -----------------------------------------------------------------------------------

    def _feed(self, parts: Iterable[Part]) -> None:
        end: BaseException | None = None
        try:
            remaining = iter(parts)
            self._free_parts.acquire()
            while not self._is_stopped and (part := next(remaining, None)) is not None:
                if not part.texts:
                    self._finished.put(part)
                for texts in part.batches(self._batch_size):
                    self._put(_Batch(part, texts))
                self._free_parts.acquire()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            end = error
        with self._changed:
            self._is_fed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_stopped or not (self._queue or self._num_running))
        self._finished.put(end)

    def _put(self, batch: _Batch) -> None:
        limit = _QUEUED_BATCHES * len(self._workers)
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or len(self._queue) < limit)
            if not self._is_stopped:
                self._queue.append(batch)
                self._changed.notify_all()

    # --- workers ----------------------------------------------------------------------------------

    def _work(self, worker: _Worker) -> None:
        while (batch := self._take()) is not None:
            try:
                texts = batch.part.texts[batch.texts.start : batch.texts.stop]
                result = compute(worker.model, self._kind, texts, self._options)
                self._check(result)
            except AttnlensError as error:
                if not is_transient(error):
                    self._fail(error)
                    return
                self._put_back(batch, worker, error)
                self._recover(worker)
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                self._fail(error)
                return
            else:
                self._store(batch, result, worker)

    def _recover(self, worker: _Worker) -> None:
        """Wait until the model of a worker answers. Its batch is with the other workers."""
        while self._waited(worker) and not isinstance(worker.error, _BUSY):
            try:
                worker.model.get_model(self._options.get("model") or "")
            except AttnlensError as error:
                if not is_transient(error):
                    self._fail(error)
                    return
                worker.error = error
            else:
                return

    def _waited(self, worker: _Worker) -> bool:
        """Wait before the next call. Return False if there is none, because the pipeline has stopped."""
        asked_s = (worker.error.retry_delay_s if worker.error else None) or 0.0
        end = time.monotonic() + max(worker.delay_s * random.uniform(0.5, 1.0), asked_s)  # noqa: S311
        worker.delay_s = min(2 * worker.delay_s, _MAX_DELAY_S)
        while not self._is_stopped:
            now = time.monotonic()
            with self._changed:
                since = self._failing_since
                is_alone = all(other.error is not None for other in self._workers)
                left_s = self._patience_s - (now - since) if is_alone and since is not None else math.inf
                if left_s > 0 and now < end:
                    self._changed.wait(min(end - now, left_s))
                    continue
            if left_s <= 0 and since is not None:
                self._fail(servers_unavailable(self.failures(), now - since), worker.error)
                return False
            return True
        return False

    def _take(self) -> _Batch | None:
        """Wait for a batch. Return None after the last one."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopped or self._queue or (self._is_fed and not self._num_running)
            )
            if self._is_stopped or not self._queue:
                return None
            self._num_running += 1
            self._changed.notify_all()
            return self._queue.popleft()

    def _put_back(self, batch: _Batch, worker: _Worker, error: AttnlensError) -> None:
        """Leave a batch to the other workers."""
        with self._changed:
            worker.error = error
            if self._failing_since is None:
                self._failing_since = time.monotonic()
            self._queue.appendleft(batch)
            self._num_running -= 1
            self._changed.notify_all()

    def _fail(self, error: BaseException, cause: BaseException | None = None) -> None:
        if cause is not None:
            error.__cause__ = cause
        with self._changed:
            if self._is_stopped:
                return  # the first error counts
            self._is_stopped = True
            self._changed.notify_all()
        self._finished.put(error)

    def _check(self, result: Result) -> None:
        for name, value in self._like.identity.items():
            actual = result.identity[name]
            if actual != value:
                raise ResumeError(
                    f"the model's {name} changed from {value!r} to {actual!r}: restart the previous "
                    "model and repeat the command, or start a new run"
                )
        for usage in result.usages:
            if self._max_tokens and usage.num_tokens != min(usage.num_tokens_total, self._max_tokens):
                raise ResumeError(
                    f"a server used {usage.num_tokens} of {usage.num_tokens_total} tokens of a text, but the "
                    f"max_tokens of the run is {self._max_tokens}: use servers with this limit and repeat "
                    "the command, or start a new run"
                )

    def _store(self, batch: _Batch, result: Result, worker: _Worker) -> None:
        part, texts = batch
        with self._changed:
            worker.error, worker.delay_s = None, _FIRST_DELAY_S
            self._failing_since = None
            part.vectors[texts.start : texts.stop] = result.texts
            for index, usage in zip(texts, result.usages, strict=True):
                if usage.truncated and self._may_truncate:
                    part.truncated.add(index)
                elif usage.truncated:
                    total, limit = usage.num_tokens_total, usage.num_tokens
                    part.reject(index, f"the text has {total} tokens, but the limit is {limit}")
            self.tally.texts += len(texts)
            self.tally.tokens += sum(usage.num_tokens for usage in result.usages)
            self.tally.truncated += sum(usage.truncated for usage in result.usages)
            part.num_missing -= len(texts)
            begin, end = part.fractions
            self.tally.work += (end - begin) * len(texts) / len(part.texts)
            position = end - (end - begin) * part.num_missing / len(part.texts)
            self.tally.position = max(self.tally.position, position)
            self._num_running -= 1
            if part.num_missing == 0:
                self._finished.put(part)
            self._changed.notify_all()
