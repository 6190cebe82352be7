"""`local`: a bundle in this process with the methods of a client."""

import difflib
import inspect
import os
import weakref
from pathlib import Path
from typing import TypedDict, Unpack

from attnlens_client.client import BlockingMethods
from attnlens_client.connection import check_number, check_timeout
from attnlens_client.core.calls import Session
from attnlens_server.config import EngineName, Precision, Provider, ServerConfig
from attnlens_server.in_process.driver import LocalDriver
from attnlens_server.in_process.host import Host

_NO_STALL_TIMEOUT_S = 86_400.0  # slow consumers of streams delay nobody else


class LocalSettings(TypedDict, total=False):
    """Options of a local model, which are fields of `ServerConfig`."""

    engine: EngineName
    provider: Provider
    device: str
    precision: Precision
    device_id: int
    threads: int
    lanes: int
    max_batch_tokens: int
    max_attention_bytes: int
    explain: bool
    max_computed_tokens: int
    max_concurrent_inputs: int
    max_inputs_per_request: int
    max_text_bytes: int
    max_request_text_bytes: int
    max_response_bytes: int
    max_call_memory_bytes: int | None
    max_memory_bytes: int | None
    max_calls: int
    max_tokens: int | None
    worker_threads: int
    start_timeout_s: float


class Local(BlockingMethods):
    """A model in this process with the methods of `BlockingMethods`. Thread-safe.

    Its threads do not survive a fork, so open a model in each process. `close()`, or the end of a `with`
    block, frees it.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        timeout_s: float | None = None,
        batch_size: int = 128,
        max_in_flight: int = 4,
    ) -> None:
        """Open the bundle. Most callers use `local` instead."""
        check_number("batch_size", batch_size)
        check_number("max_in_flight", max_in_flight)
        check_timeout(timeout_s)
        self._path = str(config.bundle)
        host = Host(config)
        self._driver = LocalDriver(host)
        self._session = Session(
            address=self._path,
            timeout_s=timeout_s,
            batch_size=batch_size,
            max_in_flight=max_in_flight,
            max_attempts=5,
            has_answered=True,
            may_restart=False,
        )
        # Free models that are never closed, such as those of notebook cells that run again. The finalizer
        # belongs to the driver, which generators returned by methods also reference.
        weakref.finalize(self._driver, host.close_in_background).atexit = False

    def __repr__(self) -> str:
        models = dict.fromkeys(f"model={model.name!r}" for model in self._session.models.values())
        return f"Local({', '.join([repr(self._path), *models])})"


def local(
    bundle: str | os.PathLike[str],
    *,
    timeout_s: float | None = None,
    batch_size: int = 128,
    max_in_flight: int = 4,
    **settings: Unpack[LocalSettings],
) -> Local:
    """Open a bundle in this process, with the methods and results of a client and without a server.

    For notebooks and batch jobs. Results, limits and errors equal those of a server with the same options.
    Methods block a running event loop. In a coroutine, use `await asyncio.to_thread(model.embed, texts)`.

    Args:
        bundle: Bundle directory.
        timeout_s: Timeout of a call in seconds. None means no timeout.
        batch_size: Maximum number of texts per call. More texts are split into several calls.
        max_in_flight: Maximum number of concurrent calls of one method.
        settings: Fields of `ServerConfig`, such as `threads`, `engine`, `precision` and `max_tokens`.

    Raises:
        TypeError: An option is unknown.
        ConfigError: An option is invalid or does not fit the bundle.
        StartupError: The bundle is invalid, or a graph cannot be loaded.

    >>> with attnlens_server.local(bundle, threads=1) as model:
    ...     model.embed(["The cat sat.", "It rained."]).shape
    (2, 384)
    """
    for name in settings:
        if name not in LocalSettings.__annotations__:
            raise TypeError(_unknown(name))
    config = ServerConfig(bundle=Path(bundle), stall_timeout_s=_NO_STALL_TIMEOUT_S, **settings)
    return Local(config, timeout_s=timeout_s, batch_size=batch_size, max_in_flight=max_in_flight)


def _unknown(name: str) -> str:
    if name in ServerConfig.__dataclass_fields__:
        return f"{name} is an option of servers, which local() does not support: omit it"
    own = [parameter for parameter in inspect.signature(local).parameters if parameter != "settings"]
    known = [*own, *LocalSettings.__annotations__]
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"local() has no option {name!r}: " + (
        f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(known[1:])}"
    )
