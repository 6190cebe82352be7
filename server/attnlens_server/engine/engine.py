"""Inference engine for one model: two to four graphs, each with its own lanes.

Embeddings, attention, contributions and logits are separate graphs with separate threads, so the heavier
requests for attention and contributions do not block requests for embeddings and logits. A lane is a worker
thread that takes batches from the queue of its graph, runs them and returns the results.
"""

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attnlens.reductions import Reduced
from attnlens_server.bundle import Bundle, Kind
from attnlens_server.clients import ANONYMOUS, Client
from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.engine.batch import (
    Batch,
    BatchOutputs,
    Item,
    ItemResult,
    RequestedOutput,
    is_finite,
    pad,
    reductions,
)
from attnlens_server.engine.cpus import count_cpus
from attnlens_server.engine.runtimes.runtime import Cancellation, Runtime, Session
from attnlens_server.engine.scheduler import BatchLimits, ItemQueue, LengthBuckets, Scheduler, Slots
from attnlens_server.engine.sessions import GraphOpener, Sessions, ThreadChoice
from attnlens_server.errors import DeadlineError, InternalError, InvalidResultError, StartupError

logger = logging.getLogger(__name__)

_Parts = tuple[tuple[npt.NDArray[np.float32], ...], tuple[Reduced, ...]]

MIN_RETRY_S = 0.05
MAX_RETRY_S = 10.0
LANE_NICENESS = 5  # a third of the CPU time of a thread with niceness 0
LONG_BATCH_S = 1.0  # batches that run for longer are stopped if nobody needs their results
STOP_INTERVAL_S = 0.25  # between two searches for such batches
HANGING_S = 2.0  # maximum time for a stopped batch to end before `Lanes.close` no longer waits for it


class _StoppedError(Exception):
    """A batch was stopped."""


@dataclass(frozen=True, slots=True)
class RunningBatch:
    """A batch that a lane runs.

    Attributes:
        items: Items of the batch.
        started: `time.monotonic` time at which it started.
        min_s: Minimum time after which it may be stopped.
        cancellation: Stops the batch.
    """

    items: Sequence[Item]
    started: float
    min_s: float
    cancellation: Cancellation = field(default_factory=Cancellation)

    def is_abandoned(self, now: float) -> bool:
        """Return whether nobody needs the results."""
        return all(item.is_dead(now) for item in self.items)


def _ignore_death() -> None:
    """Do nothing. Default for `Lanes.on_death`."""


