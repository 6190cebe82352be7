"""Opening of a model: verifies the bundle, then opens its main graph.

A server does this in a thread, while the other one imports the rest of the server, which takes about as long.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Self

from attnlens.published import ON_REQUEST
from attnlens_server.bundle import Bundle, Model, open_bundle
from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.engine.engine import Engine

logger = logging.getLogger(__name__)


class OpenedModel(NamedTuple):
    """A verified bundle and its engine."""

    bundle: Bundle
    max_tokens: int
    """Maximum input length in tokens, including special tokens."""
    engine: Engine


def open_model(config: ServerConfig) -> OpenedModel:
    """Open and verify the bundle, without opening a graph.

    Raises:
        StartupError: The bundle is invalid, or the engine is unavailable.
        ConfigError: An option does not fit the bundle.
    """
    bundle = open_bundle(config.bundle, config.precision)
    model = bundle.model
    max_tokens = _max_tokens(model, config)
    logger.debug(
        "bundle verified",
        extra={"bundle": str(config.bundle), "model": model.name, "version": model.version},
    )
    if ON_REQUEST in bundle.manifest.publisher.not_compared:
        logger.info(
            "the results of %s were not compared with its publisher's: %s",
            model.name,
            ON_REQUEST,
        )
    return OpenedModel(bundle, max_tokens, Engine(bundle, config))


class Opening:
    """Context manager with a thread that opens a model and the sessions of its main graph."""

    def __init__(self, config: ServerConfig) -> None:
        """Start the thread."""
        self._thread = ThreadPoolExecutor(1, "opening")
        self._model = self._thread.submit(open_model, config)
        self._graph = self._thread.submit(self._open_graph)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort the opening, and wait for the thread."""
        if not self._graph.done() and self._model.exception() is None:
            self._model.result().engine.stop_opening()
        self._thread.shutdown()

    def model(self) -> OpenedModel:
        """Wait for the model.

        Raises:
            StartupError: The bundle is invalid, or the engine is unavailable.
            ConfigError: An option does not fit the bundle.
        """
        return self._model.result()

    def wait(self) -> None:
        """Wait for the sessions of the main graph.

        Raises:
            StartupError: A session cannot be opened.
        """
        self._graph.result()

    def _open_graph(self) -> None:
        if self._model.exception() is None:
            _, max_tokens, engine = self._model.result()
            engine.open(max_tokens)


def _max_tokens(model: Model, config: ServerConfig) -> int:
    if config.max_tokens is None:
        return model.max_tokens
    limit = model.max_positions
    if config.max_tokens > limit:
        raise ConfigError(
            f"max_tokens is {config.max_tokens}: use 1 to {limit}, the number of positions of the model"
        )
    return config.max_tokens
