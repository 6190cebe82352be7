"""The engine of one model: two graphs, each with a worker of its own.

Embeddings and attention weights are separate graphs with separate threads, so that a request for
attention, which is heavier, never stands in the way of one for embeddings.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from loky import cpu_count

from attnlens_server.bundle import Bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine.device import DeviceSession
from attnlens_server.engine.item import Item
from attnlens_server.engine.pack import BatchLimits, LengthBuckets
from attnlens_server.engine.session import Session, resolve_provider
from attnlens_server.engine.sessions import Sessions
from attnlens_server.engine.worker import SessionWorker
from attnlens_server.errors import GraphUnavailableError, StartupError

logger = logging.getLogger(__name__)

# Where throughput stops growing with the batch; on CUDA not measured yet.
DEFAULT_BATCH_TOKENS = {"cpu": 256, "cuda": 8192}
# Tensor cores want multiples of 8 in fp16, and CUDA's memory is used better with fewer different shapes.
LENGTH_MULTIPLES = {"cuda": 8}
# What runs the graphs. Of attention weights, what nobody asked for stays on the device.
EMBEDDINGS_SESSIONS: Mapping[str, type[Session]] = {"cpu": Session, "cuda": Session}
ATTENTIONS_SESSIONS: Mapping[str, type[Session]] = {"cpu": Session, "cuda": DeviceSession}


class Engine:
    """Runs token ids through a bundle's graphs: put items into the queue of a worker.

    Attributes:
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
        self._provider: Literal["cpu", "cuda"] = resolve_provider(config.provider)
        if bundle.precision == "int8" and self._provider == "cuda":
            raise StartupError(
                "precision int8 is for a CPU, CUDA has no kernels for its products: use --provider cpu, or "
                "--precision fp16 or fp32"
            )
        self._threads = config.threads or cpu_count(only_physical_cores=True)
        self._num_lanes = config.lanes or (self._threads if self._provider == "cpu" else 1)
        self.max_batch_tokens = config.max_batch_tokens or DEFAULT_BATCH_TOKENS[self._provider]
        architecture = bundle.manifest.architecture
        pair_bytes = 4 * architecture.num_layers * architecture.num_heads  # weights of one pair of tokens
        max_pairs = config.max_attention_bytes // pair_bytes // self._num_lanes
        self.embeddings = self._make_worker(
            "embeddings", self._open_embeddings, BatchLimits(self.max_batch_tokens)
        )
        self.attentions = self._make_worker(
            "attentions",
            self._open_attentions,
            BatchLimits(self.max_batch_tokens, max_square_tokens=max_pairs),
        )

    def worker(self, *, attention: bool) -> SessionWorker:
        """Return the worker that runs texts with or without attention."""
        return self.attentions if attention else self.embeddings

    def start(self, max_tokens: int) -> float:
        """Open the embeddings sessions, run them on short and long texts, return the seconds it took.

        The attention sessions are opened by the first request that needs it; but where CUDA was asked for by
        name, now, so that the server does not start unless CUDA really runs both graphs.

        Raises:
            StartupError: a session can't be opened as asked.
        """
        started = time.monotonic()
        self.embeddings.start()
        self.attentions.start()
        try:
            self.embeddings.sessions.open_all()
        except GraphUnavailableError as error:
            raise StartupError(str(error)) from error
        for length in sorted({min(8, max_tokens), min(128, max_tokens), max_tokens}):
            _run_once(self.embeddings, length)
        if self._config.provider == "cuda":
            _run_once(self.attentions, min(8, max_tokens), "attentions.0")
        return time.monotonic() - started

    def close(self) -> None:
        """Run what waits, then stop both workers."""
        self.embeddings.close()
        self.attentions.close()

    def _make_worker(
        self, name: str, open_session: Callable[[int], Session], limits: BatchLimits
    ) -> SessionWorker:
        architecture = self._bundle.manifest.architecture
        multiple = LENGTH_MULTIPLES.get(self._provider)
        return SessionWorker(
            name,
            Sessions(open_session, threads=self._threads, num_lanes=self._num_lanes),
            limits,
            num_lanes=self._num_lanes,
            pad_token_id=architecture.pad_token_id,
            buckets=LengthBuckets(multiple, architecture.max_position_embeddings) if multiple else None,
        )

    def _open_attentions(self, threads: int) -> Session:
        self._bundle.verify()  # its hash was taken at the start, which may be long ago
        return self._open_session(self._bundle.attentions_path, threads, ATTENTIONS_SESSIONS)

    def _open_embeddings(self, threads: int) -> Session:
        return self._open_session(self._bundle.embeddings_path, threads, EMBEDDINGS_SESSIONS)

    def _open_session(self, graph: Path, threads: int, classes: Mapping[str, type[Session]]) -> Session:
        device_id = self._config.device_id
        try:
            return classes[self._provider](graph, self._provider, threads=threads, device_id=device_id)
        except StartupError as error:
            if self._provider == "cpu" or self._config.provider != "auto":
                raise
            logger.warning(
                "provider auto falls back to the CPU, but keeps the batches of CUDA (see --provider cpu): %s",
                error,
            )
            return classes["cpu"](graph, "cpu", threads=threads, device_id=device_id)


def _run_once(worker: SessionWorker, length: int, output_name: str = "last_hidden_state") -> None:
    item = Item(np.zeros(length, dtype=np.int64), (output_name,))
    worker.queue.put([item])
    try:
        item.future.result()
    except GraphUnavailableError as error:
        raise StartupError(str(error)) from error
