"""The engine of one model: two sessions, each with its own worker, behind one admission.

Embeddings and attention weights are separate graphs with separate threads, so that a request for
attention, which is heavier, never stands in the way of one for embeddings.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Literal

import numpy as np

from attnlens.v1.manifest_pb2 import GraphKind
from attnlens_server.bundle import Bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine.item import Item, ItemResult
from attnlens_server.engine.pack import BatchLimits
from attnlens_server.engine.session import Session, resolve_provider
from attnlens_server.engine.worker import SessionWorker
from attnlens_server.errors import OverloadedError, StartupError

logger = logging.getLogger(__name__)

MIN_RETRY_S = 0.05
MAX_RETRY_S = 10.0


class Engine:
    """Runs token ids through a bundle's graphs.

    `reserve` belongs to one thread, the event loop; `submit` may be called from any.
    """

    def __init__(self, bundle: Bundle, config: ServerConfig) -> None:
        """Prepare; nothing is opened yet.

        Raises:
            StartupError: CUDA was asked for and is not in this build of ONNX Runtime.
        """
        architecture = bundle.manifest.architecture
        self._bundle = bundle
        self._config = config
        self.provider: Literal["cpu", "cuda"] = resolve_provider(config.provider)
        self.execution_providers: tuple[str, ...] = ()
        self._num_reserved = 0
        attention_bytes = 4 * architecture.num_layers * architecture.num_heads  # of one pair of tokens
        self.embeddings = self._worker(GraphKind.GRAPH_KIND_EMBEDDINGS, BatchLimits(config.max_batch_tokens))
        self.attentions = self._worker(
            GraphKind.GRAPH_KIND_ATTENTIONS,
            BatchLimits(
                config.max_batch_tokens,
                max_square_tokens=config.max_attention_bytes // attention_bytes,
            ),
        )

    def start(self, max_tokens: int) -> float:
        """Open the embeddings session, run it once on short and long texts, return the seconds it took.

        Raises:
            StartupError: the session can't be opened as asked.
        """
        started = time.monotonic()
        self.embeddings.start()
        self.attentions.start()
        for length in {min(8, max_tokens), min(128, max_tokens), max_tokens}:
            item = Item(np.zeros(length, dtype=np.int64), ("last_hidden_state",))
            self.embeddings.queue.put([item])
            item.future.result()
        return time.monotonic() - started

    def close(self) -> None:
        """Run what waits, then stop both workers."""
        self.embeddings.close()
        self.attentions.close()

    @contextmanager
    def reserve(self, num_texts: int) -> Iterator[None]:
        """Hold places for `num_texts` texts while the block runs.

        Raises:
            OverloadedError: there are not as many free places; says when to try again.
        """
        free = self._config.max_queue - self._num_reserved
        if num_texts > free:
            raise OverloadedError(
                f"{self._num_reserved} texts wait or run, at most {self._config.max_queue} may, and the "
                f"request has {num_texts}: try again later",
                retry_after_s=self._estimate_wait_s(),
            )
        self._num_reserved += num_texts
        try:
            yield
        finally:
            self._num_reserved -= num_texts

    def submit(self, items: Sequence[Item], *, attention: bool) -> list[Future[ItemResult]]:
        """Queue items for the embeddings or the attention graph.

        Raises:
            ShuttingDownError: the engine is closed.
        """
        worker = self.attentions if attention else self.embeddings
        worker.queue.put(items)
        return [item.future for item in items]

    def _estimate_wait_s(self) -> float:
        waits = [
            worker.queue.num_tokens / worker.tokens_per_s
            for worker in (self.embeddings, self.attentions)
            if worker.tokens_per_s > 0
        ]
        return min(max([*waits, MIN_RETRY_S]), MAX_RETRY_S)

    def _worker(self, kind: GraphKind.ValueType, limits: BatchLimits) -> SessionWorker:
        name = "attentions" if kind == GraphKind.GRAPH_KIND_ATTENTIONS else "embeddings"
        pad_token_id = self._bundle.manifest.architecture.pad_token_id
        return SessionWorker(name, lambda: self._open_session(kind), limits, pad_token_id)

    def _open_session(self, kind: GraphKind.ValueType) -> Session:
        try:
            session = self._open_session_on(self.provider, kind)
        except StartupError as error:
            if self.provider == "cpu" or self._config.provider != "auto":
                raise
            logger.warning("provider auto falls back to the CPU: %s", error)
            self.provider = "cpu"
            session = self._open_session_on("cpu", kind)
        self.execution_providers = session.providers
        return session

    def _open_session_on(self, provider: Literal["cpu", "cuda"], kind: GraphKind.ValueType) -> Session:
        return Session(
            self._bundle.graph_path(kind),
            provider,
            threads=self._config.intra_op_threads,
            device_id=self._config.device_id,
        )
