"""A model as an ASGI application, for any ASGI server or inside another application."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from attnlens_server.access import open_access
from attnlens_server.access.files import watch
from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.core.process import State
from attnlens_server.grpc_api.identity import Gate
from attnlens_server.http_api.host import HttpHost
from attnlens_server.http_api.identity import AccessGate, Authenticate, HeaderGate, bearer_keys
from attnlens_server.served_model import ServedModel

__all__ = ["ModelApp", "bearer_keys"]

logger = logging.getLogger(__name__)


class ModelApp:
    """ASGI application with all HTTP routes of one model.

    The lifespan of the application opens and closes the model. If the application is mounted in another one,
    which does not run the lifespan of mounted applications, use `open` in the lifespan of the outer one.

    Args:
        config: Configuration. Options for gRPC, ports and TLS have no effect.
        authenticate: Checks the headers of each request and may return its sender, such as `bearer_keys`. If
            None, `api_keys` and `policy` of the configuration apply.

    Attributes:
        served: The model while it is open, for hosts that also serve gRPC.

    Raises:
        ConfigError: `authenticate` is given, and the configuration has keys or a policy.
    """

    def __init__(self, config: ServerConfig, *, authenticate: Authenticate | None = None) -> None:
        if authenticate is not None and (config.api_keys or config.policy):
            raise ConfigError("api_keys or policy is set in addition to authenticate: use one of them")
        self._config = config
        self._authenticate = authenticate
        self._app: ASGIApp | None = None
        self.served: ServedModel | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI connection."""
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif self._app is None:
            raise RuntimeError(
                "the model is not open: run the lifespan of the application, or use `async with app.open()` "
                "in the lifespan of the application that it is mounted in"
            )
        else:
            await self._app(scope, receive, send)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["ModelApp"]:
        """Open the model while the block runs.

        Raises:
            StartupError: The bundle is invalid, or a graph cannot be loaded.
            ConfigError: An option does not fit the bundle.
            RuntimeError: The model is open.
        """
        if self._app is not None:
            raise RuntimeError("the model is open already: open it once")
        loop = asyncio.get_running_loop()
        served = await loop.run_in_executor(None, ServedModel, self._config)
        service, engine = served.service, served.engine
        access = open_access(self._config, served.model.name, has_certificates=False)
        served.calls.identify = Gate(access).identify
        gate = HeaderGate(self._authenticate) if self._authenticate else AccessGate(access)
        host = HttpHost(service, served.methods, engine, served.bundle, self._config, served.observer, gate)
        lag = served.supervisor.lag
        host.metrics.add_lag(lag.BOUNDS_S, lag.counts, lambda: lag.sum_s)
        tasks = [asyncio.create_task(task) for task in (watch(access.files), served.supervisor.run())]
        try:
            await loop.run_in_executor(None, served.start)
            fail = partial(setattr, service, "state", State.FAILED)
            engine.watch(partial(loop.call_soon_threadsafe, fail), lambda _: None)
            service.process.state, self._app, self.served = State.SERVING, host.app, served
            logger.info("serving %s", served.model.name)
            yield self
        finally:
            for task in tasks:
                task.cancel()
            service.process.state, self._app, self.served = State.DRAINING, None, None
            await host.stop(0)
            await loop.run_in_executor(None, engine.close)
            service.process.workers.close()

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self.open())
            except Exception as error:  # noqa: BLE001 - the ASGI server reports it and exits
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})
