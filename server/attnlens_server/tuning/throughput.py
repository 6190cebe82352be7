"""Throughput and latency of an engine."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, cycle
from queue import SimpleQueue
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from attnlens_server.bundle import Bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine, Item, RequestedOutput
from attnlens_server.engine.engine import Lanes
from attnlens_server.tuning.workload import Workload

if TYPE_CHECKING:
    from concurrent.futures import Future

WARM_UP_TOKENS = 512  # maximum length of the warm-up text; some models accept ten times as many tokens
WARM_UP_FRACTION = 0.25  # duration relative to the measured time
MIN_BATCHES = 2  # per lane
MIN_LATENCIES = 5


@contextmanager
def running(bundle: Bundle, config: ServerConfig) -> Iterator[Engine]:
    """Start an engine, and close it at the end of the block."""
    engine = Engine(bundle, config)
    try:
        engine.start(min(WARM_UP_TOKENS, bundle.model.max_tokens))
        yield engine
    finally:
        engine.close()


class _Completion(NamedTuple):
    """Completion of a text: time, tokens computed so far, index of the text, and error if it failed."""

    at: float
    num_tokens: int
    text_index: int
    error: BaseException | None


def measure_throughput(
    lanes: Lanes,
    workload: Workload,
    requested: Sequence[RequestedOutput],
    *,
    num_lanes: int,
    num_in_flight: int,
    seconds: float,
    now: Callable[[], float] = time.monotonic,
) -> float:
    """Return tokens per second, padding excluded, while `num_in_flight` texts are waiting or running.

    The measurement takes at least `seconds` and MIN_BATCHES batches per lane. It begins and ends with the end
    of a batch, so that a batch is counted either completely or not at all.

    Raises:
        Exception: A text failed.
    """
    pending: dict[int, Future[Any]] = {}
    completed: SimpleQueue[_Completion] = SimpleQueue()

    def complete(index: int, future: "Future[Any]") -> None:
        # Called by a lane. The future is not queued, so that large results are freed soon.
        error = None if future.cancelled() else future.exception()
        completed.put(_Completion(now(), lanes.num_live_tokens, index, error))

    texts, indices = cycle(workload.input_ids), count()
    begin = now() + WARM_UP_FRACTION * seconds
    ends: list[_Completion] = []  # completed batches
    try:
        while now() < begin + seconds or len(ends) <= MIN_BATCHES * num_lanes:
            while len(pending) < num_in_flight:
                item, index = Item(next(texts), tuple(requested)), next(indices)
                pending[index] = item.future
                item.future.add_done_callback(partial(complete, index))
                lanes.submit([item])
            completion = completed.get()
            del pending[completion.text_index]
            if completion.error is not None:
                raise completion.error
            if completion.at >= begin and (not ends or completion.num_tokens > ends[-1].num_tokens):
                ends.append(completion)
    finally:
        for future in pending.values():
            future.cancel()
    return (ends[-1].num_tokens - ends[0].num_tokens) / (ends[-1].at - ends[0].at)


def measure_latency_ms(engine: Engine, make_item: Callable[[], Item], seconds: float) -> float:
    """Return the median latency of a text on an otherwise idle engine, in milliseconds."""
    latencies_ms: list[float] = []
    end = time.monotonic() + seconds
    while len(latencies_ms) <= MIN_LATENCIES or time.monotonic() < end:
        begin = time.perf_counter()
        [future] = engine.submit([make_item()], kind=engine.main_kind)
        future.result()
        latencies_ms.append(1000 * (time.perf_counter() - begin))
    return median(latencies_ms[1:])  # The first text may wait for batches that are still running.
