"""The engine of one model: two graphs, each with a worker of its own.

Embeddings and attention weights are separate graphs with separate threads, so that a request for
attention, which is heavier, never stands in the way of one for embeddings.
"""

import logging
import time
from collections.abc import Mapping
from typing import Literal

from loky import cpu_count

from attnlens.v1.manifest_pb2 import Graph
from attnlens_server.bundle import Bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine.device import DeviceSession
from attnlens_server.engine.opening import GraphOpener
from attnlens_server.engine.pack import BatchLimits, LengthBuckets
from attnlens_server.engine.session import Session, resolve_provider
from attnlens_server.engine.sessions import Sessions
from attnlens_server.engine.worker import SessionWorker
from attnlens_server.errors import StartupError

logger = logging.getLogger(__name__)

# Where throughput stops growing with the batch; on CUDA not measured yet.
DEFAULT_BATCH_TOKENS = {"cpu": 256, "cuda": 8192}
# Tensor cores want multiples of 8 in fp16, and CUDA's memory is used better with fewer different shapes.
LENGTH_MULTIPLES = {"cuda": 8}
# What runs the graphs. Of attention weights, what nobody asked for stays on the device.
EMBEDDINGS_SESSIONS: Mapping[str, type[Session]] = {"cpu": Session, "cuda": Session}
ATTENTIONS_SESSIONS: Mapping[str, type[Session]] = {"cpu": Session, "cuda": DeviceSession}
TRIAL_LENGTHS = (8, 128)  # and for embeddings the longest


class Engine:
    """Runs token ids through a bundle's graphs: put items into the queue of a worker.

    Attributes:
        provider: where it runs; with `auto`, the CPU's settings replace those of CUDA where `start` finds
            that CUDA does not run the graphs.
        max_batch_tokens: tokens of one batch, padding included.
        embeddings: runs the graph that returns `last_hidden_state` alone.
        attentions: runs the graph that returns the attention weights, too.
    """

    def __init__(self, bundle: Bundle, config: ServerConfig) -> None:
        """Prepare; nothing is opened yet.

        Raises:
            StartupError: CUDA was asked for and is not in this build of ONNX Runtime, or is to run int8.
        """
        self._bundle = bundle
        self._config = config
        self._prepare(resolve_provider(config.provider, bundle.precision))

    def _prepare(self, provider: Literal["cpu", "cuda"]) -> None:
        self.provider: Literal["cpu", "cuda"] = provider
        self._threads = self._config.threads or cpu_count(only_physical_cores=True)
        self._num_lanes = self._config.lanes or (self._threads if provider == "cpu" else 1)
        self.max_batch_tokens = self._config.max_batch_tokens or DEFAULT_BATCH_TOKENS[provider]
        sizes = self._bundle.manifest.architecture
        pair_bytes = 4 * sizes.num_layers * sizes.num_heads  # attention weights of one pair of tokens
        max_square_tokens = self._config.max_attention_bytes // pair_bytes // self._num_lanes
        self._embeddings_opener = self._opener(self._bundle.embeddings, EMBEDDINGS_SESSIONS)
        self._attentions_opener = self._opener(self._bundle.attentions, ATTENTIONS_SESSIONS)
        self.embeddings = self._make_worker(
            "embeddings", self._embeddings_opener, BatchLimits(self.max_batch_tokens)
        )
        self.attentions = self._make_worker(
            "attentions",
            self._attentions_opener,
            BatchLimits(self.max_batch_tokens, max_square_tokens=max_square_tokens),
        )

    def worker(self, *, attention: bool) -> SessionWorker:
        """Return the worker that runs texts with or without attention."""
        return self.attentions if attention else self.embeddings

    def start(self, max_tokens: int) -> float:
        """Open and try the embeddings sessions, start the workers, return the seconds it took.

        The attention sessions are opened by the first request that needs them; with CUDA now, so that the
        server does not start unless CUDA really runs both graphs.

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
        self.embeddings.start()
        self.attentions.start()
        return time.monotonic() - started

    def _open(self, max_tokens: int) -> None:
        shortest, longer = (min(length, max_tokens) for length in TRIAL_LENGTHS)
        padded = (shortest, shortest // 2 + 1)
        self._embeddings_opener.trial_batches = (padded, (longer,))
        self._embeddings_opener.longest_trial = max_tokens
        self._attentions_opener.trial_batches = (padded,)
        self.embeddings.sessions.open_all()
        if self.provider == "cuda":
            self.attentions.sessions.open_all()

    def stop_opening(self) -> None:
        """Make what is being opened fail, and what would be opened later."""
        self._embeddings_opener.stop()
        self._attentions_opener.stop()

    def close(self) -> None:
        """Run what waits, then stop both workers. What waits for a session that is not open yet fails."""
        self.stop_opening()
        self.embeddings.close()
        self.attentions.close()

    def _opener(self, graph: Graph, classes: Mapping[str, type[Session]]) -> GraphOpener:
        return GraphOpener(
            self._bundle,
            graph,
            classes[self.provider],
            self.provider,
            device_id=self._config.device_id,
            timeout_s=self._config.start_timeout_s,
        )

    def _make_worker(self, name: str, opener: GraphOpener, limits: BatchLimits) -> SessionWorker:
        architecture = self._bundle.manifest.architecture
        multiple = LENGTH_MULTIPLES.get(self.provider)
        sessions = Sessions(
            opener, threads=self._threads, num_lanes=self._num_lanes, check_files=opener.check_files
        )
        return SessionWorker(
            name,
            sessions,
            limits,
            num_lanes=self._num_lanes,
            pad_token_id=architecture.pad_token_id,
            buckets=LengthBuckets(multiple, architecture.max_position_embeddings) if multiple else None,
        )
