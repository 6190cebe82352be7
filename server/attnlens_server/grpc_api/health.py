"""The grpc.health.v1 service.

The asyncio servicer of grpcio-health-checking drops all watchers of a service when one leaves, and its
watches never end, so a server with a watcher would not drain before its timeout.
"""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1.health import SERVICE_NAME
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from attnlens_server.grpc_api.identity import Check, accept
from attnlens_server.grpc_api.open_streams import OpenStreams

MAX_QUOTED_CHARACTERS = 100
Context = grpc.aio.ServicerContext[Any, Any]


class HealthService:
    """Health of each service: NOT_SERVING until `set_serving`, and permanently after `shut_down`.

    Args:
        service_names: Names of the services.
        streams: Limit on watches, and on requests that are received.
        check_access: Checks whether the sender of a call may see the health.
    """

    def __init__(
        self, service_names: Sequence[str], streams: OpenStreams, check_access: Check = accept
    ) -> None:
        self._streams = streams
        self._check_access = check_access
        # Guards the two attributes below and notifies watchers of changes.
        self._changed = asyncio.Condition()
        self._statuses = dict.fromkeys(("", *service_names), HealthCheckResponse.NOT_SERVING)
        self._is_shut_down = False

    async def set_serving(self, *service_names: str, is_serving: bool = True) -> None:
        """Set the status of the named services, or of all if none is named."""
        status = HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING
        async with self._changed:
            if not self._is_shut_down:
                self._statuses.update(dict.fromkeys(service_names or self._statuses, status))
                self._changed.notify_all()

    async def shut_down(self) -> None:
        """Set all services to NOT_SERVING permanently and end all watches."""
        async with self._changed:
            self._statuses = dict.fromkeys(self._statuses, HealthCheckResponse.NOT_SERVING)
            self._is_shut_down = True
            self._changed.notify_all()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register `Check` and `Watch`. `OpenStreams` receives their requests."""
        serializer = HealthCheckResponse.SerializeToString
        check: Any = self.Check
        watch: Any = self.Watch
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Check": grpc.stream_unary_rpc_method_handler(check, response_serializer=serializer),
            "Watch": grpc.stream_stream_rpc_method_handler(watch, response_serializer=serializer),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def Check(self, _: object, context: Context) -> HealthCheckResponse:
        await self._check_access(context, "Check")
        request = await self._streams.receive(HealthCheckRequest, context)
        if request.service not in self._statuses:
            quoted = repr(request.service[:MAX_QUOTED_CHARACTERS])
            known = ", ".join(map(repr, self._statuses))
            message = f"unknown service {quoted}: use one of {known}"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        return HealthCheckResponse(status=self._statuses[request.service])

    async def Watch(self, _: object, context: Context) -> None:
        await self._check_access(context, "Watch")
        request = await self._streams.receive(HealthCheckRequest, context)
        async with self._streams.hold(context):
            await self._write_changes(request, context)

    async def _write_changes(self, request: HealthCheckRequest, context: Context) -> None:
        sent = None
        while not self._is_shut_down or sent != self._status_of(request.service):
            sent = self._status_of(request.service)
            await context.write(HealthCheckResponse(status=sent))
            async with self._changed:
                await self._changed.wait_for(functools.partial(self._has_changed, request.service, sent))

    def _status_of(self, service: str) -> HealthCheckResponse.ServingStatus:
        return self._statuses.get(service, HealthCheckResponse.SERVICE_UNKNOWN)

    def _has_changed(self, service: str, sent: HealthCheckResponse.ServingStatus) -> bool:
        return self._is_shut_down or self._status_of(service) != sent
