"""Health checks and metrics, on the HTTP port and on a port of their own.

A second thread with its own event loop serves the port of their own, so that probes are answered while the
event loop of the server is busy.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from attnlens_server.errors import RequestError
from attnlens_server.http_api.exchange import (
    HEALTH,
    NATIVE,
    HttpRequest,
    HttpResponse,
    Route,
    encode_json,
)
from attnlens_server.http_api.listener import HttpListener
from attnlens_server.http_api.metrics import CONTENT_TYPE, ServerMetrics
from attnlens_server.http_api.origins import OriginPolicy
from attnlens_server.listening import TcpAddress

MAX_CONNECTIONS = 32
REQUEST_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 1.0


class OperationsRoutes:
    """`/healthz` answers while the process runs, `/readyz` while it is healthy, and `/metrics`.

    Args:
        check_healthy: Raises NotReadyError or ShuttingDownError unless the server is healthy.
        metrics: Metrics of the server.
    """

    def __init__(self, check_healthy: Callable[[], None], metrics: ServerMetrics) -> None:
        self._check_healthy = check_healthy
        self._metrics = metrics

    def routes(self) -> list[Route]:
        """Return the routes. Metrics need the same credentials as requests."""
        return [
            Route("GET", "/healthz", self.live, NATIVE, HEALTH, response=dict[str, str]),
            Route("GET", "/readyz", self.ready, NATIVE, HEALTH, response=dict[str, str]),
            Route(
                "GET", "/metrics", self.metrics, NATIVE, ("Metrics",), response=str, media_type=CONTENT_TYPE
            ),
        ]

    async def live(self, _: HttpRequest | None = None) -> HttpResponse:
        """Return 200."""
        return HttpResponse(encode_json({"status": "ok"}))

    async def ready(self, _: HttpRequest | None = None) -> HttpResponse:
        """Return 200, or 503 with the reason if the server does not accept requests or is not healthy."""
        self._check_healthy()
        return await self.live()

    async def metrics(self, _: HttpRequest | None = None) -> HttpResponse:
        """Return all metrics."""
        return HttpResponse(self._metrics.text(), content_type=CONTENT_TYPE)


class OperationsServer:
    """Serves `OperationsRoutes` on a port of their own, in a thread.

    Args:
        routes: The routes.
        origins: Policy for requests for metrics.
    """

    def __init__(self, routes: OperationsRoutes, origins: OriginPolicy) -> None:
        self._origins = origins
        self._responders = {"/healthz": routes.live, "/readyz": routes.ready, "/metrics": routes.metrics}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="operations", daemon=True)
        self._listener: HttpListener | None = None

    def start(self, address: TcpAddress) -> TcpAddress:
        """Listen and return the address with its port.

        Raises:
            StartupError: The address cannot be bound.
        """
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._listen(address), self._loop).result()

    def stop(self) -> None:
        """End the thread."""
        if self._listener is not None:
            asyncio.run_coroutine_threadsafe(self._listener.stop(_STOP_TIMEOUT_S), self._loop).result()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    async def _listen(self, address: TcpAddress) -> TcpAddress:
        self._listener = HttpListener(
            self._respond, max_connections=MAX_CONNECTIONS, request_timeout_s=REQUEST_TIMEOUT_S
        )
        return await self._listener.start(address, None, "metrics-port")

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive  # bodies are ignored
        respond: Any = self._responders.get(scope["path"])
        if respond is None or scope["method"] not in ("GET", "HEAD"):
            shown = f"{scope['method'][:16]} {scope['path'][:64]}"
            message = f"{shown} is not a route of this port: use GET /healthz, /readyz or /metrics"
            response = HttpResponse(encode_json({"error": message}), 404)
        else:
            try:
                if scope["path"] == "/metrics":
                    headers = {
                        name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
                    }
                    self._origins.check("GET", headers, needs_page=False)
                response = await respond()
            except RequestError as error:
                response = HttpResponse(encode_json(NATIVE.body(error)), error.http_status)
        body = response.body if isinstance(response.body, bytes) else b""
        sent = [
            (b"content-type", response.content_type.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": response.status, "headers": sent})
        await send({"type": "http.response.body", "body": body})
