"""grpc.health.v1: the state of each service, told to whoever asks or watches.

The health package's own asyncio servicer forgets its other watchers when one of them leaves, and its
watches never end, so that a server with a watcher could not drain before its timeout.
"""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

Context = grpc.aio.ServicerContext[Any, Any]


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # its package ships no types
    """Every service is NOT_SERVING from the start, until `set_serving`, and for good after `shut_down`."""

    def __init__(self, service_names: Sequence[str]) -> None:
        # Protects: watchers hear of every change of these two.
        self._changed = asyncio.Condition()
        self._statuses = dict.fromkeys(("", *service_names), HealthCheckResponse.NOT_SERVING)
        self._is_shut_down = False

    async def set_serving(self, *service_names: str, is_serving: bool = True) -> None:
        """From now on these services, or all where none is named, are SERVING, or are not."""
        status = HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING
        async with self._changed:
            if not self._is_shut_down:
                self._statuses.update(dict.fromkeys(service_names or self._statuses, status))
                self._changed.notify_all()

    async def shut_down(self) -> None:
        """From now on all services are NOT_SERVING; watches end after saying so."""
        async with self._changed:
            self._statuses = dict.fromkeys(self._statuses, HealthCheckResponse.NOT_SERVING)
            self._is_shut_down = True
            self._changed.notify_all()

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return HealthCheckResponse(status=self._statuses[request.service])

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:
        sent = None
        while not self._is_shut_down or sent != self._status_of(request.service):
            sent = self._status_of(request.service)
            await context.write(HealthCheckResponse(status=sent))
            async with self._changed:
                await self._changed.wait_for(functools.partial(self._has_news, request.service, sent))

    def _status_of(self, service: str) -> HealthCheckResponse.ServingStatus:
        return self._statuses.get(service, HealthCheckResponse.SERVICE_UNKNOWN)

    def _has_news(self, service: str, sent: HealthCheckResponse.ServingStatus) -> bool:
        return self._is_shut_down or self._status_of(service) != sent
