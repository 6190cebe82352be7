"""The lanes of a graph: threads that take a batch, run it, and hand each text its slice."""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens_server.engine.item import Item, ItemResult
from attnlens_server.engine.outputs import slice_item
from attnlens_server.engine.pack import BatchLimits, LengthBuckets, pack, share
from attnlens_server.engine.queue import ItemQueue
from attnlens_server.engine.session import Session
from attnlens_server.engine.sessions import Sessions
from attnlens_server.errors import InternalError

logger = logging.getLogger(__name__)

MIN_RETRY_S = 0.05
MAX_RETRY_S = 10.0


def _nothing_more() -> None:
    """Do nothing: for a worker that nobody watches."""


class SessionWorker:
    """A queue, and lanes: threads that run its items, a batch each, on sessions that they share.

    Attributes:
        queue: where items wait.
        on_death: called by a lane that ends by a fault of ours, after everything that waits has failed.
    """

    def __init__(
        self,
        name: str,
        sessions: Sessions,
        limits: BatchLimits,
        *,
        num_lanes: int,
        pad_token_id: int,
        buckets: LengthBuckets | None = None,
    ) -> None:
        def choose(lengths: Sequence[int], num_idle: int) -> list[int]:
            padded = [buckets.round_up(length) for length in lengths] if buckets else lengths
            return pack(padded, share(padded, limits, num_idle))

        self.queue = ItemQueue(choose, num_lanes)
        self.sessions = sessions
        self.on_death: Callable[[], object] = _nothing_more
        self._buckets = buckets
        self._pad_token_id = pad_token_id
        # Protects the three counts against lanes that write at the same time. Readers take no lock: they may
        # see a batch in one count and not yet in another.
        self._counting = threading.Lock()
        self.num_live_tokens = 0
        self.num_computed_tokens = 0  # padding included
        self._tokens_per_s = 0.0  # of all lanes together, in their last batches
        self._lanes = [
            threading.Thread(target=self._run_lane, name=f"{name}-{lane}", daemon=True)
            for lane in range(num_lanes)
        ]

    def start(self) -> None:
        """Start the lanes."""
        for lane in self._lanes:
            lane.start()

    def close(self) -> None:
        """Run what waits, then stop."""
        self.queue.close()
        for lane in self._lanes:
            if lane.ident is not None:
                lane.join()

    def retry_after_s(self) -> float:
        """Return a hint for those who are told to come back later, from MIN_RETRY_S to MAX_RETRY_S."""
        wait_s = self.queue.num_tokens / self._tokens_per_s if self._tokens_per_s > 0 else 0.0
        return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)

    def _run_lane(self) -> None:
        """Run batches until the queue is closed. A lane that can't go on takes the worker with it."""
        try:
            self._main_loop()
        except BaseException:
            logger.critical("a lane has died: the server can't go on", exc_info=True)
            self.queue.fail_all(lambda: InternalError("the engine has stopped: ask another server"))
            self.on_death()

    def _main_loop(self) -> None:
        while (batch := self.queue.take()).items:
            live = [item for item in batch.items if item.future.set_running_or_notify_cancel()]
            try:
                if live:
                    self._run_isolating_faults(live, has_whole_machine=batch.has_whole_machine)
            except BaseException as error:
                fail_items(live, error)
                raise
            del batch, live  # or an idle lane would keep the results of its last batch

    def _run_isolating_faults(self, items: list[Item], *, has_whole_machine: bool) -> None:
        """Run a batch; where it fails, run its texts one by one, so that one can't spoil the others."""
        if not self._try_batch(items, has_whole_machine=has_whole_machine):
            for item in items:
                self._try_batch([item], has_whole_machine=has_whole_machine)
            del item
        del items  # an error holds the frames below, and these hold this one

    def _try_batch(self, items: list[Item], *, has_whole_machine: bool) -> bool:
        """Run a batch, and tell its items what came of it; False where they have to be run one by one."""
        session = None
        try:
            session = self.sessions.get(has_whole_machine=has_whole_machine)
            self._run_batch(items, session, has_whole_machine=has_whole_machine)
        except Exception as error:  # noqa: BLE001 - what a batch may do does not end the lane
            if session is not None and len(items) > 1:
                logger.warning("a batch of %d texts failed, running them one by one: %s", len(items), error)
                return False
            # Items hold the error, and so its frames: these must not hold the items.
            traceback.clear_frames(error.__traceback__)
            fail_items(items, error)
            del items
        return True

    def _run_batch(self, batch: list[Item], session: Session, *, has_whole_machine: bool) -> None:
        input_ids, attention_mask = pad_batch(batch, self._pad_token_id, self._buckets)
        names = tuple(dict.fromkeys(name for item in batch for name in item.output_names))
        started = time.monotonic()
        batch_outputs = session.run(input_ids, attention_mask, names)
        slices = [slice_item(batch_outputs, row, item) for row, item in enumerate(batch)]
        compute_s = time.monotonic() - started
        num_parallel = 1 if has_whole_machine else len(self._lanes)
        self._count(batch, input_ids.size, compute_s / num_parallel)
        for item, outputs in zip(batch, slices, strict=True):
            queue_s = started - item.queued_at
            item.future.set_result(ItemResult(outputs, queue_s=queue_s, compute_s=compute_s))

    def _count(self, batch: list[Item], computed_tokens: int, machine_s: float) -> None:
        live_tokens = sum(item.num_tokens for item in batch)
        rate = live_tokens / max(machine_s, 1e-6)
        with self._counting:
            self.num_live_tokens += live_tokens
            self.num_computed_tokens += computed_tokens
            self._tokens_per_s = rate if self._tokens_per_s == 0 else 0.9 * self._tokens_per_s + 0.1 * rate


def fail_items(items: Sequence[Item], error: BaseException) -> None:
    """Tell those that have no result yet."""
    for item in items:
        if not item.future.done():
            item.future.set_exception(error)


def pad_batch(
    batch: list[Item], pad_token_id: int, buckets: LengthBuckets | None = None
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return ids and mask, both (B, T) int64, T the longest text or its bucket; padding on the right."""
    longest = max(item.num_tokens for item in batch)
    shape = (len(batch), buckets.round_up(longest) if buckets else longest)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    for row, item in enumerate(batch):
        input_ids[row, : item.num_tokens] = item.input_ids
        attention_mask[row, : item.num_tokens] = 1
    return input_ids, attention_mask
