"""How long the graph alone takes for batches of one length: B texts of T tokens."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from attnlens_server.bundle import Model
from attnlens_server.engine.batch import GraphInputs
from attnlens_server.engine.runtimes.runtime import Session

LENGTHS = (16, 64, 128)  # and the longest that the model takes
BATCHES = (1, 4, 16, 64, 256)
MAX_CPU_TOKENS, MAX_GPU_TOKENS = 2048, 65536  # of a batch of several texts
MIN_RUNS = 3
PATIENCE = 10  # times the time of a cell, after which one run will do


@dataclass(frozen=True, slots=True)
class Cell:
    """What a batch of texts of one length took.

    Attributes:
        threads: on how many.
        length: tokens of each text.
        batch: number of texts.
        ms: milliseconds, the median.
    """

    threads: int
    length: int
    batch: int
    ms: float

    @property
    def tokens_per_s(self) -> float:
        """Of this batch."""
        return 1000 * self.batch * self.length / self.ms


def grid_shapes(model: Model, max_attention_bytes: int | None, *, is_on_cpu: bool) -> list[tuple[int, int]]:
    """Return the (B, T) to time: within a number of tokens, and within one of bytes of attention weights."""
    max_tokens = MAX_CPU_TOKENS if is_on_cpu else MAX_GPU_TOKENS

    def fits(batch: int, length: int) -> bool:
        attention_bytes = (model.pair_bytes * length + model.row_bytes) * batch * length
        if max_attention_bytes is not None and attention_bytes > max_attention_bytes:
            return False
        return batch == 1 or batch * length <= max_tokens

    lengths = sorted({min(length, model.max_tokens) for length in (*LENGTHS, model.max_tokens)})
    return [(batch, length) for length in lengths for batch in BATCHES if fits(batch, length)]


def time_grid(
    open_session: Callable[[int], Session],
    thread_counts: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    output_names: Sequence[str],
    seconds: float,
) -> Iterator[Cell]:
    """Time every shape on every number of threads: `seconds` each, MIN_RUNS runs unless very slow."""
    for threads in thread_counts:
        session = open_session(threads)
        for batch, length in shapes:
            yield Cell(threads, length, batch, _time(session, batch, length, output_names, seconds))


def _time(session: Session, batch: int, length: int, output_names: Sequence[str], seconds: float) -> float:
    ones = np.ones((batch, length), dtype=np.int64)
    inputs = GraphInputs(ones, ones, np.zeros_like(ones))
    durations_ms: list[float] = []
    started = time.monotonic()
    while True:
        elapsed = time.monotonic() - started
        enough = seconds if len(durations_ms) > MIN_RUNS else PATIENCE * seconds
        if len(durations_ms) > 1 and elapsed >= enough:
            return median(durations_ms[1:])  # the first run reserves memory
        begin = time.perf_counter()
        session.run(inputs, output_names)
        durations_ms.append(1000 * (time.perf_counter() - begin))
