"""Interfaces of an inference runtime: `Runtime` opens graphs, `Session` runs one of them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy.typing as npt

from attnlens_server.bundle import Kind
from attnlens_server.config import EngineName
from attnlens_server.engine.batch import BatchOutputs, Inputs


class Value(NamedTuple):
    """An input or output declared by a graph."""

    name: str
    type: str
    """ONNX type, for example `tensor(float)`."""
    shape: tuple[int | str | None, ...]
    """Axis sizes. A symbolic or unknown size is a name or None."""


class Cancellation:
    """Cancels the current step when `end` is called, in any thread.

    Attributes:
        ended_at: `time.monotonic` time of the first call of `end`, or None.
    """

    def __init__(self) -> None:
        # Invariant: once the cancellation is over, `_cancel` is called exactly once if its step is running.
        self._changing = threading.Lock()
        self._cancel: Callable[[], None] | None = None
        self.ended_at: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether `end` was called."""
        return self.ended_at is not None

    def end(self) -> None:
        """Cancel the current step and every later one."""
        with self._changing:
            if self.ended_at is None:
                self.ended_at = time.monotonic()
            if self._cancel is not None:
                self._cancel()

    @contextmanager
    def ending_with(self, cancel: Callable[[], None]) -> Iterator[None]:
        """Run a step that `cancel` can interrupt."""
        with self._changing:
            self._cancel = cancel
            if self.is_over:
                cancel()
        try:
            yield
        finally:
            with self._changing:
                self._cancel = None


class TimeLimit(Cancellation):
    """Context manager that cancels the current step on timeout, or when `end` is called."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self._timer = threading.Timer(seconds, self.end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()


class Session(Protocol):
    """An open graph. Any number of threads can run it concurrently.

    Attributes:
        inputs: Declared inputs.
        outputs: Declared outputs.
        providers: ONNX Runtime execution providers, the preferred one first. Empty for other runtimes.
        check_results: Called after each batch. Raises if the results cannot be trusted.
        survives_cancellation: Whether the session can be used after a run was cancelled.
    """

    survives_cancellation: bool
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    providers: tuple[str, ...]
    check_results: Callable[[], None]

    def run(
        self, inputs: Inputs, output_names: Sequence[str], cancellation: Cancellation | None = None
    ) -> BatchOutputs:
        """Compute the named outputs of a batch, in fp32.

        Raises:
            Exception: The graph failed, or was cancelled before it completed.
        """

    def run_all(self, inputs: Inputs, limit: TimeLimit) -> dict[str, npt.NDArray[Any]]:
        """Compute all outputs of a batch with the graph's own data types, within `limit`."""


def feed_of(inputs: Inputs, values: Sequence[Value]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays for the declared inputs, by name."""
    arrays = inputs._asdict()
    return {value.name: arrays[value.name] for value in values if value.name in arrays}


class Division(NamedTuple):
    """How concurrent batches share the machine."""

    threads: int
    """Number of threads per batch. Ignored by devices other than the CPU."""
    num_batches: int
    """Number of concurrent batches."""


class Runtime(Protocol):
    """An inference runtime on one device.

    Attributes:
        name: Package name.
        device: Device name as the runtime reports it, for example `CPU`.
        processor: Model name of the processor. Empty if it is unknown, or not needed because the export
            measures ONNX Runtime itself.
        is_on_cpu: Whether lanes share the CPU threads. On other devices, all graphs are opened at startup, so
            that the server does not start unless the device can run them.
        batch_tokens: Batch size in tokens beyond which throughput no longer increases.
        length_multiple: Batches are padded to a multiple of this length. 1 pads to the longest text.
        mixes_lengths: Whether a text may be padded beyond the next multiple, to the length of longer texts.
        batch_counts: Allowed numbers of texts per batch, ascending from 1. Empty allows any number.
    """

    name: EngineName
    device: str
    processor: str
    is_on_cpu: bool
    batch_tokens: int
    length_multiple: int
    mixes_lengths: bool
    batch_counts: Sequence[int]

    @property
    def version(self) -> str:
        """Version of the package."""

    def open(self, kind: Kind, graph: Path, division: Division, limit: TimeLimit | None = None) -> Session:
        """Open a graph, within `limit`.

        Raises:
            StartupError: The graph cannot be opened, or does not run on the requested device and provider.
        """

    def fallback(self) -> Self | None:
        """Return the runtime to use if this one fails, or None if this one was requested explicitly."""