class Lanes:
    """A queue and the threads that run its items in batches, on shared sessions.

    Attributes:
        sessions: Sessions that run the batches.
        on_death: Called when a lane ends because of an internal error, after all waiting items have failed.
    """

    def __init__(
        self,
        name: str,
        sessions: Sessions,
        scheduler: Scheduler,
        *,
        num_lanes: int,
        pad_token_id: int,
        slots: Slots | None = None,
        has_express_lane: bool = False,
        checks_results: bool = False,
    ) -> None:
        self.sessions = sessions
        self.on_death: Callable[[], object] = _ignore_death
        self._queue = ItemQueue(num_lanes, slots)
        self._scheduler = scheduler
        self._pad_token_id = pad_token_id
        self._checks_results = checks_results  # whether to count batches with NaN or infinity
        # Protects the counters against concurrent writes. Readers do not acquire the lock, so one counter may
        # include a batch that another does not include yet.
        self._counting = threading.Lock()
        self.num_live_tokens = 0
        self.num_computed_tokens = 0  # padding included
        self.num_batches = 0
        self.num_items = 0
        self.num_bad_batches = 0  # consecutive ones whose first text has NaN or infinity in its results
        self.num_stopped = 0  # batches that were stopped, which the other counters do not include
        self.compute_s = 0.0  # sum over all batches, including those that ran at the same time
        self._tokens_per_s = 0.0  # moving average over all lanes
        self._num_lanes = num_lanes
        self._thread_choice = ThreadChoice()
        # Each lane adds and removes its own batch. Other threads only read.
        self._running: dict[int, RunningBatch] = {}
        self._threads = [
            threading.Thread(target=self._run_lane, name=f"{name}-{lane}", daemon=True)
            for lane in range(num_lanes)
        ]
        if has_express_lane:
            run = partial(self._run_lane, is_express=True)
            self._threads.append(threading.Thread(target=run, name=f"{name}-express", daemon=True))

    # --- worker threads ---------------------------------------------------------------------------

    def _run_lane(self, *, is_express: bool = False) -> None:
        """Run batches until the queue is closed. If one lane fails, all lanes stop.

        The express lane only runs texts of small calls, concurrently with the batches of other lanes. It gets
        more CPU time than they do.
        """
        batch: Batch | None = None
        take = self._queue.take_light if is_express else self._queue.take
        if not is_express:
            lower_priority()
        try:
            while batch := take(self._scheduler.choose):
                try:
                    self._run(batch)
                finally:
                    if not is_express:
                        self._queue.release()
                batch = None  # otherwise, an idle lane keeps the results of its last batch in memory
        except BaseException as error:
            logger.critical("a lane died: the server cannot continue", exc_info=True)
            fail_items(batch.items if batch else (), error)
            self._queue.fail_all(lambda: InternalError("the engine has stopped: retry with another server"))
            self.on_death()

    def _run(self, batch: Batch) -> None:
        """Run a batch and resolve the futures of its items.

        If the batch fails, its items run one by one, so that one item cannot make the others fail.
        """
        session = None
        can_isolate = False
        try:
            length = self._scheduler.padded_length(max(item.num_tokens for item in batch.items))
            uses_all = batch.has_whole_machine and self._needs_all_threads(len(batch.items) * length)
            session = self.sessions.get(has_whole_machine=uses_all)
            results = self._compute(batch, length, session, uses_all_threads=uses_all)
            for item, result in zip(batch.items, results, strict=True):
                if result is None:
                    item.future.set_exception(InvalidResultError())
                else:
                    item.future.set_result(result)
            del item, result, results
        except _StoppedError:
            stopped = DeadlineError("the call was cancelled, or its deadline passed, while its texts ran")
            fail_items(batch.items, stopped)
        except Exception as error:  # noqa: BLE001 - a failed batch must not end the lane
            can_isolate = session is not None and len(batch.items) > 1
            if session is None:
                self._queue.give_back(batch.items)
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
        del batch  # errors reference the frames of called functions and, through them, this frame

    def _needs_all_threads(self, num_tokens: int) -> bool:
        """Return whether a batch that has the machine to itself is faster with all threads."""
        return not self.sessions.is_side_by_side_open or self._thread_choice.uses_all(num_tokens)

    def _compute(
        self, batch: Batch, length: int, session: Session, *, uses_all_threads: bool
    ) -> "list[ItemResult | None]":
        """Run a batch. Return the result of each item, or None if it contains NaN or infinity."""
        items = batch.items
        inputs = pad(items, length, self._pad_token_id)
        names = tuple(dict.fromkeys(name for item in items for name in item.output_names))
        started = time.monotonic()
        # A batch is only stopped if it has taken longer than opening a session, where that is necessary.
        min_s = LONG_BATCH_S if session.survives_cancellation else self.sessions.opening_s + LONG_BATCH_S
        running = self._running[threading.get_ident()] = RunningBatch(items, started, min_s)
        for item in items:
            item.started_at = started
        try:
            outputs = session.run(inputs, names, running.cancellation)
            parts = [_parts(outputs, row, running) for row in range(len(items))]
        except Exception as error:
            if running.cancellation.is_over:
                self._count_stopped(running)
                if not session.survives_cancellation:
                    self.sessions.discard(session)
                raise _StoppedError from error
            raise
        finally:
            del self._running[threading.get_ident()]
        compute_s = time.monotonic() - started
        if batch.has_whole_machine:
            self._thread_choice.add(inputs.input_ids.size, compute_s, used_all=uses_all_threads)
        num_parallel = 1 if uses_all_threads else self._num_lanes
        self._count(items, inputs.input_ids.size, compute_s, num_parallel)
        if logger.isEnabledFor(logging.DEBUG):
            _log_batch(batch, inputs.input_ids.size, compute_s)
        if self._checks_results:
            self.num_bad_batches = 0 if parts[0] is not None else self.num_bad_batches + 1
        return [
            None
            if part is None
            else ItemResult(part[0], queue_s=started - item.queued_at, compute_s=compute_s, reduced=part[1])
            for item, part in zip(items, parts, strict=True)
        ]

    # --- other threads ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, items: Sequence[Item], client: Client = ANONYMOUS) -> None:
        """Queue items of a client.

        Raises:
            ShuttingDownError: The lanes are closed.
        """
        self._queue.put(items, client)

    def stop_abandoned(self) -> None:
        """Stop long batches whose items are all abandoned or past their deadlines."""
        now = time.monotonic()
        for running in list(self._running.values()):
            if now - running.started >= running.min_s and running.is_abandoned(now):
                running.cancellation.end()

    def close(self) -> bool:
        """Run all waiting items, then stop. Return whether all lanes have ended."""
        self._queue.close()
        for thread in self._threads:
            while thread.is_alive() and not self._is_hanging(thread):
                thread.join(STOP_INTERVAL_S)
        return not any(thread.is_alive() for thread in self._threads)

    def _is_hanging(self, thread: threading.Thread) -> bool:
        running = self._running.get(thread.ident or 0)
        stopped_at = None if running is None else running.cancellation.ended_at
        return stopped_at is not None and time.monotonic() - stopped_at >= HANGING_S

    @property
    def longest_batch_s(self) -> float:
        """Elapsed time of the oldest running batch in seconds, or 0."""
        started = min((running.started for running in list(self._running.values())), default=None)
        return 0.0 if started is None else time.monotonic() - started

    @property
    def limits(self) -> BatchLimits:
        """Limits of a batch."""
        return self._scheduler.limits

    @property
    def num_waiting_tokens(self) -> int:
        """Number of waiting tokens. May already be stale."""
        return self._queue.num_tokens

    @property
    def num_idle(self) -> int:
        """Number of idle lanes. May already be stale."""
        return self._queue.num_idle

    def retry_after_s(self) -> float:
        """Return a retry delay for rejected requests, from MIN_RETRY_S to MAX_RETRY_S."""
        wait_s = self.num_waiting_tokens / self._tokens_per_s if self._tokens_per_s > 0 else 0.0
        return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)

    def _count(
        self, items: Sequence[Item], computed_tokens: int, compute_s: float, num_parallel: int
    ) -> None:
        live_tokens = sum(item.num_tokens for item in items)
        rate = live_tokens * num_parallel / max(compute_s, 1e-6)
        with self._counting:
            self.num_batches += 1
            self.num_items += len(items)
            self.compute_s += compute_s
            self.num_live_tokens += live_tokens
            self.num_computed_tokens += computed_tokens
            self._tokens_per_s = rate if self._tokens_per_s == 0 else 0.9 * self._tokens_per_s + 0.1 * rate

    def _count_stopped(self, running: RunningBatch) -> None:
        compute_s = time.monotonic() - running.started
        with self._counting:
            self.num_stopped += 1
            self.compute_s += compute_s
        logger.debug(
            "batch stopped", extra={"texts": len(running.items), "compute_ms": round(1000 * compute_s, 2)}
        )


