"""Stages of a request whose trace is sampled: validate, tokenize, queue, run, build.

Services mark stages as they go. This does nothing unless the current request is sampled.
"""

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

MAX_STAGES = 64
"""Further stages are omitted, for example in a stream with many texts."""


class Stage(NamedTuple):
    """A stage of a request, with times on the monotonic clock."""

    name: str
    started: float
    ended: float


class Ran(Protocol):
    """Times of a text in the engine."""

    @property
    def queue_s(self) -> float:
        """Time in the queue, in seconds."""

    @property
    def compute_s(self) -> float:
        """Compute time of the batch, in seconds."""


@dataclass(slots=True)
class Stages:
    """Stages of one request.

    Attributes:
        trace_id: Trace of the request.
        ended: End of the last stage, on the monotonic clock. At first, the start of the request.
        stages: Stages in the order of their ends.
    """

    trace_id: int
    ended: float
    stages: list[Stage] = field(default_factory=list)

    def add(self, name: str, started: float, ended: float) -> None:
        """Add a stage."""
        if len(self.stages) < MAX_STAGES:
            self.stages.append(Stage(name, started, ended))


_current: ContextVar[Stages | None] = ContextVar("stages", default=None)


def use_stages(stages: Stages | None) -> None:
    """Mark the stages of `stages` in this task and its children."""
    _current.set(stages)


def mark(name: str) -> None:
    """End a stage that has lasted since the end of the previous one."""
    stages = _current.get()
    if stages is not None:
        now = time.monotonic()
        stages.add(name, stages.ended, now)
        stages.ended = now


def mark_run(results: Sequence[Ran], submitted: float) -> None:
    """End a run of the engine for several texts.

    The stage `queue` ends when the last text leaves the queue, and `run` begins when the first one does.
    """
    stages = _current.get()
    if stages is not None and results:
        waits = [result.queue_s for result in results]
        stages.add("queue", submitted, submitted + max(waits))
        end = submitted + max(result.queue_s + result.compute_s for result in results)
        stages.add("run", submitted + min(waits), end)
        stages.ended = time.monotonic()
