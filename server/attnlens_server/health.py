"""grpc.health.v1: one state for the whole process, told to whoever asks or watches.

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
    """NOT_SERVING from the start, until `set_serving`, and for good after `shut_down`."""

    def __init__(self, service_names: Sequence[str]) -> None:
        self._service_names = frozenset({"", *service_names})
        # Protects: watchers hear of every change of these two.
        self._changed = asyncio.Condition()
        self._status = HealthCheckResponse.NOT_SERVING
        self._is_shut_down = False

    async def set_serving(self) -> None:
        """From now on all services are SERVING."""
        async with self._changed:
            self._status = HealthCheckResponse.SERVING
            self._changed.notify_all()

    async def shut_down(self) -> None:
        """From now on all services are NOT_SERVING; watches end after saying so."""
        async with self._changed:
            self._status = HealthCheckResponse.NOT_SERVING
            self._is_shut_down = True
            self._changed.notify_all()

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        if request.service not in self._service_names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return HealthCheckResponse(status=self._status)

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:
        is_known = request.service in self._service_names
        sent = None
        while not self._is_shut_down or sent != self._status:
            sent = self._status
            told = sent if is_known else HealthCheckResponse.SERVICE_UNKNOWN
            await context.write(HealthCheckResponse(status=told))
            async with self._changed:
                await self._changed.wait_for(functools.partial(self._has_news, sent))

    def _has_news(self, sent: HealthCheckResponse.ServingStatus) -> bool:
        return self._is_shut_down or self._status != sent
