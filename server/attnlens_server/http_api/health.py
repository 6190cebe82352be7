"""Health checks over HTTP."""

from collections.abc import Callable

from attnlens_server.http_api.exchange import NATIVE, HttpRequest, HttpResponse, Route, encode_json


class HealthRoutes:
    """`/healthz` answers while the process runs, `/readyz` while it accepts requests.

    Args:
        check_serving: Raises NotReadyError or ShuttingDownError unless the server accepts requests.
    """

    def __init__(self, check_serving: Callable[[], None]) -> None:
        self._check_serving = check_serving

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("GET", "/healthz", self.live, NATIVE, is_public=True),
            Route("GET", "/readyz", self.ready, NATIVE, is_public=True),
        ]

    async def live(self, request: HttpRequest) -> HttpResponse:
        """Return 200."""
        del request
        return HttpResponse(encode_json({"status": "ok"}))

    async def ready(self, request: HttpRequest) -> HttpResponse:
        """Return 200, or 503 while the server starts or shuts down, or after the engine has failed."""
        self._check_serving()
        return await self.live(request)
