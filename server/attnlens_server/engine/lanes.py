"""Lanes of a graph: worker threads that take batches from the queue, run them and return the results."""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence

from attnlens_server.engine.batch import Batch, Item, ItemResult, pad, reductions
from attnlens_server.engine.queue import ItemQueue
from attnlens_server.engine.runtimes.runtime import Session
from attnlens_server.engine.scheduler import Scheduler
from attnlens_server.engine.sessions import Sessions
from attnlens_server.errors import InternalError

logger = logging.getLogger(__name__)

MIN_RETRY_S = 0.05
MAX_RETRY_S = 10.0


def _nothing_more() -> None:
    """Do nothing. Default of `Lanes.on_death`."""


class Lanes:
    """A queue and the threads that run its items in batches, on shared sessions.

    Attributes:
        sessions: Sessions that run the batches.
        on_death: Called when a lane ends because of an internal error, after all waiting items have failed.
    """

    def __init__(
        self, name: str, sessions: Sessions, scheduler: Scheduler, *, num_lanes: int, pad_token_id: int
    ) -> None:
        self.sessions = sessions
        self.on_death: Callable[[], object] = _nothing_more
        self._queue = ItemQueue(num_lanes)
        self._scheduler = scheduler
        self._pad_token_id = pad_token_id
        # Protects the three counters against concurrent writes. Readers do not acquire the lock, so one
        # counter may include a batch that another does not include yet.
        self._counting = threading.Lock()
        self.num_live_tokens = 0
        self.num_computed_tokens = 0  # padding included
        self._tokens_per_s = 0.0  # moving average over all lanes
        self._threads = [
            threading.Thread(target=self._run_lane, name=f"{name}-{lane}", daemon=True)
            for lane in range(num_lanes)
        ]

    # --- worker threads ---------------------------------------------------------------------------

    def _run_lane(self) -> None:
        """Run batches until the queue is closed. If one lane fails, all lanes stop."""
        batch: Batch | None = None
        try:
            while batch := self._queue.take(self._scheduler.choose):
                self._run(batch)
                batch = None  # otherwise, an idle lane keeps the results of its last batch in memory
        except BaseException as error:
            logger.critical("a lane died: the server cannot continue", exc_info=True)
            fail_items(batch.items if batch else (), error)
            self._queue.fail_all(lambda: InternalError("the engine has stopped: ask another server"))
            self.on_death()

    def _run(self, batch: Batch) -> None:
        """Run a batch and resolve the futures of its items.

        If the batch fails, its items run one by one, so that one item cannot fail the others.
        """
        session = None
        can_isolate = False
        try:
            session = self.sessions.get(has_whole_machine=batch.has_whole_machine)
            for item, result in zip(batch.items, self._compute(batch, session), strict=True):
                item.future.set_result(result)
            del item, result
        except Exception as error:  # noqa: BLE001 - no failure of a batch ends the lane
            can_isolate = session is not None and len(batch.items) > 1
            if can_isolate:
                logger.warning(
                    "a batch of %d texts failed, running them one by one: %s", len(batch.items), error
                )
            else:
                # The futures reference the error and its frames, which must not reference the items.
                traceback.clear_frames(error.__traceback__)
                fail_items(batch.items, error)
        if can_isolate:
            for item in batch.items:
                self._run(Batch([item], batch.has_whole_machine))
            del item
        del batch  # an error references the frames below and, through them, this one

    def _compute(self, batch: Batch, session: Session) -> list[ItemResult]:
        items = batch.items
        length = self._scheduler.padded_length(max(item.num_tokens for item in items))
        inputs = pad(items, length, self._pad_token_id)
        names = tuple(dict.fromkeys(name for item in items for name in item.output_names))
        started = time.monotonic()
        outputs = session.run(inputs, names)
        parts = [
            (
                tuple(outputs.part(row, item.num_tokens, wanted) for wanted in item.wanted),
                reductions(outputs, row, item),
            )
            for row, item in enumerate(items)
        ]
        compute_s = time.monotonic() - started
        num_parallel = 1 if batch.has_whole_machine else len(self._threads)
        self._count(items, inputs.input_ids.size, compute_s / num_parallel)
        if logger.isEnabledFor(logging.DEBUG):
            _log_batch(batch, inputs.input_ids.size, compute_s)
        return [
            ItemResult(arrays, queue_s=started - item.queued_at, compute_s=compute_s, reduced=of_reductions)
            for item, (arrays, of_reductions) in zip(items, parts, strict=True)
        ]

    # --- other threads ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, items: Sequence[Item]) -> None:
        """Queue items.

        Raises:
            ShuttingDownError: The lanes are closed.
        """
        self._queue.put(items)

    def close(self) -> None:
        """Run all waiting items, then stop."""
        self._queue.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    @property
    def num_waiting_tokens(self) -> int:
        """Number of waiting tokens. May be outdated immediately."""
        return self._queue.num_tokens

    @property
    def num_idle(self) -> int:
        """Number of idle lanes. May be outdated immediately."""
        return self._queue.num_idle

    def retry_after_s(self) -> float:
        """Return a retry delay for rejected requests, from MIN_RETRY_S to MAX_RETRY_S."""
        wait_s = self.num_waiting_tokens / self._tokens_per_s if self._tokens_per_s > 0 else 0.0
        return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)

    def _count(self, items: Iterable[Item], computed_tokens: int, machine_s: float) -> None:
        live_tokens = sum(item.num_tokens for item in items)
        rate = live_tokens / max(machine_s, 1e-6)
        with self._counting:
            self.num_live_tokens += live_tokens
            self.num_computed_tokens += computed_tokens
            self._tokens_per_s = rate if self._tokens_per_s == 0 else 0.9 * self._tokens_per_s + 0.1 * rate


def _log_batch(batch: Batch, computed_tokens: int, compute_s: float) -> None:
    num_tokens = sum(item.num_tokens for item in batch.items)
    logger.debug(
        "batch",
        extra={
            "lane": threading.current_thread().name,
            "texts": len(batch.items),
            "tokens": num_tokens,
            "padding": computed_tokens - num_tokens,
            "whole_machine": batch.has_whole_machine,
            "compute_ms": round(1000 * compute_s, 2),
        },
    )


def fail_items(items: Iterable[Item], error: BaseException) -> None:
    """Fail the items that have no result yet."""
    for item in items:
        if not item.future.done():
            item.future.set_exception(error)
