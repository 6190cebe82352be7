"""The lanes of a graph: threads that take a batch, run it, and hand each text its part."""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence

from attnlens_server.engine.batch import Batch, pad
from attnlens_server.engine.item import Item, ItemResult
from attnlens_server.engine.outputs import reductions
from attnlens_server.engine.queue import ItemQueue
from attnlens_server.engine.scheduler import Scheduler
from attnlens_server.engine.session import Session
from attnlens_server.engine.sessions import Sessions
from attnlens_server.errors import InternalError

logger = logging.getLogger(__name__)

MIN_RETRY_S = 0.05
MAX_RETRY_S = 10.0


def _nothing_more() -> None:
    """Do nothing: for lanes that nobody watches."""


class Lanes:
    """A queue, and threads that run its items, a batch each, on sessions that they share.

    Attributes:
        sessions: what runs the batches.
        on_death: called by a lane that ends by a fault of ours, after everything that waits has failed.
    """

    def __init__(
        self, name: str, sessions: Sessions, scheduler: Scheduler, *, num_lanes: int, pad_token_id: int
    ) -> None:
        self.sessions = sessions
        self.on_death: Callable[[], object] = _nothing_more
        self._queue = ItemQueue(num_lanes)
        self._scheduler = scheduler
        self._pad_token_id = pad_token_id
        # Protects the three counts against lanes that write at the same time. Readers take no lock: they may
        # see a batch in one count and not yet in another.
        self._counting = threading.Lock()
        self.num_live_tokens = 0
        self.num_computed_tokens = 0  # padding included
        self._tokens_per_s = 0.0  # of all lanes together, in their last batches
        self._threads = [
            threading.Thread(target=self._run_lane, name=f"{name}-{lane}", daemon=True)
            for lane in range(num_lanes)
        ]

    # --- the story --------------------------------------------------------------------------------

    def _run_lane(self) -> None:
        """Schedule, run, hand out, until nothing more comes. A lane that dies takes the others with it."""
        batch: Batch | None = None
        try:
            while batch := self._queue.take(self._scheduler.choose):
                self._run(batch)
                batch = None  # or an idle lane would keep the results of its last batch
        except BaseException as error:
            logger.critical("a lane has died: the server can't go on", exc_info=True)
            fail_items(batch.items if batch else (), error)
            self._queue.fail_all(lambda: InternalError("the engine has stopped: ask another server"))
            self.on_death()

    def _run(self, batch: Batch) -> None:
        """Run a batch and hand out what it brings.

        Where it fails, its texts run one by one, so that one can't spoil the others.
        """
        session = None
        can_isolate = False
        try:
            session = self.sessions.get(has_whole_machine=batch.has_whole_machine)
            for item, result in zip(batch.items, self._compute(batch, session), strict=True):
                item.future.set_result(result)
            del item, result
        except Exception as error:  # noqa: BLE001 - what a batch may do does not end the lane
            can_isolate = session is not None and len(batch.items) > 1
            if can_isolate:
                logger.warning(
                    "a batch of %d texts failed, running them one by one: %s", len(batch.items), error
                )
            else:
                # Items hold the error, and so its frames: these must not hold the items.
                traceback.clear_frames(error.__traceback__)
                fail_items(batch.items, error)
        if can_isolate:
            for item in batch.items:
                self._run(Batch([item], batch.has_whole_machine))
            del item
        del batch  # an error holds the frames below, and these hold this one

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

    # --- what others see of it --------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, items: Sequence[Item]) -> None:
        """Let items wait for a lane.

        Raises:
            ShuttingDownError: the lanes are closed.
        """
        self._queue.put(items)

    def close(self) -> None:
        """Run what waits, then stop."""
        self._queue.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    @property
    def num_waiting_tokens(self) -> int:
        """The tokens that wait. Exact when read, perhaps not a moment later."""
        return self._queue.num_tokens

    @property
    def num_idle(self) -> int:
        """The lanes that wait for items. Exact when read, perhaps not a moment later."""
        return self._queue.num_idle

    def retry_after_s(self) -> float:
        """Return a hint for those who are told to come back later, from MIN_RETRY_S to MAX_RETRY_S."""
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
    """Tell those that have no result yet."""
    for item in items:
        if not item.future.done():
            item.future.set_exception(error)
