"""Computes parts with one or several models. Reading, computing and writing overlap.

    feeder: reads parts ──▶ queue of batches ──▶ workers: call a model ──▶ queue of finished parts ──▶ caller

One thread feeds. Each worker has one call in flight. The number of parts in memory is limited.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from attnlens_bulk.errors import ResumeError
from attnlens_bulk.parts import Part
from attnlens_bulk.vectors import Result, VectorKind, compute
from attnlens_client import DeadlineExceededError, OverloadedError, UnavailableError
from attnlens_client.client import BlockingMethods

MAX_PARTS = 3
"""Parts in memory: one that is read, one that is computed, and one that is written."""
_QUEUED_BATCHES = 2  # per worker
_PROGRESS_INTERVAL_S = 0.5
_OTHER_MODEL_MAY_SUCCEED = (DeadlineExceededError, OverloadedError, UnavailableError)


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
        batch_size: int,
        in_flight: int,
    ) -> None:
        """Initialize without starting.

        Args:
            models: Clients or local models.
            kind: Kind of vectors.
            options: See `compute`. Unless `truncate` is set, texts that exceed the model's maximum are
                rejected.
            like: Result whose model all others must have.
            batch_size: Number of texts per call.
            in_flight: Number of concurrent calls per model.
        """
        self.tally = Tally()
        self._models = [model for model in models for _ in range(in_flight)]
        self._kind = kind
        self._may_truncate = options["truncate"]
        self._options = {**options, "truncate": True}  # the usage reports long texts
        self._like = like
        self._batch_size = batch_size
        self._finished: SimpleQueue[Part | BaseException | None] = SimpleQueue()
        self._free_parts = threading.Semaphore(MAX_PARTS)
        # Protects the fields below, `tally`, and the results of parts.
        self._changed = threading.Condition()
        self._queue: deque[_Batch] = deque()
        self._num_running = 0
        self._num_workers = len(self._models)
        self._is_fed = False
        self._is_stopped = False

    @contextmanager
    def run(self, parts: Iterable[Part]) -> Iterator[Iterator[Part | None]]:
        """Start, and return an iterator of finished parts, with None in between to report progress.

        The end of the block stops all threads. The iterator raises the error of `parts` after the parts that
        were read before it, and an error of the models if no model can continue.
        """
        threads = [threading.Thread(target=self._feed, args=(parts,), name="bulk-feed", daemon=True)]
        threads += [
            threading.Thread(target=self._work, args=(model,), name="bulk-call", daemon=True)
            for model in self._models
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
            for thread in threads:
                if not is_interrupted:
                    thread.join()

    def release(self) -> None:
        """Report that a part was written, so that another one can be read."""
        self._free_parts.release()

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
        limit = _QUEUED_BATCHES * len(self._models)
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or len(self._queue) < limit)
            if not self._is_stopped:
                self._queue.append(batch)
                self._changed.notify_all()

    # --- workers ----------------------------------------------------------------------------------

    def _work(self, model: BlockingMethods) -> None:
        while (batch := self._take()) is not None:
            try:
                texts = batch.part.texts[batch.texts.start : batch.texts.stop]
                result = compute(model, self._kind, texts, self._options)
                self._check(result)
            except _OTHER_MODEL_MAY_SUCCEED as error:
                self._give_up(batch, error)
                return
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                self._fail(error)
                return
            self._store(batch, result)

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

    def _give_up(self, batch: _Batch, error: BaseException) -> None:
        """Leave the batch to the other workers."""
        with self._changed:
            self._queue.appendleft(batch)
            self._num_running -= 1
            self._num_workers -= 1
            self._changed.notify_all()
            is_last = self._num_workers == 0
        if is_last:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
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

    def _store(self, batch: _Batch, result: Result) -> None:
        part, texts = batch
        with self._changed:
            part.vectors[texts.start : texts.stop] = result.texts
            for index, usage in zip(texts, result.usages, strict=True):
                if usage.truncated and not self._may_truncate:
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
