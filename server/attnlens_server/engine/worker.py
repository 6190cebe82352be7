"""The thread that owns a session: takes a batch, runs it, hands each text its slice."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens_server.engine.item import Item, ItemResult, slice_item
from attnlens_server.engine.pack import BatchLimits, pack
from attnlens_server.engine.queue import ItemQueue
from attnlens_server.engine.session import Session
from attnlens_server.errors import GraphUnavailableError, StartupError

logger = logging.getLogger(__name__)

MIN_RETRY_S = 0.05
MAX_RETRY_S = 10.0


class SessionWorker:
    """A queue, and a thread that runs its items on a session that only this thread touches.

    The session is opened by the thread when the first batch arrives.
    """

    def __init__(
        self, name: str, open_session: Callable[[], Session], limits: BatchLimits, pad_token_id: int
    ) -> None:
        self.queue = ItemQueue(lambda lengths: pack(lengths, limits))
        self.num_live_tokens = 0
        self._tokens_per_s = 0.0  # of the last batches, for estimates
        self._open_session = open_session
        self._pad_token_id = pad_token_id
        self._session: Session | None = None
        self._open_failure: GraphUnavailableError | None = None
        self._thread = threading.Thread(target=self._main_loop, name=f"session-{name}", daemon=True)

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers of the session, the preferred one first; empty until it is open."""
        return self._session.providers if self._session is not None else ()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Run what waits, then stop."""
        self.queue.close()
        if self._thread.ident is not None:
            self._thread.join()

    def estimate_wait_s(self) -> float:
        """Return how long what waits will take, for those who are told to come back later."""
        wait_s = self.queue.num_tokens / self._tokens_per_s if self._tokens_per_s > 0 else 0.0
        return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)

    def _main_loop(self) -> None:
        while batch := self.queue.take():
            live = [item for item in batch if item.future.set_running_or_notify_cancel()]
            if live:
                self._run_isolating_faults(live)

    def _run_isolating_faults(self, batch: list[Item]) -> None:
        """Run a batch; where it fails, run its texts one by one, so that one can't spoil the others."""
        try:
            self._run_batch(batch, self._opened())
        except Exception as error:  # noqa: BLE001 - the outermost edge of this thread
            if len(batch) == 1 or self._session is None:
                for item in batch:
                    item.future.set_exception(error)
                return
            logger.warning("a batch of %d texts failed, running each alone: %s", len(batch), error)
            for item in batch:
                self._run_isolating_faults([item])

    def _opened(self) -> Session:
        """Return the session, opening it if this is the first batch. A failure is final."""
        if self._open_failure is not None:
            raise self._open_failure
        if self._session is None:
            try:
                self._session = self._open_session()
            except StartupError as error:
                logger.error("%s", error)  # noqa: TRY400 - the message is the whole story
                self._open_failure = GraphUnavailableError(f"the graph can't be used: {error}")
                raise self._open_failure from error
        return self._session

    def _run_batch(self, batch: list[Item], session: Session) -> None:
        input_ids, attention_mask = pad_batch(batch, self._pad_token_id)
        names = tuple(dict.fromkeys(name for item in batch for name in item.output_names))
        started = time.monotonic()
        arrays = session.run(input_ids, attention_mask, names)
        compute_s = time.monotonic() - started
        self._count(batch, compute_s)
        results = [
            ItemResult(
                outputs=slice_item(arrays, row, item.num_tokens, item.output_names),
                queue_s=started - item.submitted_at,
                compute_s=compute_s,
            )
            for row, item in enumerate(batch)
        ]
        for item, result in zip(batch, results, strict=True):
            item.future.set_result(result)

    def _count(self, batch: list[Item], compute_s: float) -> None:
        live_tokens = sum(item.num_tokens for item in batch)
        self.num_live_tokens += live_tokens
        rate = live_tokens / max(compute_s, 1e-6)
        self._tokens_per_s = rate if self._tokens_per_s == 0 else 0.9 * self._tokens_per_s + 0.1 * rate


def pad_batch(batch: list[Item], pad_token_id: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return ids and mask, both (B, T) int64, T the longest text; padding on the right."""
    shape = (len(batch), max(item.num_tokens for item in batch))
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    for row, item in enumerate(batch):
        input_ids[row, : item.num_tokens] = item.input_ids
        attention_mask[row, : item.num_tokens] = 1
    return input_ids, attention_mask
