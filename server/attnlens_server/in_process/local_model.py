"""`local`: a bundle to ask in this process, as a server is asked by a client."""

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

_NO_STALL_TIMEOUT_S = 86_400.0  # who takes a stream slowly holds up nobody but himself


class LocalSettings(TypedDict, total=False):
    """What can be set about a local model: the fields of `ServerConfig` with these names."""

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
    max_memory_bytes: int
    max_calls: int
    max_tokens: int | None
    worker_threads: int
    start_timeout_s: float


class Local(BlockingMethods):
    """A model in this process. Its methods are those of `BlockingMethods`, as those of a client are.

    Any number of threads may use it. Its own threads do not survive a fork: open one in each process.
    `close()`, or the end of a `with` block, frees it.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        timeout_s: float | None = None,
        batch_size: int = 128,
        max_in_flight: int = 4,
    ) -> None:
        """Open the bundle. See `local`, which most callers want."""
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
            may_retry=True,
            has_answered=True,
            may_restart=False,
        )
        # Cells of notebooks are run again, and nobody closes what the name meant before, with its weights and
        # threads. Of the driver, since a generator that a method has returned needs no more than that.
        weakref.finalize(self._driver, host.let_go).atexit = False

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
    """Open a bundle in this process: no port, no server, the methods and the results of the client.

    For notebooks and batch jobs. Results, limits and errors are those of a server with the same settings.
    It works inside a running event loop, where a method blocks the loop as any function does: in a
    coroutine, `await asyncio.to_thread(model.embed, texts)`.

    Args:
        bundle: the bundle directory.
        timeout_s: how long a call may take. None: no limit.
        batch_size: the most texts of one call; more become several calls.
        max_in_flight: the most calls that one method keeps running at a time.
        settings: fields of `ServerConfig`, such as `threads`, `engine`, `precision`, `max_tokens`.

    Raises:
        TypeError: there is no such setting.
        ConfigError: a setting has a value that it can't have, or that does not fit the bundle.
        StartupError: the bundle is refused, or can't be run as asked.

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
        return f"{name} is a setting of a server alone: local() listens to nobody, leave it out"
    own = [parameter for parameter in inspect.signature(local).parameters if parameter != "settings"]
    known = [*own, *LocalSettings.__annotations__]
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"local() has no setting {name!r}: " + (
        f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(known[1:])}"
    )
