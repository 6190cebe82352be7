"""An engine for the time of a measurement."""

from collections.abc import Iterator
from contextlib import contextmanager

from attnlens_server.bundle import Bundle
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine

WARM_UP_TOKENS = 512  # of the longest text before measuring; some models take ten times that


@contextmanager
def running(bundle: Bundle, config: ServerConfig) -> Iterator[Engine]:
    """Start an engine, and stop it when the block ends."""
    engine = Engine(bundle, config)
    try:
        engine.start(min(WARM_UP_TOKENS, bundle.model.max_tokens))
        yield engine
    finally:
        engine.close()
