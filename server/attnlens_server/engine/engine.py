"""The engine of one model: two sessions, each with a worker of its own.

Embeddings and attention weights are separate graphs with separate threads, so that a request for
attention, which is heavier, never stands in the way of one for embeddings.
"""

import logging
import time
from pathlib import Path
from typing import Literal

import numpy as np

from attnlens_server.bundle import Bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine.item import Item
from attnlens_server.engine.pack import BatchLimits
from attnlens_server.engine.session import CPU, Session, resolve_provider
from attnlens_server.engine.worker import SessionWorker
from attnlens_server.errors import GraphUnavailableError, StartupError

logger = logging.getLogger(__name__)


class Engine:
    """Runs token ids through a bundle's graphs: put items into the queue of a worker.

    Attributes:
        embeddings: runs the graph that returns `last_hidden_state` alone.
        attentions: runs the graph that returns the attention weights, too.
    """

    def __init__(self, bundle: Bundle, config: ServerConfig) -> None:
        """Prepare; nothing is opened yet.

        Raises:
            StartupError: CUDA was asked for and is not in this build of ONNX Runtime.
        """
        architecture = bundle.manifest.architecture
        self._bundle = bundle
        self._config = config
        self._provider: Literal["cpu", "cuda"] = resolve_provider(config.provider)
        attention_bytes = 4 * architecture.num_layers * architecture.num_heads  # of one pair of tokens
        self.embeddings = SessionWorker(
            "embeddings",
            self._open_embeddings,
            BatchLimits(config.max_batch_tokens),
            architecture.pad_token_id,
        )
        self.attentions = SessionWorker(
            "attentions",
            self._open_attentions,
            BatchLimits(
                config.max_batch_tokens,
                max_square_tokens=config.max_attention_bytes // attention_bytes,
            ),
            architecture.pad_token_id,
        )

    def worker(self, *, attention: bool) -> SessionWorker:
        """Return the worker that runs texts with or without attention."""
        return self.attentions if attention else self.embeddings

    def start(self, max_tokens: int) -> float:
        """Open the embeddings session, run it once on short and long texts, return the seconds it took.

        The attention session is opened by the first request that needs it; but where CUDA was asked for by
        name, now, so that the server does not start unless CUDA really runs both.

        Raises:
            StartupError: a session can't be opened as asked.
        """
        started = time.monotonic()
        self.embeddings.start()
        self.attentions.start()
        for length in sorted({min(8, max_tokens), min(128, max_tokens), max_tokens}):
            _run_once(self.embeddings, length)
        if self._config.provider == "cuda":
            _run_once(self.attentions, min(8, max_tokens))
        return time.monotonic() - started

    def close(self) -> None:
        """Run what waits, then stop both workers."""
        self.embeddings.close()
        self.attentions.close()

    def _open_attentions(self) -> Session:
        self._bundle.verify()  # its hash was taken at the start, which may be long ago
        return self._open_session(self._bundle.attentions_path)

    def _open_embeddings(self) -> Session:
        session = self._open_session(self._bundle.embeddings_path)
        if self._bundle.precision == "fp16" and session.providers[0] == CPU:
            logger.warning(
                "precision fp16 on the CPU: ONNX Runtime computes it in fp32 with casts between, less exact "
                "than the fp32 graph; it is for a GPU, use --precision fp32 here"
            )
        return session

    def _open_session(self, graph: Path) -> Session:
        try:
            return self._open_session_on(self._provider, graph)
        except StartupError as error:
            if self._provider == "cpu" or self._config.provider != "auto":
                raise
            logger.warning("provider auto falls back to the CPU: %s", error)
            return self._open_session_on("cpu", graph)

    def _open_session_on(self, provider: Literal["cpu", "cuda"], graph: Path) -> Session:
        return Session(
            graph,
            provider,
            threads=self._config.intra_op_threads,
            device_id=self._config.device_id,
        )


def _run_once(worker: SessionWorker, length: int) -> None:
    item = Item(np.zeros(length, dtype=np.int64), ("last_hidden_state",))
    worker.queue.put([item])
    try:
        item.future.result()
    except GraphUnavailableError as error:
        raise StartupError(str(error)) from error