def _parts(outputs: BatchOutputs, row: int, running: RunningBatch) -> _Parts | None:
    """Return the requested outputs and reductions of an item, or None if a value is NaN or infinite.

    Raises:
        _StoppedError: The batch was stopped.
    """
    if running.cancellation.is_over:
        raise _StoppedError
    item = running.items[row]
    arrays = tuple(outputs.part(row, item.num_tokens, requested) for requested in item.requested)
    if not all(is_finite(array) for array in arrays):
        return None
    try:
        return arrays, reductions(outputs, row, item)
    except InvalidResultError:
        return None


def lower_priority() -> None:
    """Give the calling thread less CPU time than the event loop and the express lanes have."""
    if sys.platform == "linux":  # elsewhere, niceness belongs to processes
        with suppress(OSError):  # not permitted in some sandboxes
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LANE_NICENESS)


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


if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

PROBE_TOKENS = 8
TRIAL_LENGTHS = (8, 128)  # the main graph is also tested at the maximum length


class Engine:
    """Runs token ids through a bundle's graphs.

    Attributes:
        runtime: Inference runtime. With the provider `auto`, `start` replaces CUDA with the CPU if CUDA
            cannot run the graphs.
        max_batch_tokens: Maximum number of tokens of a batch, including padding.
        max_tokens: Maximum number of tokens of a text.
        main_kind: Graph of the model's main results, which is open while the engine runs.
        lanes: Lanes of each graph.
    """

    def __init__(self, bundle: Bundle, config: ServerConfig) -> None:
        """Initialize without opening a graph.

        Raises:
            StartupError: The configured runtime is not installed or does not support the configuration.
            ConfigError: There are more lanes than threads on a CPU.
        """
        self._bundle = bundle
        self.main_kind = bundle.model.main_kind
        self._config = config
        self.max_tokens = bundle.model.max_tokens
        self._opening_s: float | None = None
        self._closed = threading.Event()
        self._stopper = threading.Thread(target=self._stop_abandoned, name="stopper", daemon=True)
        self._prepare(choose_runtime(config, bundle))

    def _prepare(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._threads = self._config.threads or count_cpus(only_physical_cores=True)
        self._num_lanes = self._config.lanes or (self._threads if runtime.is_on_cpu else 1)
        if runtime.is_on_cpu:
            _check_threads(self._threads, self._num_lanes)
        self.max_batch_tokens = self._config.max_batch_tokens or runtime.batch_tokens
        model, lane_bytes = self._bundle.model, self._config.max_attention_bytes // self._num_lanes
        attention_limits = BatchLimits(
            min(self.max_batch_tokens, max(1, lane_bytes // max(1, model.row_bytes))),
            max_square_tokens=lane_bytes // max(1, model.pair_bytes),
        )
        limits: dict[Kind, BatchLimits] = {
            model.main_kind: BatchLimits(self.max_batch_tokens),
            "embeddings": BatchLimits(self.max_batch_tokens),
            "attention": attention_limits,
        }
        if model.contributions is not None and self._config.explain:
            limits["contributions"] = attention_limits  # the graph keeps the attention weights of all layers
        if not runtime.mixes_lengths:
            limits = {kind: replace(limit, max_padding_share=0.0) for kind, limit in limits.items()}
        logger.debug(
            "engine",
            extra={
                "runtime": f"{runtime.name} {runtime.version}",
                "device": runtime.device,
                "precision": self._bundle.precision,
                "threads": self._threads,
                "lanes": self._num_lanes,
                "cpus": count_cpus(),
                "max_batch_tokens": self.max_batch_tokens,
                "graphs": " ".join(limits),
            },
        )
        self._slots = Slots(self._num_lanes) if runtime.is_on_cpu else None
        self._openers: dict[Kind, GraphOpener] = {kind: self._opener(kind) for kind in limits}
        self.lanes: dict[Kind, Lanes] = {kind: self._make_lanes(kind, limits[kind]) for kind in limits}

    def submit(
        self, items: Sequence[Item], *, kind: Kind, client: Client = ANONYMOUS
    ) -> "list[Future[ItemResult]]":
        """Queue items of a client for a graph and return their futures.

        Raises:
            ShuttingDownError: The engine is closed.
        """
        self.lanes[kind].submit(items, client)
        return [item.future for item in items]

    def probe(self) -> Item:
        """Queue a valid text for the main graph and return its item.

        Raises:
            ShuttingDownError: The engine is closed.
        """
        model = self._bundle.model
        output = model.outputs.logits or model.outputs.hidden_state(self.main_kind)
        ids = np.arange(1, min(PROBE_TOKENS, self.max_tokens) + 1, dtype=np.int64) * 11 % model.vocab_size
        item = Item(ids, (RequestedOutput(output.name, output.layout),))
        self.submit([item], kind=self.main_kind)
        return item

    def retry_after_s(self, kind: Kind) -> float:
        """Return the retry delay for rejected requests, in seconds."""
        return self.lanes[kind].retry_after_s()

    @property
    def num_threads(self) -> int:
        """Number of threads, which lanes divide among concurrent batches."""
        return self._threads

    @property
    def num_lanes(self) -> int:
        """Maximum number of concurrent batches of a graph."""
        return self._num_lanes

    @property
    def execution_providers(self) -> tuple[str, ...]:
        """ONNX Runtime execution providers, the preferred one first. Empty before `start`."""
        return self.lanes[self.main_kind].sessions.providers

    @property
    def runs_on(self) -> str:
        """Preferred execution provider, or `OpenVINO` and its device. Valid after `start`."""
        return next(iter(self.execution_providers), f"OpenVINO {self.runtime.device}")

    @property
    def can_run_attention(self) -> bool:
        """Whether the attention graph is usable. False after a failure to open it."""
        return self.lanes["attention"].sessions.are_usable

    @property
    def has_contributions(self) -> bool:
        """Whether the bundle has a contributions graph and the configuration enables it."""
        return "contributions" in self.lanes

    def watch(self, on_death: Callable[[], object], on_attention: Callable[[bool], None]) -> None:
        """Set callbacks, which any thread may call.

        Args:
            on_death: Called when a lane ends because of an internal error.
            on_attention: Called with whether the attention graph is usable, whenever that changes.
        """
        for lanes in self.lanes.values():
            lanes.on_death = on_death
        self.lanes["attention"].sessions.on_change = on_attention

    def start(self, max_tokens: int) -> float:
        """Open the sessions of the main graph, unless they are open, and start the lanes.

        Returns:
            Time to open the sessions, in seconds.

        Raises:
            StartupError: A session cannot be opened with the configured runtime.
        """
        if self._opening_s is None:
            self.open(max_tokens)
        assert self._opening_s is not None  # noqa: S101 - set by `open`
        for lanes in self.lanes.values():
            lanes.start()
        self._stopper.start()
        return self._opening_s

    def open(self, max_tokens: int) -> None:
        """Open the sessions of the main graph.

        The main graph computes the logits of a classifier, and the embeddings of other models. On a CPU, the
        first request for token vectors or attention opens the sessions of their graph. On a GPU they are
        opened here, so that the server does not start unless the GPU can run these graphs. The first request
        for contributions opens the contributions sessions.

        Raises:
            StartupError: A session cannot be opened with the configured runtime.
        """
        started = time.monotonic()
        self.max_tokens = max_tokens
        try:
            self._open(max_tokens)
        except StartupError as error:
            fallback = self.runtime.fallback()
            if fallback is None:
                raise
            logger.warning("provider auto falls back to the CPU: %s", error)
            self._prepare(fallback)
            self._open(max_tokens)
        self._opening_s = time.monotonic() - started

    def _open(self, max_tokens: int) -> None:
        shortest, longer = (min(length, max_tokens) for length in TRIAL_LENGTHS)
        padded = (shortest, shortest // 2 + 1)
        main_kind = self.main_kind
        self._openers[main_kind].trial_batches = (padded, (longer,))
        self._openers[main_kind].longest_trial = max_tokens
        if not self.runtime.is_on_cpu:
            self._openers[main_kind].max_batch_tokens = self.max_batch_tokens
        for kind in self.lanes.keys() - {main_kind}:
            self._openers[kind].trial_batches = (padded,)
        self.lanes[main_kind].sessions.open_all()
        if not self.runtime.is_on_cpu:
            for kind in ("embeddings", "attention"):
                self.lanes[kind].sessions.open_all()

    def stop_opening(self) -> None:
        """Abort all current and later attempts to open a session."""
        for opener in self._openers.values():
            opener.stop()

    def close(self) -> bool:
        """Run all waiting items, then stop. Items that wait for a session to open fail.

        Returns:
            Whether all lanes have ended. Otherwise, a graph hangs and cannot be interrupted.
        """
        self.stop_opening()
        if self._slots:
            self._slots.open()
        have_ended = all([lanes.close() for lanes in self.lanes.values()])  # noqa: C419 - closes each one
        self._closed.set()
        if self._stopper.ident is not None:
            self._stopper.join()
        return have_ended

    def _stop_abandoned(self) -> None:
        while not self._closed.wait(STOP_INTERVAL_S):
            for lanes in self.lanes.values():
                lanes.stop_abandoned()

    def _opener(self, kind: Kind) -> GraphOpener:
        return GraphOpener(self._bundle, kind, self.runtime, timeout_s=self._config.start_timeout_s)

    def _make_lanes(self, kind: Kind, limits: BatchLimits) -> Lanes:
        opener, model = self._openers[kind], self._bundle.model
        sessions = Sessions(
            opener,
            threads=self._threads,
            num_lanes=self._num_lanes,
            divides_threads=self.runtime.is_on_cpu,
            check_files=opener.check_files,
            public=opener.public,
        )
        multiple = self.runtime.length_multiple
        buckets = LengthBuckets(multiple, model.max_positions) if multiple > 1 else None
        return Lanes(
            kind,
            sessions,
            Scheduler(limits, buckets, self.runtime.batch_counts),
            num_lanes=self._num_lanes,
            pad_token_id=model.pad_token_id,
            slots=self._slots,
            has_express_lane=self.runtime.is_on_cpu,
            checks_results=kind == self.main_kind,
        )


def _check_threads(threads: int, lanes: int) -> None:
    """Validate the number of lanes, and warn if there are more threads than CPUs.

    Raises:
        ConfigError: There are more lanes than threads.
    """
    if lanes > threads:
        raise ConfigError(
            f"lanes is {lanes}, but threads is {threads}, and each lane needs a thread: use at most "
            f"{threads} lanes, omit the option, or use more threads"
        )
    num_cpus = count_cpus()
    if threads > num_cpus:
        logger.warning(
            "%d threads on %d CPUs that this process may use: they wait for each other. Omit --threads "
            "to use one per physical core",
            threads,
            num_cpus,
        )


def choose_runtime(config: ServerConfig, bundle: Bundle) -> Runtime:
    """Return the configured runtime for a bundle. Only its package is imported, to save memory.

    Raises:
        StartupError: The package is not installed, or does not support the configuration.
    """
    if config.engine == "openvino":
        from attnlens_server.engine.runtimes.openvino_runtime import OpenvinoRuntime  # noqa: PLC0415

        precision = bundle.precision
        assert precision != "fp16"  # noqa: S101 - the configuration rejects it
        return OpenvinoRuntime(config.device, precision, bundle.model.main_kind)
    from attnlens_server.engine.runtimes.onnx_runtime import OnnxRuntime  # noqa: PLC0415

    return OnnxRuntime(config.provider, config.device_id, bundle.precision)
