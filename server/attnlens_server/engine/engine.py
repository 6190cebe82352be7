"""The engine of one model: two or three graphs, each with lanes of its own.

Embeddings, attention and contributions are separate graphs with separate threads, so that a request for one
of the latter, which are heavier, never stands in the way of one for embeddings.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import onnxruntime
from loky import cpu_count

from attnlens_server.bundle import Bundle, Kind
from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.engine.device import DeviceSession
from attnlens_server.engine.item import Item, ItemResult
from attnlens_server.engine.lanes import Lanes
from attnlens_server.engine.opening import GraphOpener
from attnlens_server.engine.scheduler import BatchLimits, LengthBuckets, Scheduler
from attnlens_server.engine.session import Session, resolve_provider
from attnlens_server.engine.sessions import Sessions
from attnlens_server.errors import StartupError

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

# Where throughput stops growing with the batch; on CUDA not measured yet.
DEFAULT_BATCH_TOKENS = {"cpu": 256, "cuda": 8192}
# Tensor cores want multiples of 8 in fp16, and CUDA's memory is used better with fewer different shapes.
LENGTH_MULTIPLES = {"cuda": 8}
# What runs a graph. Of attention, what nobody asked for stays on the device.
SESSIONS: Mapping[Kind, dict[str, type[Session]]] = {
    "embeddings": {"cpu": Session, "cuda": Session},
    "attention": {"cpu": Session, "cuda": DeviceSession},
    "contributions": {"cpu": Session, "cuda": Session},
}
TRIAL_LENGTHS = (8, 128)  # and for embeddings the longest


class Engine:
    """Runs token ids through a bundle's graphs.

    Attributes:
        provider: where it runs; with `auto`, the CPU's settings replace those of CUDA where `start` finds
            that CUDA does not run the graphs.
        max_batch_tokens: tokens of one batch, padding included.
        lanes: what runs each graph.
    """

    def __init__(self, bundle: Bundle, config: ServerConfig) -> None:
        """Prepare; nothing is opened yet.

        Raises:
            StartupError: CUDA was asked for and is not in this build of ONNX Runtime, or is to run int8.
            ConfigError: there are more lanes than threads, on a CPU.
        """
        self._bundle = bundle
        self._config = config
        self._prepare(resolve_provider(config.provider, bundle.precision))

    def _prepare(self, provider: Literal["cpu", "cuda"]) -> None:
        self.provider: Literal["cpu", "cuda"] = provider
        self._threads = self._config.threads or cpu_count(only_physical_cores=True)
        self._num_lanes = self._config.lanes or (self._threads if provider == "cpu" else 1)
        if provider == "cpu":
            _check_threads(self._threads, self._num_lanes)
        self.max_batch_tokens = self._config.max_batch_tokens or DEFAULT_BATCH_TOKENS[provider]
        model, lane_bytes = self._bundle.model, self._config.max_attention_bytes // self._num_lanes
        attention_limits = BatchLimits(
            min(self.max_batch_tokens, max(1, lane_bytes // max(1, model.row_bytes))),
            max_square_tokens=lane_bytes // max(1, model.pair_bytes),
        )
        limits: dict[Kind, BatchLimits] = {
            "embeddings": BatchLimits(self.max_batch_tokens),
            "attention": attention_limits,
        }
        if model.contributions is not None and self._config.explain:
            limits["contributions"] = attention_limits  # the sweep keeps the weights of all layers
        logger.debug(
            "engine",
            extra={
                "provider": provider,
                "threads": self._threads,
                "lanes": self._num_lanes,
                "cpus": cpu_count(),
                "max_batch_tokens": self.max_batch_tokens,
                "graphs": " ".join(limits),
                "onnxruntime": onnxruntime.__version__,
            },
        )
        self._openers: dict[Kind, GraphOpener] = {kind: self._opener(kind) for kind in limits}
        self.lanes: dict[Kind, Lanes] = {kind: self._make_lanes(kind, limits[kind]) for kind in limits}

    def submit(self, items: Sequence[Item], *, kind: Kind) -> "list[Future[ItemResult]]":
        """Let items wait for the graph that has what they want; return their futures.

        Raises:
            ShuttingDownError: the engine is closed.
        """
        self.lanes[kind].submit(items)
        return [item.future for item in items]

    def retry_after_s(self, kind: Kind) -> float:
        """Return when those should come back who find no place."""
        return self.lanes[kind].retry_after_s()

    @property
    def num_threads(self) -> int:
        """Threads of a batch that has the whole machine; lanes divide them."""
        return self._threads

    @property
    def num_lanes(self) -> int:
        """How many batches of a graph may run side by side."""
        return self._num_lanes

    @property
    def execution_providers(self) -> tuple[str, ...]:
        """Those of ONNX Runtime that are in use, the preferred one first; empty until `start`."""
        return self.lanes["embeddings"].sessions.providers

    @property
    def can_run_attention(self) -> bool:
        """False where the graph with attention can't be used, for good or until it is tried again."""
        return self.lanes["attention"].sessions.are_usable

    @property
    def has_contributions(self) -> bool:
        """Whether there are lanes for them: the bundle has the graph, and the configuration allows it."""
        return "contributions" in self.lanes

    def watch(self, on_death: Callable[[], object], on_attention: Callable[[bool], None]) -> None:
        """Be told, in any thread, when a lane has died, and when attention can't be run or can again."""
        for lanes in self.lanes.values():
            lanes.on_death = on_death
        self.lanes["attention"].sessions.on_change = on_attention

    def start(self, max_tokens: int) -> float:
        """Open and try the embeddings sessions, start the lanes, return the seconds it took.

        The sessions with attention are opened by the first request that needs them; with CUDA now, so that
        the server does not start unless CUDA really runs both graphs. Those with contributions are always
        opened by the first request.

        Raises:
            StartupError: a session can't be opened as asked.
        """
        started = time.monotonic()
        try:
            self._open(max_tokens)
        except StartupError as error:
            if self.provider == "cpu" or self._config.provider != "auto":
                raise
            logger.warning("provider auto falls back to the CPU: %s", error)
            self._prepare("cpu")
            self._open(max_tokens)
        for lanes in self.lanes.values():
            lanes.start()
        return time.monotonic() - started

    def _open(self, max_tokens: int) -> None:
        shortest, longer = (min(length, max_tokens) for length in TRIAL_LENGTHS)
        padded = (shortest, shortest // 2 + 1)
        self._openers["embeddings"].trial_batches = (padded, (longer,))
        self._openers["embeddings"].longest_trial = max_tokens
        for kind in self.lanes.keys() - {"embeddings"}:
            self._openers[kind].trial_batches = (padded,)
        self.lanes["embeddings"].sessions.open_all()
        if self.provider == "cuda":
            self.lanes["attention"].sessions.open_all()

    def stop_opening(self) -> None:
        """Make what is being opened fail, and what would be opened later."""
        for opener in self._openers.values():
            opener.stop()

    def close(self) -> None:
        """Run what waits, then stop. What waits for a session that is not open yet fails."""
        self.stop_opening()
        for lanes in self.lanes.values():
            lanes.close()

    def _opener(self, kind: Kind) -> GraphOpener:
        return GraphOpener(
            self._bundle,
            kind,
            SESSIONS[kind][self.provider],
            self.provider,
            device_id=self._config.device_id,
            timeout_s=self._config.start_timeout_s,
        )

    def _make_lanes(self, kind: Kind, limits: BatchLimits) -> Lanes:
        opener, model = self._openers[kind], self._bundle.model
        multiple = LENGTH_MULTIPLES.get(self.provider)
        sessions = Sessions(
            opener, threads=self._threads, num_lanes=self._num_lanes, check_files=opener.check_files
        )
        buckets = LengthBuckets(multiple, model.max_positions) if multiple else None
        return Lanes(
            kind,
            sessions,
            Scheduler(limits, buckets),
            num_lanes=self._num_lanes,
            pad_token_id=model.pad_token_id,
        )


def _check_threads(threads: int, lanes: int) -> None:
    """Make sure that lanes have threads to divide, and warn where threads have no cores.

    Raises:
        ConfigError: there are more lanes than threads.
    """
    if lanes > threads:
        raise ConfigError(
            f"lanes is {lanes} with {threads} threads: a lane needs a thread, so it must be from 1 to "
            f"{threads}. Leave it out for one a thread, or give more threads"
        )
    num_cpus = cpu_count()
    if threads > num_cpus:
        logger.warning(
            "%d threads on %d CPUs that this process may use: they wait for each other. Leave out --threads "
            "for one a physical core",
            threads,
            num_cpus,
        )
